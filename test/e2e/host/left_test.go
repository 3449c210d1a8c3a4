package host

import (
	"bytes"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"lull/internal/host/daemontest"
	"lull/internal/protocol/hostctl"
)

// trace holds the data with which leftovers of an instance are found after its removal.
type trace struct {
	id     string
	spaces map[string]bool // its own namespaces, by the kernel's names
}

// trace begins to track a new instance.
func (m *bare) trace(name string, o hostctl.Instance) {
	m.traces[name] = &trace{id: o.ID, spaces: map[string]bool{}}
	m.traces[name].sample(m.d, o.PID)
}

// sample adds the present namespaces of the instance's processes.
func (t *trace) sample(d *daemontest.Host, pid int) {
	common := map[string]bool{}
	for _, p := range []int{os.Getpid(), d.PID(), d.ShimPID()} {
		for _, s := range links(p, "ns") {
			common[s] = true
		}
	}
	for _, p := range append(t.processes(), pid) {
		for _, s := range links(p, "ns") {
			if p > 0 && !common[s] {
				t.spaces[s] = true
			}
		}
	}
}

// processes returns the processes whose command line, environment, directories or
// control groups contain the instance's ID. QEMU has it in its arguments; a
// program of the process runtime or in a container has it in its environment.
func (t *trace) processes() (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		said := []string{link(pid, "cwd"), link(pid, "root")}
		for _, f := range []string{"cmdline", "environ", "cgroup"} {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, f))
			said = append(said, string(b))
		}
		if strings.Contains(strings.Join(said, "\n"), t.id) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// left lists everything that still exists of the instance: processes; files,
// including deleted ones that are still open; control groups, mounts, namespaces
// and sockets.
func (t *trace) left(d *daemontest.Host) (left []string) {
	for _, pid := range t.processes() {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		left = append(left, fmt.Sprintf("process %d: %q", pid, b))
	}
	for _, dir := range []string{"/sys/fs/cgroup", d.Dir, "/run", "/dev/shm"} {
		_ = filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
			if err == nil && strings.Contains(e.Name(), t.id) {
				left = append(left, p)
			}
			return nil // groups come and go during the walk
		})
	}
	loose, _ := filepath.Glob(filepath.Join(os.TempDir(), "*"+t.id+"*"))
	left = append(left, loose...)
	sockets, err := os.ReadFile("/proc/net/unix")
	if err != nil || bytes.Contains(sockets, []byte(t.id)) {
		left = append(left, fmt.Sprint("a unix socket, or ", err))
	}
	for _, pid := range append(d.Processes(), os.Getpid()) {
		left = append(left, t.held(pid)...)
	}
	return left
}

// held lists the instance's files, sockets and other resources that a process has
// open.
func (t *trace) held(pid int) (held []string) {
	for _, what := range append(links(pid, "fd"), links(pid, "ns")...) {
		if strings.Contains(what, t.id) || t.spaces[what] {
			held = append(held, fmt.Sprintf("process %d has %s", pid, what))
		}
	}
	for _, file := range []string{"maps", "mountinfo"} {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
		for line := range strings.Lines(string(b)) {
			mine := strings.Contains(line, t.id)
			for s := range t.spaces {
				mine = mine || strings.Contains(line, s)
			}
			if mine {
				held = append(held, fmt.Sprintf("process %d has in its %s %s", pid, file, line))
			}
		}
	}
	return held
}

func link(pid int, name string) string {
	s, _ := os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, name))
	return s
}

// links returns the targets of all links in a directory of a process in /proc. It
// returns none for a process that is ending.
func links(pid int, dir string) (to []string) {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, dir))
	for _, e := range entries {
		if target := link(pid, dir+"/"+e.Name()); target != "" {
			to = append(to, target)
		}
	}
	return to
}

// cards returns the network interfaces of this machine that a runtime could have
// created. It omits those of Docker.
func cards(t *testing.T) (names []string) {
	t.Helper()
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		if !slices.ContainsFunc([]string{"docker", "br-", "veth"}, func(p string) bool { return strings.HasPrefix(c.Name, p) }) {
			names = append(names, c.Name)
		}
	}
	return names
}
