package daemontest

import (
	"fmt"
	"iter"
	"os"
	"slices"
	"strconv"
	"strings"
)

// ShimPID returns the PID of the shim, or 0.
func (h *Host) ShimPID() int {
	for pid := range living(func(pid int) bool { return strings.Contains(read(pid, "cmdline"), "--dir\x00"+h.Dir+"/data/shim\x00") }) {
		return pid
	}
	return 0
}

// Marked returns the PIDs of the living processes of each instance, according to
// the mark in their environment. LULL_SOCKET in the environment identifies the
// host.
func (h *Host) Marked() map[string][]int {
	out := map[string][]int{}
	for pid := range living(func(pid int) bool { return strings.Contains(read(pid, "environ"), "LULL_SOCKET="+h.Dir+"/") }) {
		for e := range strings.SplitSeq(read(pid, "environ"), "\x00") {
			if id, ok := strings.CutPrefix(e, "LULL_INSTANCE_ID="); ok {
				out[id] = append(out[id], pid)
			}
		}
	}
	return out
}

// Processes returns the processes of this host: those with its directory in their
// command line or environment.
func (h *Host) Processes() []int {
	return slices.Collect(living(func(pid int) bool {
		return strings.Contains(read(pid, "cmdline"), h.Dir+"/") || strings.Contains(read(pid, "environ"), h.Dir+"/")
	}))
}

// living yields the PIDs of the processes for which like returns true and that have
// not exited.
func living(like func(pid int) bool) iter.Seq[int] {
	return func(yield func(int) bool) {
		entries, _ := os.ReadDir("/proc")
		for _, e := range entries {
			pid, err := strconv.Atoi(e.Name())
			if err == nil && like(pid) && !ended(pid) && !yield(pid) {
				return
			}
		}
	}
}

// ended reports whether a process has exited. A zombie has.
func ended(pid int) bool {
	stat := read(pid, "stat")
	after := stat[strings.LastIndexByte(stat, ')')+1:]
	return len(after) < 2 || after[1] == 'Z' || after[1] == 'X'
}

// read returns a file of a process in /proc, or "" if the process does not exist.
func read(pid int, file string) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	return string(b)
}
