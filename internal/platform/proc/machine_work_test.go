package proc

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// TestProcessesReal checks that a real program is found by its name, and a script
// by its file name, while it runs and not afterwards.
func TestProcessesReal(t *testing.T) {
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	w := &Work{}
	name := fmt.Sprintf("lull-work-%d", os.Getpid())
	script := filepath.Join(t.TempDir(), name+".sh")
	errtest.None(t, os.WriteFile(script, []byte("read -r line\n"), 0o755))
	state := func(names ...string) idle.State { return w.Processes(time.Now(), names, nil).State }
	for what, c := range map[string]struct {
		cmd  *exec.Cmd
		name string
	}{
		"a program": {exec.Command("bash", "-c", "exec -a "+name+" cat"), name},
		"a script":  {exec.Command("sh", script), name + ".sh"},
	} {
		t.Run(what, func(t *testing.T) {
			if s := state(c.name); s != idle.Quiet {
				t.Fatalf("before: %s", s)
			}
			in, err := c.cmd.StdinPipe()
			errtest.None(t, err)
			errtest.None(t, c.cmd.Start())
			waittest.Until(t, "the process is seen", func() bool { return state(c.name) == idle.Active })
			if s := state(c.name + "x"); s != idle.Quiet {
				t.Errorf("another name: %s", s)
			}
			in.Close()
			c.cmd.Wait()
			if r := w.Processes(time.Now(), []string{c.name}, nil); r.State != idle.Quiet {
				t.Errorf("after: %+v", r)
			}
		})
	}
}

// procTree creates a fake /proc.
func procTree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, "proc", name)
		errtest.None(t, os.MkdirAll(filepath.Dir(path), 0o755))
		errtest.None(t, os.WriteFile(path, []byte(text), 0o644))
	}
	return root
}

func cmdline(w ...string) string { return strings.Join(w, "\x00") + "\x00" }

// TestProfiles checks which command lines the profiles match and which they do
// not.
func TestProfiles(t *testing.T) {
	for line, want := range map[string]string{
		cmdline("/usr/bin/python3", "-m", "torch.distributed.run", "x.py"):          "ml-training",
		cmdline("/opt/conda/bin/python", "/opt/conda/bin/torchrun", "--nproc", "8"): "ml-training",
		cmdline("python3", "train.py"):                                              "ml-training",
		cmdline("/usr/lib/R/bin/exec/R", "--no-save"):                               "data-analysis",
		cmdline("/usr/bin/samtools", "sort"):                                        "data-analysis",
		cmdline("/usr/bin/bash"):                                                    "",
		cmdline("vim", "notes-about-training.txt"):                                  "",
		"": "", // a kernel thread
	} {
		w := &Work{Root: procTree(t, map[string]string{"77/cmdline": line, "77/comm": "x\n"})}
		for profile := range Profiles {
			wanted := idle.Quiet
			if profile == want {
				wanted = idle.Active
			}
			if r := w.Processes(time.Now(), nil, []string{profile}); r.State != wanted {
				t.Errorf("%q by %s: %+v", line, profile, r)
			}
		}
	}
	if r := (&Work{}).Processes(time.Now(), nil, []string{"made-up"}); r.State != idle.Unknown {
		t.Errorf("a profile that is not there: %+v", r)
	}
	if r := (&Work{Root: t.TempDir()}).Processes(time.Now(), []string{"x"}, nil); r.State != idle.Unknown {
		t.Errorf("no /proc: %+v", r)
	}
}

