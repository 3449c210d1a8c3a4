package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/host/records"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// TestKill kills the daemon, the shim or both at random instants while clients
// connect, instances pause, leases come and go, and programs start and stop.
// Afterwards every instance must be in a state that follows from its record, and
// nothing may be orphaned, forgotten, lost or stuck.
func TestKill(t *testing.T) {
	rounds := scaletest.Count(t, "LULL_HOST_CRASHES", 10)
	rng := random(t)
	w := newKilled(t)
	begin := time.Now()
	for n := range rounds {
		what := [...]string{"daemon", "daemon", "daemon", "shim", "both"}[rng.IntN(5)]
		w.round(n, what, rng)
		if t.Failed() {
			t.Fatalf("in round %d, %s killed", n, what)
		}
	}
	w.stopClients()
	t.Logf("REPORT kill: %d rounds (%v) in %s: %d direct and %d relayed exchanges, %d more of the relayed cut, or refused while daemon and shim were killed, 0 direct lost; "+
		"%d leases acknowledged, %d released, all kept; %d known exit codes; states at the kill %v",
		rounds, w.kills, time.Since(begin).Round(time.Millisecond), w.direct.Load(), w.relayed.Load(), w.cut.Load(),
		w.held, w.dropped, w.exits, w.seen)
}

// killed is the state of TestKill: three servers that are never stopped, one that
// is, a program that exits, and an instance without clients.
type killed struct {
	t     *testing.T
	d     *daemontest.Host
	addr  map[string]string
	pid   map[string]int
	kills map[string]int
	seen  map[string]int

	stop                 context.CancelFunc
	clients              sync.WaitGroup
	direct, relayed, cut atomic.Int64
	unheld               atomic.Bool // daemon and shim are killed, so nothing holds the relay's ports

	leases        map[string]bool // whether each holder's lease must exist; missing if unknown
	held, dropped int
	wantToggle    string // state that the last acknowledged command requested; "" if unknown
	exits         int
}

func newKilled(t *testing.T) *killed {
	w := &killed{t: t, d: host(t, "--probe", "50ms"), addr: map[string]string{}, pid: map[string]int{},
		kills: map[string]int{}, seen: map[string]int{}, leases: map[string]bool{}}
	for _, name := range []string{"direct", "relay", "leased", "toggled", "quiet"} {
		s, addr := web(t, name, name == "relay")
		s.PauseAfter = daemontest.Seconds(150 * time.Millisecond)
		if name == "quiet" {
			s.PauseAfter = daemontest.Seconds(0)
		}
		w.addr[name] = addr
		w.pid[name] = w.d.Launch(s).PID
	}
	s := spec("ends", "exit", "7", "60ms")
	s.Restart = instance.RestartNo
	w.d.Launch(s)
	ctx, cancel := context.WithCancel(t.Context())
	w.stop = cancel
	for _, name := range []string{"direct", "leased", "relay"} {
		w.clients.Go(func() { w.visit(ctx, name) })
	}
	t.Cleanup(w.stopClients)
	return w
}

func (w *killed) stopClients() { w.stop(); w.clients.Wait() }

// visit connects repeatedly, with pauses in which the instance falls asleep. A
// kill may break relayed connections, but not direct ones.
func (w *killed) visit(ctx context.Context, name string) {
	for ctx.Err() == nil {
		unheld := w.unheld.Load()
		got, err := once(w.addr[name], "hello")
		switch {
		case err == nil && got == "echo hello" && name == "relay":
			w.relayed.Add(1)
		case err == nil && got == "echo hello":
			w.direct.Add(1)
		case name == "relay" && errors.Is(err, syscall.ECONNREFUSED) && !unheld && !w.unheld.Load():
			w.t.Errorf("the relay refused a client: %v", err)
			return
		case name == "relay":
			w.cut.Add(1)
		default:
			w.t.Errorf("%s lost a connection: %q, %v", name, got, err)
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(rand.IntN(400)) * time.Millisecond):
		}
	}
}

