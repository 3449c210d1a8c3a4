package agent

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
	"lull/internal/sim/truth"
)

// machine is a machine with users whose use was drawn before the agent runs.
// The agent reads its files with the real probes. The use itself is never
// derived from a reading.
type machine struct {
	*world
	root  string
	real  *proc.Machine
	began time.Time

	load, disk, keys, sessions truth.Use

	cpu, sectors float64   // work done until at
	at           time.Time // of the bubble
}

const machineCPUs = 4

// wall converts a time of the bubble to the machine's clock.
func (m *machine) wall(t time.Time) time.Time { return t.Add(m.slept + m.skew) }

// write updates the machine's files to now. It is called with the lock held.
func (m *machine) write(now time.Time) error {
	span := now.Sub(m.at).Seconds()
	m.cpu += m.load.Share(m.at, now) * span
	m.sectors += m.disk.Share(m.at, now) * span * 2048 // 1 MiB per second
	m.at = now
	busy, total := int64(m.cpu*100), int64(now.Sub(m.began).Seconds()*100)
	stat := fmt.Sprintf("cpu  %d 0 0 %d 0 0 0 0 0 0\n", busy*machineCPUs, (total-busy)*machineCPUs)
	for i := range machineCPUs {
		stat += fmt.Sprintf("cpu%d %d 0 0 %d 0 0 0 0 0 0\n", i, busy, total-busy)
	}
	disks := fmt.Sprintf(" 259       0 nvme0n1 100 0 2000 0 50 0 %d 0 0 0 0 0 0 0 0 0 0\n", 4000+int64(m.sectors))
	for name, text := range map[string]string{"proc/stat": stat + "intr 1\nctxt 1\n", "proc/diskstats": disks} {
		if err := os.WriteFile(filepath.Join(m.root, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	input := m.wall(m.began)
	if last, ok := m.keys.Last(now); ok {
		input = m.wall(last)
	}
	output := input
	if w := m.written; !w.IsZero() { // of a warning
		output = m.wall(w)
	}
	return os.Chtimes(filepath.Join(m.root, "dev/pts/0"), input, output)
}

// Read implements Cheap.
func (m *machine) Read(now time.Time, l proc.Limits, into []idle.Reading) []idle.Reading {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastRead = time.Now()
	if err := m.write(time.Now()); err != nil {
		panic(err)
	}
	from := len(into)
	into = m.real.Read(now, l, into)
	for i := range into[from:] {
		if x := &into[from+i]; m.broken[x.Signal] {
			*x = idle.NotKnown(x.Signal, now, "broken for the test")
		}
	}
	return into
}

// Reset implements Cheap.
func (m *machine) Reset() { m.real.Reset() }

// someone is the signal of the machine's sessions.
type someone struct{ m *machine }

func (someone) Signal() string     { return proc.SignalUsers }
func (someone) Wanted(Config) bool { return true }
func (s someone) Read(_ context.Context, now time.Time, _ Config) idle.Reading {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	r := idle.Reading{Signal: proc.SignalUsers, State: idle.Quiet, At: now}
	if s.m.broken[proc.SignalUsers] {
		return idle.NotKnown(proc.SignalUsers, now, "broken for the test")
	}
	if last, ok := s.m.sessions.Last(time.Now()); ok {
		r.LastEvent = s.m.wall(last)
	}
	if s.m.sessions.At(time.Now()) {
		r.State = idle.Active
	}
	return r
}

// Warn records its writes by the machine's clock, as the files have it.
func (m *machine) Warn(ctx context.Context, x Warning) error {
	err := m.world.Warn(ctx, x)
	m.with(func() { m.own.Note(m.wall(time.Now())) })
	return err
}

// Withdraw records its writes as Warn does.
func (m *machine) Withdraw(ctx context.Context, x Withdrawal) error {
	err := m.world.Withdraw(ctx, x)
	m.with(func() {
		if x.Warning.Action != "" {
			m.own.Note(m.wall(time.Now()))
		}
	})
	return err
}

// long returns the spans of u that last at least d.
func long(u truth.Use, d time.Duration) truth.Use {
	var out []truth.Span
	for _, s := range u.Spans() {
		if s.To.Sub(s.From) >= d {
			out = append(out, s)
		}
	}
	return truth.Of(out...)
}

// day is one machine and its history.
type day struct {
	*machine
	t        *testing.T
	rng      *rand.Rand
	timeout  time.Duration // the shortest in the tags during the last minute
	interval time.Duration
	snoozed  time.Time
	agent    *Agent
	end      context.CancelFunc
	ended    chan struct{}
	boots    int
	judged   int // calls that were checked
}

// checkedCloud checks every call against the truth.
type checkedCloud struct {
	fakeCloud
	d *day
}

func (c checkedCloud) Stop(ctx context.Context, hibernate bool) (string, error) {
	c.d.judge()
	return c.fakeCloud.Stop(ctx, hibernate)
}

// judge fails if an idle stop hit a machine in use. The documented limits of
// the rates are allowed: work below their thresholds over a check interval (a
// twentieth of it at full load), and use that began after the final check read
// its last window, which is at least 10 s long and 5 s old.
func (d *day) judge() {
	s := mustStatus(d.t, d.agent)
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.judged++
	if s.Last.Reason != reasonIdle {
		d.t.Errorf("%s: stopped because of %s", now, s.Last.Reason)
	}
	rough := d.interval/16 + time.Second
	for name, u := range map[string]truth.Use{"load": long(d.load, d.interval/8+2*time.Second), "disk": d.disk} {
		if err := u.Check(now, d.timeout-rough, 15*time.Second+d.interval/8); err != nil {
			d.t.Errorf("%s: %v", name, err)
		}
	}
	for name, u := range map[string]truth.Use{"keys": d.keys, "sessions": d.sessions} {
		if err := u.Check(now, d.timeout-2*time.Second, freshLimit); err != nil {
			d.t.Errorf("%s: %v", name, err)
		}
	}
	if now.Before(d.snoozed) {
		d.t.Errorf("%s: stopped while it was snoozed until %s", now, d.snoozed)
	}
	if n := len(d.warnings); n == 0 || d.wall(now).Before(d.warnings[n-1].At) || len(d.withdrawn) > 0 && d.withdrawn[len(d.withdrawn)-1].Warning.At.Equal(d.warnings[n-1].At) {
		d.t.Errorf("%s: stopped without a warning that holds: %+v", now, d.warnings)
	}
}

func (d *day) boot() {
	d.real = proc.NewMachine(proc.MachineConfig{Root: d.root, Own: d.own})
	d.tune = func(o *Options) {
		o.Cheap, o.Slow, o.Warner, o.Cloud = d.machine, []Slow{someone{d.machine}}, d.machine, checkedCloud{fakeCloud{d.world}, d}
	}
	ctx, cancel := context.WithCancel(d.t.Context())
	d.ended = make(chan struct{})
	agent := d.world.make(d.t)
	d.agent, d.end = agent, cancel
	ended := d.ended
	go func() {
		defer close(ended)
		_ = agent.Run(ctx) // its result does not matter here
	}()
	<-agent.Ready()
}

func (d *day) down() {
	d.end()
	<-d.ended
	d.real.Close()
}

// happen causes one random event.
func (d *day) happen() {
	switch d.rng.IntN(12) {
	case 0, 1, 2: // another timeout
		to := []time.Duration{time.Minute, 2 * time.Minute, 5 * time.Minute, 15 * time.Minute, 40 * time.Minute}[d.rng.IntN(5)]
		d.with(func() { d.tags["lull:idle-timeout"] = to.String(); d.timeout = min(d.timeout, to) })
		time.Sleep(time.Minute) // a fence in progress may have read the previous one
		d.with(func() { d.timeout = to })
	case 3:
		d.with(func() { d.tags["lull:warn-before"] = []string{"10s", "30s", "1m"}[d.rng.IntN(3)] })
	case 4: // the agent is restarted
		d.down()
		d.boot()
	case 5: // the machine sleeps
		length := time.Duration(1+d.rng.IntN(300)) * time.Minute
		d.with(func() { d.slept += length; d.snoozed = d.snoozed.Add(-length) }) // it ends while the machine sleeps
	case 6: // its clock is set
		d.with(func() { d.skew += time.Duration(d.rng.IntN(600)-300) * time.Second })
	case 7, 8: // a signal is unreadable for a while
		s := []string{proc.SignalCPU, proc.SignalDisk, proc.SignalTerminals, proc.SignalUsers}[d.rng.IntN(4)]
		d.with(func() { d.broken[s] = true })
		time.Sleep(time.Duration(d.rng.IntN(20)) * time.Minute)
		d.with(func() { d.broken[s] = false })
	case 9:
		length := time.Duration(1+d.rng.IntN(40)) * time.Minute
		// A stop that was already sent refuses the snooze.
		if _, err := d.agent.Snooze(d.t.Context(), agentctl.SnoozeRequest{For: idle.Duration(length)}); err == nil {
			d.with(func() { d.snoozed = time.Now().Add(length) })
		}
	case 10:
		d.with(func() { d.tagsErr = errBoom })
		time.Sleep(time.Duration(d.rng.IntN(20)) * time.Minute)
		d.with(func() { d.tagsErr = nil })
	case 11:
		if _, err := d.agent.Reload(d.t.Context()); err != nil {
			d.t.Error(err)
		}
	}
}

// TestOracle checks that no idle stop hits a machine that was in use within its
// timeout, whatever the users, the load, the tags, the clocks, the signals and
// the agent itself do. LULL_SOAK runs many more days.
func TestOracle(t *testing.T) {
	days := 6
	if os.Getenv("LULL_SOAK") != "" {
		days = 300
	}
	seed, judged := uint64(time.Now().UnixNano()), 0
	t.Logf("seed %d", seed)
	for n := range days {
		synctest.Test(t, func(t *testing.T) { judged += oneDay(t, seed+uint64(n)) })
		if t.Failed() {
			t.Fatalf("seed %d", seed+uint64(n))
		}
	}
	t.Logf("%d stops in %d days", judged, days)
	if judged == 0 {
		t.Error("nothing was ever stopped")
	}
}

func oneDay(t *testing.T, seed uint64) int {
	rng := rand.New(rand.NewPCG(seed, 1))
	began := time.Now()
	const hours = 8 * time.Hour
	draw := func(longest time.Duration) truth.Use { return truth.Draw(rng, began, hours, longest) }
	longest := []time.Duration{10 * time.Minute, time.Hour, 3 * time.Hour}[rng.IntN(3)]
	w := newWorld()
	m := &machine{world: w, root: t.TempDir(), began: began, at: began, load: draw(longest), disk: draw(longest), keys: draw(longest), sessions: draw(longest)}
	for _, dir := range []string{"proc", "dev/pts"} {
		must(t, os.MkdirAll(filepath.Join(m.root, dir), 0o755))
	}
	must(t, os.WriteFile(filepath.Join(m.root, "dev/pts/0"), nil, 0o600))
	d := &day{machine: m, t: t, rng: rng, timeout: 5 * time.Minute, interval: []time.Duration{30 * time.Second, time.Minute, 4 * time.Minute}[rng.IntN(3)]}
	w.tags["lull:idle-timeout"], w.tags["lull:check-interval"], w.tags["lull:snooze"] = "5m", d.interval.String(), "1m"
	must(t, m.write(began))
	d.boot()
	for time.Since(began) < hours {
		time.Sleep(time.Duration(rng.IntN(30*60)) * time.Second)
		gone := false
		d.with(func() { gone = d.stopped })
		if gone {
			d.down()
			d.boots++
			d.with(func() { d.stopped, d.bootID = false, fmt.Sprintf("boot-%d", d.boots+1) })
			d.boot()
			continue
		}
		d.happen()
	}
	d.down()
	synctest.Wait()
	return d.judged
}
