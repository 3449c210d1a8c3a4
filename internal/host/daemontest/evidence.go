package daemontest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"lull/internal/protocol/hostctl"
)

// Overdue is how long a client may wait for an answer before a test records the
// reason.
const Overdue = 15 * time.Second

// hungAfter is how long a client may wait for an answer before Awaiting fails the
// test. It is shorter than WaitLimit, so that the client still waits while the
// reason is recorded.
const hungAfter = WaitLimit - 10*time.Second

// evidenceLimit bounds each part of Evidence.
const evidenceLimit = 5 * time.Second

// Awaiting watches a client of the instance name. The caller must call answered
// when the client is done.
//
// If the client has no answer after Overdue, Evidence is written to the test's log.
// If it still has none shortly before WaitLimit, the test fails, Evidence is logged
// again, and SIGQUIT ends the daemon with the stacks of its goroutines. inside is
// as for Evidence and may be nil.
func (h *Host) Awaiting(name, what string, inside func(context.Context) string) (answered func()) {
	h.T.Helper()
	done, over := make(chan struct{}), make(chan struct{})
	began := time.Now()
	go func() {
		defer close(over)
		for _, last := range []bool{false, true} {
			limit := Overdue
			if last {
				limit = hungAfter
			}
			select {
			case <-done:
				return
			case <-time.After(time.Until(began.Add(limit))):
			}
			h.overdue(name, what, time.Since(began), last, inside)
		}
	}()
	return func() { close(done); <-over }
}

// overdue records why a client has no answer. Clients that wait at the same time
// share one record.
func (h *Host) overdue(name, what string, since time.Duration, last bool, inside func(context.Context) string) {
	since = since.Round(time.Second)
	h.evidence.Lock()
	defer h.evidence.Unlock()
	said := "recorded above"
	if now := time.Now(); now.Sub(h.evidenceAt) > Overdue/3 {
		said = h.Evidence(name, inside)
		h.evidenceAt = time.Now()
	}
	if !last {
		h.T.Logf("no answer to %s after %s\n%s", what, since, said)
		return
	}
	h.T.Errorf("no answer to %s after %s\n%s\n--- goroutines\n%s", what, since, said, h.goroutines())
}

// Evidence describes everything that can keep a client of an instance waiting: the
// daemon's view of the instance; its control groups, processes and sockets
// according to the kernel; the latest events; and the output of daemon and program.
// inside queries the program itself. It is called only while the instance runs,
// because it would wake the instance. Nothing else in Evidence does.
func (h *Host) Evidence(name string, inside func(context.Context) string) string {
	var b strings.Builder
	part := func(title, text string) { fmt.Fprintf(&b, "--- %s\n%s\n", title, strings.TrimRight(text, "\n")) }
	ask := func(title string, do func(ctx context.Context) (any, error)) {
		ctx, cancel := context.WithTimeout(context.Background(), evidenceLimit)
		defer cancel()
		v, err := do(ctx)
		if err != nil {
			part(title, err.Error())
			return
		}
		text, err := json.Marshal(v)
		part(title, fmt.Sprint(string(text), errorOrNothing(err)))
	}
	var o hostctl.Instance
	ask("instance", func(ctx context.Context) (any, error) {
		var err error
		o, err = h.Get(ctx, name)
		return o, err
	})
	ask("why", func(ctx context.Context) (any, error) {
		y, err := h.Why(ctx, name, time.Time{})
		return y.Account, err
	})
	var events []string
	ask("events", func(ctx context.Context) (any, error) {
		err := h.Kept(ctx, "", func(string) {}, func(e hostctl.Event) error {
			events = append(events, fmt.Sprintf("%s %s %s by %s: %s", e.Time.Format("15:04:05.000"), e.Instance, e.Type, e.By, e.Reason))
			return nil
		})
		return events[max(0, len(events)-30):], err
	})
	pids := h.tree(o.PID)
	part("processes", describe(pids))
	part("control groups", groups(pids))
	part("sockets", h.sockets(o))
	part("daemon's log", tail(h.Dir+"/daemon.log", 3000))
	part("shim's log", tail(h.Dir+"/data/shim/shim.log", 2000))
	ask("output", func(ctx context.Context) (any, error) {
		var out bytes.Buffer
		err := h.Logs(ctx, name, hostctl.Logs{Tail: 30}, &out)
		return out.String(), err
	})
	if inside != nil && o.State == "running" {
		ctx, cancel := context.WithTimeout(context.Background(), evidenceLimit)
		defer cancel()
		part("program", inside(ctx))
	}
	return b.String()
}