func (w *killed) round(n int, what string, rng *rand.Rand) {
	t, d := w.t, w.d
	w.kills[what]++
	quiet := d.Show("quiet")
	if quiet.State == "running" {
		d.Must("quiet", "pause")
		quiet = d.Show("quiet")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var load sync.WaitGroup
	load.Go(func() { w.lease(ctx, n) })
	load.Go(func() { w.toggle(ctx) })
	load.Go(func() { w.pause(ctx) })
	load.Go(func() { w.restart(ctx) })
	until(time.Now().Add(time.Duration(20+rng.IntN(500)) * time.Millisecond))
	shim := d.ShimPID()
	w.unheld.Store(what == "both")
	if what != "daemon" {
		syscall.Kill(shim, syscall.SIGKILL)
	}
	if what != "shim" {
		d.Kill()
	}
	cancel()
	load.Wait()
	if what == "shim" {
		daemontest.Wait(t, "there is another shim", func() (bool, string) { p := d.ShimPID(); return p > 0 && p != shim, fmt.Sprint("process ", p) })
		d.Await("quiet", "running") // the daemon has adopted it and woken all instances
	}
	away := time.Duration(rng.IntN(300)) * time.Millisecond
	if rng.IntN(5) == 0 {
		away = 2500 * time.Millisecond
	}
	if what == "shim" {
		w.check(what, nil, 0, quiet)
		return
	}
	recs := w.records()
	down := time.Now()
	until(down.Add(away))
	d.Boot()
	w.unheld.Store(false)
	w.check(what, recs, time.Since(down), quiet)
}

func (w *killed) lease(ctx context.Context, n int) {
	for k := 0; ctx.Err() == nil; k++ {
		holder := fmt.Sprintf("h%d-%d", n, k)
		_, err := w.d.Hold(ctx, "leased", hostctl.LeaseRequest{Holder: holder, Reason: "proof", TTL: *daemontest.Seconds(time.Hour)})
		if err == nil {
			w.leases[holder] = true
			w.held++
		} else if ctx.Err() == nil && refused(err) != "" {
			w.t.Errorf("a lease is refused: %v", err)
		}
		if k%3 != 2 || ctx.Err() != nil {
			continue
		}
		for holder, there := range w.leases { // any one of them
			if !there {
				continue
			}
			delete(w.leases, holder)
			if _, err := w.d.Release(ctx, "leased", holder); err == nil {
				w.leases[holder] = false
				w.dropped++
			}
			break
		}
	}
}

func (w *killed) toggle(ctx context.Context) {
	for ctx.Err() == nil {
		for _, c := range [][2]string{{"stop", "stopped"}, {"start", "running"}} {
			w.wantToggle = ""
			if _, err := w.d.Do(ctx, "toggled", c[0], nil); err == nil {
				w.wantToggle = c[1]
			}
		}
	}
}

func (w *killed) pause(ctx context.Context) {
	for ctx.Err() == nil {
		for _, name := range []string{"direct", "relay"} {
			_, _ = w.d.Do(ctx, name, "pause", nil) // refused while a client is connected
		}
		time.Sleep(5 * time.Millisecond) // outside a bubble: paces the load
	}
}

func (w *killed) restart(ctx context.Context) {
	for ctx.Err() == nil {
		_, _ = w.d.Do(ctx, "ends", "start", nil)
		time.Sleep(20 * time.Millisecond) // outside a bubble: paces the load
	}
}

// records reads the records on disk while no daemon runs. It reads a copy, so
// that the next daemon finds exactly what the last one left.
func (w *killed) records() map[string]instance.Record {
	dir := w.t.TempDir()
	for _, part := range []string{"instances", "changes"} {
		err := os.CopyFS(filepath.Join(dir, part), os.DirFS(filepath.Join(w.d.Dir, "data", part)))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			w.t.Fatal(err)
		}
	}
	files, err := records.OpenFiles(dir)
	if err != nil {
		w.t.Fatal(err)
	}
	recs, err := files.Load()
	if err != nil {
		w.t.Fatal(err)
	}
	out := map[string]instance.Record{}
	for _, r := range recs {
		out[r.Spec.Name] = r
		w.seen[string(r.State)]++
	}
	if err := files.Close(); err != nil {
		w.t.Fatal(err)
	}
	return out
}

// follows maps a recorded state to the resting states that may follow from it.
// For example, a running instance may have been paused since, because it was
// idle.
var follows = map[string][]string{
	"running": {"running", "paused"}, "pausing": {"running", "paused"}, "paused": {"running", "paused"},
	"resuming": {"running", "paused"}, "starting": {"running", "paused"}, "stopping": {"stopped"}, "stopped": {"stopped"},
}

