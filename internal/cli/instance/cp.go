package instance

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/instance"
	"lull/internal/lib/tartree"
)

func (c verbs) cpCommand() *cobra.Command {
	return &cobra.Command{Use: "cp SOURCE TARGET", Short: "Copy files into or out of an instance", Args: term.Args(cobra.ExactArgs(2)),
		Long: `Copy a file or directory into or out of an instance. One of SOURCE and TARGET is
NAME:PATH; a path without a slash in front is relative to the instance's working
directory. If TARGET is a directory, the copy is made inside it. What is copied in
belongs to the owner of the directory it is put in.

If the local path is -, a tar archive is written to standard output or read from
standard input and unpacked in the directory TARGET.

This works while the instance sleeps, and wakes nothing, except for a microVM: its
guest copies the files itself, so it is woken if it sleeps and must not be stopped.
A container must have been started once. Docker copies files of its containers
itself; what is copied in belongs to root there. A local path that contains a colon
needs ./ in front.`,
		Example: "  lull cp web:/etc/app - | tar t\n  lull cp config.yaml web:/etc/app/config.yaml\n  lull cp web:/var/log/app ./logs",
		RunE: func(cmd *cobra.Command, a []string) error {
			from, fromPath := inside(a[0])
			to, toPath := inside(a[1])
			if (from == "") == (to == "") {
				return term.Usage(errors.New("cannot copy: exactly one of SOURCE and TARGET must be NAME:PATH"))
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			if from != "" {
				stream, err := cl.ReadFiles(cmd.Context(), from, fromPath)
				if err != nil {
					return err
				}
				defer stream.Close()
				if a[1] == "-" {
					if c.JSON || term.IsTerminal(c.Out) {
						return term.Usage(errors.New("cannot copy to -: redirect standard output to a file or pipe, and leave out --json"))
					}
					_, err := io.Copy(c.Out, stream)
					return err
				}
				if err := unpackLocal(stream, a[1]); err != nil {
					return err
				}
			} else if a[0] == "-" {
				if err := cl.WriteFiles(cmd.Context(), to, toPath, c.In); err != nil {
					return err
				}
			} else {
				r, w := io.Pipe()
				go func() { w.CloseWithError(packLocal(w, a[0])) }()
				err := cl.WriteFiles(cmd.Context(), to, toPath, r)
				r.Close()
				if err != nil {
					return err
				}
			}
			if !c.JSON {
				fmt.Fprintf(c.Err, "Copied %s to %s.\n", a[0], a[1])
			}
			return nil
		}}
}

// inside splits NAME:PATH; name is empty for a local path.
func inside(arg string) (name, path string) {
	name, path, ok := strings.Cut(arg, ":")
	if !ok || instance.ValidName(name) != nil {
		return "", arg
	}
	return name, cmp.Or(path, ".")
}

// packLocal writes a local file or tree as a tar stream.
func packLocal(w io.Writer, path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("cannot copy: %w", err)
	}
	full, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("cannot copy %s: %w", path, err)
	}
	name := filepath.Base(full)
	if !st.IsDir() {
		f, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("cannot copy: %w", err)
		}
		defer f.Close()
		return tartree.PackFile(w, f, name)
	}
	root, err := os.OpenRoot(full)
	if err != nil {
		return fmt.Errorf("cannot copy: %w", err)
	}
	defer root.Close()
	return tartree.Pack(w, root, strings.Trim(name, string(filepath.Separator)))
}

// unpackLocal unpacks a tar stream into path if that is a directory, otherwise to a
// file called path.
func unpackLocal(r io.Reader, path string) error {
	dir, as := path, ""
	st, err := os.Stat(path)
	switch {
	case err == nil && st.IsDir():
	case err == nil, errors.Is(err, fs.ErrNotExist) && !strings.HasSuffix(path, string(filepath.Separator)):
		full, err := filepath.Abs(path)
		if err != nil {
			return fmt.Errorf("cannot copy to %s: %w", path, err)
		}
		dir, as = filepath.Dir(full), filepath.Base(full)
	default:
		return fmt.Errorf("cannot copy to %s: %w", path, err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("cannot copy to %s: %w", path, err)
	}
	defer root.Close()
	return tartree.Unpack(r, root, as, nil)
}
