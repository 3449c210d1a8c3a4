package host

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"lull/internal/host/daemontest"
	"lull/internal/lib/waittest"
)

// TestNothingPerInstance checks that a paused instance costs the daemon a record
// and duplicates of its sockets, but no goroutine, thread or timer.
func TestNothingPerInstance(t *testing.T) {
	const instances, slack = 40, 20
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	empty := costOf(d)
	for n := range instances { // one after the other, because a thread is kept once it is created
		s, _ := web(t, fmt.Sprint("cost-", n), false)
		d.Launch(s)
	}
	for n := range instances {
		d.Await(fmt.Sprint("cost-", n), "paused")
	}
	var full cost
	if !waittest.Within(daemontest.WaitLimit, func() bool {
		full = costOf(d)
		return full.goroutines <= empty.goroutines+slack && full.threads <= empty.threads+slack && full.timers <= empty.timers+slack
	}) {
		t.Fatalf("an empty host has %+v, one with %d paused instances %+v: more than %d of something", empty, instances, full, slack)
	}
	t.Logf("REPORT cost: empty %+v, %d paused %+v", empty, instances, full)
}

// cost is the numbers of things that must not grow with the number of instances.
type cost struct{ goroutines, threads, timers int }

func costOf(d *daemontest.Host) cost {
	d.T.Helper()
	st, err := d.Status(d.T.Context())
	if err != nil {
		d.T.Fatal(err)
	}
	c := cost{goroutines: st.Goroutines}
	proc := fmt.Sprintf("/proc/%d/", d.PID())
	threads, err := os.ReadDir(proc + "task")
	if err != nil {
		d.T.Fatal(err)
	}
	c.threads = len(threads)
	if b, err := os.ReadFile(proc + "timers"); err == nil { // not every kernel has this file
		c.timers = bytes.Count(b, []byte("ID:"))
	}
	files, err := os.ReadDir(proc + "fd")
	if err != nil {
		d.T.Fatal(err)
	}
	for _, f := range files {
		if to, _ := os.Readlink(proc + "fd/" + f.Name()); strings.Contains(to, "timerfd") {
			c.timers++
		}
	}
	return c
}
