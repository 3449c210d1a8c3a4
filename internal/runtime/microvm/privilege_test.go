package microvm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"lull/internal/lib/errtest"
)

// statusOf returns the kernel's status of a process.
func statusOf(t *testing.T, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	errtest.None(t, err)
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(line, ":")
		out[k] = strings.Join(strings.Fields(v), " ")
	}
	return out
}

// TestPrivileges checks a real QEMU: it has its own user, no capabilities and no
// way to gain any, a system call filter, an empty network namespace, and can write
// no files but its guest's memory and log.
func TestPrivileges(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("rights", "guest", "serve", ":80")
	pid := w.Identity().PID
	s := statusOf(t, pid)
	for k, want := range map[string]string{"CapInh": "0", "CapPrm": "0", "CapEff": "0", "CapAmb": "0", "NoNewPrivs": "1", "Seccomp": "2"} {
		if strings.TrimLeft(s[k], "0") != strings.TrimLeft(want, "0") {
			t.Errorf("%s is %q, want %s", k, s[k], want)
		}
	}
	if !b.rights.root {
		t.Log("not root: QEMU has the user of its host")
		return
	}
	if strings.Trim(s["CapBnd"], "0") != "" {
		t.Errorf("its bounding set is %s", s["CapBnd"])
	}
	if b.rights.own {
		uid, _ := b.rights.user("rights")
		if want := fmt.Sprintf("%[1]d %[1]d %[1]d %[1]d", uid); s["Uid"] != want || s["Gid"] != want || s["Groups"] != "" {
			t.Errorf("it is user %q, group %q and %q, want %s and no more", s["Uid"], s["Gid"], s["Groups"], want)
		}
		if other, _ := b.rights.user("another"); other == uid && b.rights.many {
			t.Error("two instances have one user")
		}
	}
	fds := fmt.Sprintf("/proc/%d/fd", pid)
	ents, err := os.ReadDir(fds)
	errtest.None(t, err)
	for _, e := range ents {
		to, err := os.Readlink(filepath.Join(fds, e.Name()))
		if err != nil {
			continue // the descriptor has been closed meanwhile
		}
		flags, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, e.Name()))
		if err != nil {
			continue
		}
		var mode int
		for line := range strings.Lines(string(flags)) {
			fmt.Sscanf(line, "flags: %o", &mode)
		}
		name := filepath.Base(to)
		if filepath.IsAbs(to) && mode&syscall.O_ACCMODE != syscall.O_RDONLY && name != memoryFile && name != errorsFile && to != "/dev/null" && to != "/dev/kvm" && to != liveFiles.vhost() {
			t.Errorf("it may write %s", to)
		}
	}
	if !b.rights.apart {
		return
	}
	cards, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", pid))
	errtest.None(t, err)
	if n := strings.Count(string(cards), "\n"); n > 3 { // two header lines, and lo
		t.Errorf("its network has cards:\n%s", cards)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", pid))
	errtest.None(t, err)
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 3 && !strings.HasPrefix(f[3]+",", "ro,") {
			t.Errorf("it may write on %s", f[1])
		}
	}
}

// TestRights checks which of QEMU's privileges a host can drop, depending on the
// host's own.
func TestRights(t *testing.T) {
	const whole, small = "0 0 4294967295\n", "0 100000 65536\n"
	for _, c := range []struct {
		name, caps, ids string
		euid            int
		want            rights
		said            string
	}{
		{"root", "000001ffffffffff", whole, 0, rights{root: true, own: true, apart: true, many: true}, "a user for each guest, no network"},
		{"an ordinary user", "0000000000000000", whole, 1000, rights{}, "own user"},
		{"root of a container", "00000000a80425fb", small, 0, rights{root: true, own: true}, "nobody"},
		{"root with few ids", "00000000a80425fb", "0 1000 1\n", 0, rights{root: true}, "root without"},
		{"root that may not change users", "0000000000000400", whole, 0, rights{root: true, many: true}, "root without"},
		{"unreadable", "x", whole, 0, rights{root: true}, "root without"},
	} {
		dir := t.TempDir()
		errtest.None(t, os.MkdirAll(filepath.Join(dir, "self"), 0o755))
		for name, text := range map[string]string{"status": "Name:\tx\nCapEff:\t" + c.caps + "\n", "uid_map": c.ids, "gid_map": c.ids} {
			errtest.None(t, os.WriteFile(filepath.Join(dir, "self", name), []byte(text), 0o644))
		}
		if got := (machineFiles{proc: dir}).findRights(c.euid); got != c.want || !strings.Contains(got.String(), c.said) {
			t.Errorf("%s: %+v (%[2]s), want %+v (%s)", c.name, got, c.want, c.said)
		}
	}
}