// goroutines ends the daemon with SIGQUIT and returns the stacks that it has
// printed. The shim then thaws everything that is frozen.
func (h *Host) goroutines() string {
	if h.Over() {
		return "the daemon has ended"
	}
	before := int64(0)
	if st, err := os.Stat(h.Dir + "/daemon.log"); err == nil {
		before = st.Size()
	}
	h.killed = true
	_ = h.cmd.Process.Signal(syscall.SIGQUIT) // fails if it has already ended
	select {
	case <-h.gone:
	case <-time.After(evidenceLimit):
		return "the daemon does not react to SIGQUIT"
	}
	b, _ := os.ReadFile(h.Dir + "/daemon.log")
	return string(b[min(before, int64(len(b))):])
}

func errorOrNothing(err error) string {
	if err != nil {
		return err.Error()
	}
	return ""
}

// tail returns the last size bytes of a file.
func tail(path string, size int) string {
	b, err := os.ReadFile(path)
	return string(b[max(0, len(b)-size):]) + errorOrNothing(err)
}

// tree returns the processes of this host and of the program with the PID main, and
// their descendants. Programs that overwrite their environment are found by their
// parents.
func (h *Host) tree(main int) []int {
	in := map[int]bool{main: main != 0, h.PID(): true}
	for _, pid := range h.Processes() {
		in[pid] = true
	}
	parents := map[int]int{}
	for pid := range living(func(int) bool { return true }) {
		if f := statFields(pid); len(f) > 1 {
			parents[pid], _ = strconv.Atoi(f[1])
		}
	}
	for found := true; found; {
		found = false
		for pid, parent := range parents {
			if in[parent] && !in[pid] {
				in[pid], found = true, true
			}
		}
	}
	maps.DeleteFunc(in, func(_ int, in bool) bool { return !in })
	return slices.Sorted(maps.Keys(in))
}

// statFields returns the fields of a process's stat file, beginning with the state.
func statFields(pid int) []string {
	stat := read(pid, "stat")
	return strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
}

// describe returns a line for each process with its state, parent, place in the
// kernel and command line.
func describe(pids []int) string {
	var b strings.Builder
	for _, pid := range pids {
		f := statFields(pid)
		if len(f) < 2 {
			continue // the process has ended
		}
		fmt.Fprintf(&b, "%d %s parent %s in %s: %s\n", pid, f[0], f[1], read(pid, "wchan"), strings.ReplaceAll(read(pid, "cmdline"), "\x00", " "))
		if f[0] == "D" || f[0] == "T" {
			fmt.Fprintf(&b, "%s\n", read(pid, "stack"))
		}
	}
	return b.String()
}

// groups describes the freezers of the processes' control groups.
func groups(pids []int) string {
	members := map[string][]int{}
	for _, pid := range pids {
		for line := range strings.Lines(read(pid, "cgroup")) {
			f := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(f) == 3 && (f[1] == "" || f[1] == "freezer") && f[2] != "/" {
				members[f[2]] = append(members[f[2]], pid)
			}
		}
	}
	var b strings.Builder
	for _, g := range slices.Sorted(maps.Keys(members)) {
		fmt.Fprintf(&b, "%s: processes %v\n", g, members[g])
		for _, file := range []string{"cgroup.freeze", "cgroup.events", "freezer.state", "freezer.self_freezing"} {
			for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/freezer"} {
				if text, err := os.ReadFile(filepath.Join(root, g, file)); err == nil {
					fmt.Fprintf(&b, "  %s: %s\n", file, strings.Join(strings.Fields(string(text)), " "))
				}
			}
		}
	}
	return b.String()
}

// sockets returns the TCP sockets on the ports of an instance, and the unix sockets
// below this host's directory.
func (h *Host) sockets(o hostctl.Instance) string {
	var find []string
	for _, e := range o.Endpoints {
		for _, addr := range []string{e.Listen, e.Target} {
			if n := strings.LastIndexByte(addr, ':'); n >= 0 {
				addr = addr[n:] + " "
			}
			find = append(find, addr)
		}
	}
	var b strings.Builder
	for _, flags := range []string{"-tanoip", "-uanp", "-xanp"} {
		ctx, cancel := context.WithTimeout(context.Background(), evidenceLimit)
		out, err := exec.CommandContext(ctx, "ss", "-O", flags).Output()
		cancel()
		if err != nil {
			fmt.Fprintf(&b, "ss %s: %v\n", flags, err)
		}
		for line := range strings.Lines(string(out)) {
			if slices.ContainsFunc(find, func(s string) bool { return strings.Contains(line, s) }) {
				fmt.Fprintln(&b, strings.Join(strings.Fields(line), " "))
			}
		}
	}
	return b.String()
}