// TestPorts checks that the signal is active only while a client on another
// machine has an established connection to one of the ports, and unknown if the
// tables cannot be read.
func TestPorts(t *testing.T) {
	const head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	line := func(local, remote, state string) string {
		return fmt.Sprintf("   0: %s %s %s 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n", local, remote, state)
	}
	for name, c := range map[string]struct {
		tcp, tcp6 string
		want      idle.State
	}{
		"a client":              {head + line("0100000A:22B8", "0200000A:D431", "01"), "", idle.Active},
		"listening":             {head + line("00000000:22B8", "00000000:0000", "0A"), "", idle.Quiet},
		"closing":               {head + line("0100000A:22B8", "0200000A:D431", "06"), "", idle.Quiet},
		"another port":          {head + line("0100000A:22B9", "0200000A:D431", "01"), "", idle.Quiet},
		"from the machine":      {head + line("0100007F:22B8", "0100007F:D431", "01"), "", idle.Quiet},
		"by IPv6":               {"", head + line("00000000000000000000000000000000:22B8", "B80D0120000000000000000001000000:D431", "01"), idle.Active},
		"from ::1":              {"", head + line("00000000000000000000000001000000:22B8", "00000000000000000000000001000000:D431", "01"), idle.Quiet},
		"from mapped 127.0.0.1": {"", head + line("0000000000000000FFFF00000100007F:22B8", "0000000000000000FFFF00000100007F:D431", "01"), idle.Quiet},
		"damaged":               {head + "   0: x y 01\n", "", idle.Unknown},
		"not the file":          {"hello\n", "", idle.Unknown},
		"none":                  {"", "", idle.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{"x": ""}
			for file, text := range map[string]string{"net/tcp": c.tcp, "net/tcp6": c.tcp6} {
				if text != "" {
					files[file] = text
				}
			}
			w := &Work{Root: procTree(t, files)}
			if r := w.Ports(time.Now(), []string{"8888", "22"}); r.State != c.want {
				t.Errorf("%+v, want %s", r, c.want)
			}
		})
	}
	if r := (&Work{}).Ports(time.Now(), []string{"http"}); r.State != idle.Unknown {
		t.Errorf("a port that is none: %+v", r)
	}
}

// TestServers checks that a Jupyter, RStudio or VS Code server is active while it
// computes, quiet while it is only open, and unknown at its first reading.
func TestServers(t *testing.T) {
	stat := func(ticks, start int) string {
		return fmt.Sprintf("77 (a) b) S 1 77 77 0 -1 4194560 100 0 0 0 %d 0 0 0 20 0 1 0 %d 1000000 100 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n", ticks, start)
	}
	for _, line := range []string{cmdline("/usr/bin/python3", "-m", "ipykernel_launcher", "-f", "k.json"), cmdline("/usr/lib/rstudio-server/bin/rsession", "-u", "a"),
		cmdline("/home/a/.vscode-server/bin/x/node", "server-main.js"), cmdline("/usr/bin/code-server")} {
		root := procTree(t, map[string]string{"77/cmdline": line, "77/comm": "x\n", "77/stat": stat(100, 5)})
		set := func(text string) {
			errtest.None(t, os.WriteFile(filepath.Join(root, "proc/77/stat"), []byte(text), 0o644))
		}
		w := &Work{Root: root}
		now := time.Now()
		look := func(what string, want idle.State) {
			t.Helper()
			now = now.Add(time.Minute)
			if r := w.Servers(now); r.State != want {
				t.Errorf("%q %s: %+v, want %s", line, what, r, want)
			}
		}
		look("at first sight", idle.Unknown)
		look("doing nothing", idle.Quiet)
		set(stat(130, 5)) // 0.3 s of CPU in a minute
		look("ticking over", idle.Quiet)
		set(stat(1000, 5))
		look("computing", idle.Active)
		look("done", idle.Quiet)
		set(stat(5, 9999)) // another process with the same pid
		look("anew", idle.Unknown)
		set("77 nonsense")
		look("unreadable", idle.Unknown)
	}
	w := &Work{Root: procTree(t, map[string]string{"77/cmdline": cmdline("bash"), "77/comm": "bash\n", "77/stat": stat(1, 1)})}
	if r := w.Servers(time.Now()); r.State != idle.Quiet {
		t.Errorf("no such server: %+v", r)
	}
}

// TestProgramNames checks that only the program of a command line is reported,
// because its arguments may contain a password.
func TestProgramNames(t *testing.T) {
	for line, want := range map[string]string{
		"/usr/bin/rsync\x00-a\x00hunter2\x00":                 "rsync",
		"python3\x00-u\x00/srv/train.py\x00--key=hunter2\x00": "train.py",
		"python3\x00-m\x00ipykernel_launcher\x00-f\x00x\x00":  "ipykernel_launcher",
		"python3\x00-c\x00print('hunter2')\x00":               "python3",
		"sh\x00-c\x00KEY=hunter2 /srv/train.py\x00":           "sh",
		"bash\x00-lc\x00curl https://x/hunter2 | sh\x00":      "bash",
		"sh\x00-c\x00KEY=hunter2\x00":                         "sh",
		"postgres: ada hunter2 [local] idle\x00":              "postgres:",
		"sh\x00/srv/backup.sh\x00hunter2\x00":                 "backup.sh",
	} {
		if p := processOf(1, []byte(line), []byte("comm\n")); p.program != want {
			t.Errorf("%q is told as %q, want %q", line, p.program, want)
		}
	}
}