func (w *killed) check(what string, recs map[string]instance.Record, down time.Duration, quiet hostctl.Instance) {
	t, d := w.t, w.d
	var l []hostctl.Instance
	rest := func() bool {
		var err error
		if l, err = d.List(t.Context()); err != nil {
			return false
		}
		return !slices.ContainsFunc(l, func(o hostctl.Instance) bool {
			return !slices.Contains([]string{"running", "paused", "stopped"}, o.State) || o.Name == "ends" && o.State != "stopped" ||
				o.Name != "ends" && o.RestartAt != nil
		})
	}
	if !waittest.Within(daemontest.WaitLimit, rest) {
		for _, o := range l {
			t.Logf("%s is %s (%s), pid %d", o.Name, o.State, o.StatusReason, o.PID)
		}
		t.Fatal("not every instance comes to rest")
	}
	if len(l) != len(w.addr)+1 {
		t.Fatalf("%d instances, want %d", len(l), len(w.addr)+1)
	}
	for _, o := range l {
		if r, ok := recs[o.Name]; ok && o.Name != "ends" && !slices.Contains(follows[string(r.State)], o.State) {
			t.Errorf("%s was recorded as %s and is %s (%s)", o.Name, r.State, o.State, o.StatusReason)
		}
		if pid := w.pid[o.Name]; o.Name != "toggled" && pid > 0 && o.PID != pid {
			t.Errorf("%s is another process now: %d, before %d (%s)", o.Name, o.PID, pid, o.StatusReason)
		}
		switch o.Name {
		case "quiet":
			if o.State != "paused" && what == "daemon" && down < 1500*time.Millisecond {
				t.Errorf("what no client touched does not sleep any more after %s: %s (%s)", down, o.State, o.StatusReason)
			}
			if o.State == "paused" && !o.LastPausedAt.Equal(*quiet.LastPausedAt) {
				t.Errorf("what no client touched was paused at %s, now it says %s", quiet.LastPausedAt, o.LastPausedAt)
			}
		case "toggled":
			if w.wantToggle == "stopped" && o.State != "stopped" || w.wantToggle == "running" && o.State == "stopped" {
				t.Errorf("%s was acknowledged, and it is %s (%s)", w.wantToggle, o.State, o.StatusReason)
			}
		case "ends":
			w.checkExit(what, string(recs[o.Name].State), o)
		case "leased":
			w.checkLeases(o)
		}
	}
	w.checkProcesses()
	for name, addr := range w.addr {
		if name == "quiet" || name == "toggled" {
			continue
		}
		mustAnswer(t, addr)
	}
	// A stop that was in progress when its caller was gone may still be carried
	// out and break a client's connection, so retry.
	waittest.Until(t, "toggled starts again, and answers", func() bool {
		if _, err := d.Do(t.Context(), "toggled", "start", nil); err != nil {
			return false
		}
		got, err := once(w.addr["toggled"], "hello")
		return err == nil && got == "echo hello"
	})
}

// checkExit checks that the exit code is known, unless the shim was killed or the
// run was being started when the daemon was killed.
func (w *killed) checkExit(what, was string, o hostctl.Instance) {
	switch {
	case o.ExitCode != nil && *o.ExitCode == 7:
		w.exits++
	case what == "daemon" && o.ExitCode == nil && was != "starting":
		w.t.Errorf("it is unknown how a program ended although the shim lived: %+v", o)
	case o.ExitCode != nil && what == "daemon" && *o.ExitCode != 137 && *o.ExitCode != 143:
		w.t.Errorf("the exit code is %d, want 7", *o.ExitCode)
	}
}

func (w *killed) checkLeases(o hostctl.Instance) {
	have := map[string]bool{}
	for _, l := range o.Leases {
		have[l.Holder] = true
	}
	for holder, want := range w.leases {
		if have[holder] != want {
			w.t.Errorf("the lease of %s: there %t, want %t", holder, have[holder], want)
		}
	}
	if len(have) < 100 {
		return
	}
	for holder := range have { // release them, because the number of holders is limited
		if _, err := w.d.Release(w.t.Context(), "leased", holder); err != nil {
			w.t.Errorf("cannot release: %v", err)
		}
	}
	clear(w.leases)
}

// checkProcesses checks that each instance that should have a process has exactly
// one, and that there are no others.
func (w *killed) checkProcesses() {
	var odd string
	ok := waittest.Within(daemontest.WaitLimit, func() bool {
		odd = ""
		l, err := w.d.List(w.t.Context())
		if err != nil {
			odd = err.Error()
			return false
		}
		left := w.d.Marked()
		for _, o := range l {
			want := 1
			if o.State == "stopped" {
				want = 0
			}
			if got := left[o.ID]; len(got) != want || want == 1 && got[0] != o.PID {
				odd = fmt.Sprintf("%s is %s with pid %d, and has the processes %v", o.Name, o.State, o.PID, got)
			}
			delete(left, o.ID)
		}
		if len(left) > 0 {
			odd = fmt.Sprintf("orphans %v", left)
		}
		return odd == ""
	})
	if !ok {
		w.t.Error(odd)
	}
}

// TestEventsOfAKilledDaemon checks that the next daemon has every event that the
// answer to a command or the event stream showed just before the daemon was
// killed.
func TestEventsOfAKilledDaemon(t *testing.T) {
	d := host(t)
	s, _ := web(t, "a", false)
	s.PauseAfter = daemontest.Seconds(0)
	d.Launch(s)
	for n := range 3 {
		d.Must("a", "pause")
		d.Must("a", "resume")
		d.Kill()
		d.Boot()
		count := map[string]int{}
		err := d.Kept(t.Context(), "", func(string) {}, func(e hostctl.Event) error {
			count[e.Type]++
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if count["paused"] != n+1 || count["resumed"] != n+1 {
			t.Errorf("after %d pauses and resumes the events have %v", n+1, count)
		}
	}
}
