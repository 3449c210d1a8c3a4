//go:build linux && !portable

package setup

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/agent"
	"lull/internal/cli/term"
)

// placed is a file or directory that install has created.
type placed struct {
	Path   string `json:"path"`
	Mode   string `json:"mode"`
	Action string `json:"action"` // written, linked, kept, removed or made
}

const (
	unitPath   = "etc/systemd/system/lull-agent.service"
	usersPath  = "etc/sysusers.d/lull.conf"
	policyPath = "etc/lull/agent.yaml"
	binDir     = "usr/local/bin"
)

func (c verbs) agentInstall() *cobra.Command {
	var root string
	var noStart bool
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install the agent on this machine", Example: "  lull agent install",
		Long: `Install the agent on this machine: this program in /usr/local/bin, a systemd unit,
the directories, and the group lull, whose members may use the control socket. An
existing policy file is kept. The Debian package lull-agent does the same.

On a machine that runs nothing else of lull, use the program lull-agent, a quarter
of the size: lull-agent install. It also answers to the name lull where that name
is free, so that lull agent status works there, too.`,
		Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := installAgent(root, c.program)
			if err != nil {
				return err
			}
			if err := makeGroup(root); err != nil {
				return err
			}
			if filepath.Clean(root) == "/" && !noStart {
				if err := systemctl("daemon-reload", "enable --now lull-agent.service"); err != nil {
					return err
				}
			}
			return c.printPlaced(l)
		},
	}
	cmd.Flags().StringVar(&root, "root", "/", "install into the system under this directory")
	cmd.Flags().BoolVar(&noStart, "no-start", false, "do not enable and start the unit")
	return cmd
}

func (c verbs) agentUninstall() *cobra.Command {
	var root string
	var purge bool
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Uninstall the agent from this machine", Example: "  lull agent uninstall",
		Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if filepath.Clean(root) == "/" {
				if err := systemctl("disable --now lull-agent.service"); err != nil {
					return err
				}
			}
			l, err := removeAgent(root, c.program, purge)
			if err != nil {
				return err
			}
			if filepath.Clean(root) == "/" {
				if err := systemctl("daemon-reload"); err != nil {
					return err
				}
			}
			return c.printPlaced(l)
		},
	}
	cmd.Flags().StringVar(&root, "root", "/", "uninstall from the system under this directory")
	cmd.Flags().BoolVar(&purge, "purge", false, "also remove the policy file, the state and the history")
	return cmd
}

func (c verbs) printPlaced(l []placed) error {
	return c.Print(l, func(w io.Writer) {
		for _, p := range l {
			fmt.Fprintf(w, "%-8s %s %s\n", p.Action, p.Mode, p.Path)
		}
	})
}

// installAgent writes the agent's files. It does not copy the program if a package
// has installed it.
func installAgent(root, program string) ([]placed, error) {
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot find this program: %w", err)
	}
	var l []placed
	for _, d := range []struct {
		path string
		mode fs.FileMode
	}{{"etc/lull", 0o755}, {"var/lib/lull", 0o755}, {"var/lib/lull/agent", 0o700}} {
		path := filepath.Join(root, d.path)
		if err := os.MkdirAll(path, d.mode); err != nil {
			return l, fmt.Errorf("cannot create a directory of the agent: %w", err)
		}
		if err := os.Chmod(path, d.mode); err != nil {
			return l, fmt.Errorf("cannot close a directory of the agent: %w", err)
		}
		l = append(l, placed{path, fmt.Sprintf("%04o", d.mode), "made"})
	}
	path := "/" + filepath.Join(binDir, program)
	if self == "/usr/bin/"+program || self == path {
		path = self
	} else if l, err = place(l, filepath.Join(root, path), 0o755, nil, self); err != nil {
		return l, err
	}
	command := path + " agent"
	if program == Slim {
		command = path
		if l, err = alias(l, filepath.Join(root, filepath.Dir(path), "lull")); err != nil {
			return l, err
		}
	}
	policy := filepath.Join(root, policyPath) // readable by root only, because a webhook's address is a secret
	if _, err := os.Lstat(policy); err == nil {
		l = append(l, placed{policy, "-", "kept"})
	} else if l, err = place(l, policy, 0o600, []byte(agent.Example()), ""); err != nil {
		return l, err
	}
	if l, err = place(l, filepath.Join(root, usersPath), 0o644, []byte(sysusers), ""); err != nil {
		return l, err
	}
	return place(l, filepath.Join(root, unitPath), 0o644, []byte(agentUnit(command)), "")
}

// alias links the name lull to Slim, unless lull itself is installed.
func alias(l []placed, path string) ([]placed, error) {
	err := os.Symlink(Slim, path)
	if errors.Is(err, fs.ErrExist) {
		return l, nil
	}
	if err != nil {
		return l, fmt.Errorf("cannot install %s: %w", path, err)
	}
	return append(l, placed{path, "-", "linked"}), nil
}

// place writes a file atomically. The content is that of the file from or, if from is
// empty, content.
func place(l []placed, path string, mode fs.FileMode, content []byte, from string) ([]placed, error) {
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil && from != "" {
		content, err = os.ReadFile(from)
	}
	temporary := path + ".new"
	if err == nil {
		err = os.WriteFile(temporary, content, mode)
	}
	if err == nil {
		err = os.Chmod(temporary, mode) // regardless of the umask
	}
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return l, errors.Join(fmt.Errorf("cannot install %s: %w", path, err), ignoreMissing(os.Remove(temporary)))
	}
	return append(l, placed{path, fmt.Sprintf("%04o", mode), "written"}), nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// makeGroup creates the group whose members may use the agent.
func makeGroup(root string) error {
	if b, err := os.ReadFile(filepath.Join(root, "etc/group")); err == nil && strings.Contains("\n"+string(b), "\n"+agent.Group+":") {
		return nil
	}
	cmd := exec.Command("systemd-sysusers", "--root="+root, "lull.conf")
	if _, err := exec.LookPath("systemd-sysusers"); err != nil {
		cmd = exec.Command("groupadd", "--system", "--prefix", root, agent.Group)
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot create group %s: %w: %.300s", agent.Group, err, out)
	}
	return nil
}

// systemctl runs systemctl commands if systemd runs this machine.
func systemctl(commands ...string) error {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return nil
	}
	for _, line := range commands {
		if out, err := exec.Command("systemctl", strings.Fields(line)...).CombinedOutput(); err != nil {
			return fmt.Errorf("cannot run systemctl %s: %w: %.300s", line, err, out)
		}
	}
	return nil
}

func removeAgent(root, program string, purge bool) ([]placed, error) {
	paths := []string{unitPath, usersPath, filepath.Join(binDir, program)}
	if to, _ := os.Readlink(filepath.Join(root, binDir, "lull")); to == Slim && program == Slim {
		paths = append(paths, filepath.Join(binDir, "lull"))
	}
	if purge {
		paths = append(paths, "etc/lull/agent.yaml", "var/lib/lull/agent", "run/lull/agent.sock", "run/lull/warning")
	}
	var l []placed
	for _, p := range paths {
		path := filepath.Join(root, p)
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return l, fmt.Errorf("cannot uninstall: %w", err)
		}
		l = append(l, placed{path, "-", "removed"})
	}
	for _, p := range []string{"etc/lull", "var/lib/lull"} {
		_ = os.Remove(filepath.Join(root, p)) // only if it is empty
	}
	return l, nil
}
