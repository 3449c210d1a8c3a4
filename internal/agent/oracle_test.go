package agent

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/wall"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
	"lull/internal/sim/truth"
)

// The kinds of use of a machine.
const (
	kindLoad     = iota // CPU load
	kindDisk            // disk traffic
	kindKeys            // key presses of a user
	kindOutput          // output of a program to a terminal
	kindSessions        // a user is logged in
	kinds
)

// machine is a simulated machine whose use is drawn before the agent runs. The agent
// reads its files with the real probes. The use is never derived from a reading.
type machine struct {
	*world
	root  string
	real  *proc.Machine
	began time.Time

	use  [kinds]truth.Use
	boot struct {
		at    time.Time     // of the bubble
		slept time.Duration // how long the machine had been suspended in total by then
	}
	hangs bool        // the probe of the sessions does not answer
	lulls []time.Time // when the agent wrote to the terminal, in the bubble's time

	input, output stamp // of the terminal

	cpu, sectors float64   // total work up to at
	at           time.Time // of the bubble
}

const machineCPUs = 4

// wall converts a time of the bubble to the machine's wall clock.
func (m *machine) wall(t time.Time) time.Time { return t.Add(m.slept + m.skew) }

// clocks returns the machine's clocks, as of the current boot.
func (m *machine) clocks() wall.Reading {
	m.mu.Lock()
	defer m.mu.Unlock()
	mono := time.Since(m.boot.at)
	return wall.Reading{Boot: mono + m.slept - m.boot.slept, Mono: mono, Wall: m.wall(time.Now()).Round(0)}
}

// write updates the machine's files to now. m.mu must be held.
func (m *machine) write(now time.Time) error {
	span := now.Sub(m.at).Seconds()
	m.cpu += m.use[kindLoad].Share(m.at, now) * span
	m.sectors += m.use[kindDisk].Share(m.at, now) * span * 2048 // 1 MiB per second of use
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
	input, output := m.began, m.began
	if last, ok := m.use[kindKeys].Last(now); ok {
		input = last
	}
	if last, ok := m.use[kindOutput].Last(now); ok {
		output = last
	}
	if n := len(m.lulls); n > 0 && m.lulls[n-1].After(output) {
		output = m.lulls[n-1]
	}
	return os.Chtimes(filepath.Join(m.root, "dev/pts/0"), m.input.of(m, input), m.output.of(m, output))
}

// stamp is a file's time: at in the bubble, and wall by the machine's clock when the
// file was written.
type stamp struct{ at, wall time.Time }

func (s *stamp) of(m *machine, at time.Time) time.Time {
	if !s.at.Equal(at) {
		s.at, s.wall = at, m.wall(at)
	}
	return s.wall
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

// someone is the Slow signal about the machine's sessions.
type someone struct{ m *machine }

func (someone) Signal() string     { return proc.SignalUsers }
func (someone) Wanted(Config) bool { return true }
func (s someone) Read(ctx context.Context, now time.Time, _ Config) idle.Reading {
	var hangs bool
	s.m.with(func() { hangs = s.m.hangs })
	if hangs {
		<-ctx.Done()
		time.Sleep(time.Second) // it ignores its deadline
		return idle.NotKnown(proc.SignalUsers, now, "no answer")
	}
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	r := idle.Reading{Signal: proc.SignalUsers, State: idle.Quiet, At: now}
	if s.m.broken[proc.SignalUsers] {
		return idle.NotKnown(proc.SignalUsers, now, "broken for the test")
	}
	if last, ok := s.m.use[kindSessions].Last(time.Now()); ok {
		r.LastEvent = s.m.wall(last)
	}
	if s.m.use[kindSessions].At(time.Now()) {
		r.State = idle.Active
	}
	return r
}

// wrote records a write of the agent to the terminal, with the time that the kernel
// gives it.
func (m *machine) wrote() {
	m.with(func() {
		m.own.Note(m.wall(time.Now()))
		m.lulls = append(m.lulls, time.Now())
	})
}

// Withdraw records the agent's writes to the terminal, as Warn does.
func (m *machine) Withdraw(ctx context.Context, x Withdrawal) error {
	err := m.world.Withdraw(ctx, x)
	if x.Warning.Action != "" {
		m.wrote()
	}
	return err
}

// long returns the spans of u that are at least d long.
func long(u truth.Use, d time.Duration) truth.Use {
	return truth.Of(slices.DeleteFunc(u.Spans(), func(s truth.Span) bool { return s.To.Sub(s.From) < d })...)
}

// setting is a setting that changes during the test. For a while after a change, an
// action may still follow the earlier value.
type setting struct {
	now, before time.Duration
	changed     time.Time
}

// rereads is the maximum time between an action's last reading of the tags and its
// call.
const rereads = 15 * time.Second

// slowest is the longest duration of an action: its hook and a check interval after
// the hook. The required warning time is fixed when the action begins.
const slowest = 2*time.Minute + 5*time.Minute

func (s *setting) set(d time.Duration) { s.before, s.now, s.changed = s.now, d, time.Now() }

// least returns the shortest value that an action may follow now, if it read the
// setting at most span ago.
func (s *setting) least(span time.Duration) time.Duration {
	if time.Since(s.changed) <= span {
		return min(s.now, s.before)
	}
	return s.now
}

// day is one simulated machine and its history. All times are the bubble's, except
// for the deadline.
type day struct {
	*machine
	t     *testing.T
	rng   *rand.Rand
	agent *Agent
	end   context.CancelFunc
	ended chan struct{}
	boots int

	timeout, warnBefore setting
	interval, grace     time.Duration

	up        time.Time // when it last booted or resumed
	snoozed   time.Time // end of a user's snooze
	leased    time.Time
	completed time.Time // when the work was completed; zero if it is not
	deadline  time.Time // by the machine's clock; zero if there is none
	passed    time.Time // when it was first seen to have passed
	warnedAt  map[string]time.Time
	answered  int       // number of warnings that users have answered
	untagged  time.Time // until then, the tags cannot be read
	disturbed time.Time // until then, a fault or a change may delay a stop
	storm     time.Time // until then, the clock is set again and again
	skewed    time.Time // when the clock was last set
	mends     map[time.Time]func()

	hooked []truth.Span   // periods in which a hook ran; the rates cannot tell its work from use
	judged map[string]int // number of calls that were checked, by reason
}

// Warn records when each warning was sent.
func (d *day) Warn(ctx context.Context, x Warning) error {
	err := d.machine.world.Warn(ctx, x)
	d.wrote()
	d.with(func() { d.warnedAt[x.Reason] = time.Now() })
	return err
}

// checkedCloud is a Cloud that checks every call against the truth.
type checkedCloud struct {
	fakeCloud
	d *day
}

func (c checkedCloud) Stop(ctx context.Context, hibernate bool) (string, error) {
	c.d.judge()
	return c.fakeCloud.Stop(ctx, hibernate)
}

// judge fails the test if the stop that is being sent is not allowed.
func (d *day) judge() {
	reason := mustStatus(d.t, d.agent).Last.Reason
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.judged[reason]++
	fail := func(format string, args ...any) {
		d.t.Errorf("%s, stopped because of %s: %s", now.Format(time.TimeOnly), reason, fmt.Sprintf(format, args...))
	}
	warned, ok := d.warnedAt[reason]
	if before := min(d.warnBefore.least(configEvery+slowest), d.timeout.least(configEvery+slowest)/2); !ok || now.Sub(warned) < before-time.Second {
		fail("warned at %s, at least %s before is due", warned.Format(time.TimeOnly), before)
	}
	if up := now.Sub(d.boot.at) + d.slept - d.boot.slept; up < d.grace-time.Second {
		fail("it booted only %s ago", up)
	}
	switch reason {
	case reasonTTL:
		if d.deadline.IsZero() || d.wall(now).Before(d.deadline.Add(-noise-time.Second)) {
			fail("the deadline is %s, and it is %s", d.deadline, d.wall(now))
		}
		return
	case reasonComplete:
		if d.completed.IsZero() {
			fail("it was not completed")
		}
	default:
		d.idle(now, fail)
	}
	if now.Before(d.snoozed) {
		fail("it was snoozed until %s", d.snoozed)
	}
	if now.Before(d.leased) {
		fail("a lease holds it until %s", d.leased)
	}
}

// idle fails if the machine was in use within its timeout. Two limits of the rates
// are allowed for: work below their thresholds over a check interval (full load for a
// twentieth of it), and use that began after the last window of the final check,
// which is at least 10 s long and ends at most 5 s before. d.mu must be held.
func (d *day) idle(now time.Time, fail func(string, ...any)) {
	timeout := d.timeout.least(rereads)
	rough := d.interval/16 + time.Second
	for kind, u := range d.use {
		least, blind := timeout-2*time.Second, freshLimit
		switch kind {
		case kindLoad:
			u = d.unhooked(u)
			u = long(u, d.interval/8+2*time.Second)
			least, blind = timeout-rough, 15*time.Second+d.interval/8
		case kindDisk:
			u = d.unhooked(u)
			least, blind = timeout-rough, 15*time.Second+d.interval/8
		case kindOutput: // the kernel dates it like lull's own writes, or those hide it
			u = truth.Of(slices.DeleteFunc(u.Spans(), func(s truth.Span) bool {
				return slices.ContainsFunc(d.lulls, func(w time.Time) bool {
					return s.To.After(w.Add(-probeLimit-time.Second)) && s.To.Before(w.Add(proc.OwnWriteSpan+2*time.Second))
				})
			})...)
		}
		if err := u.Check(now, least, blind); err != nil {
			fail("use of kind %d: %v", kind, err)
		}
	}
	if up := now.Sub(d.up); up < timeout-time.Second {
		fail("it booted or resumed only %s ago, timeout %s", up, timeout)
	}
}

// unhooked returns u without the periods in which a hook hides use. d.mu must be
// held.
func (d *day) unhooked(u truth.Use) truth.Use {
	return truth.Of(slices.DeleteFunc(u.Spans(), func(s truth.Span) bool {
		return slices.ContainsFunc(d.hooked, func(h truth.Span) bool {
			return s.From.After(h.From.Add(-d.interval/8-2*time.Second)) && s.To.Before(h.To)
		})
	})...)
}

// start starts an agent.
func (d *day) start() {
	d.real = proc.NewMachine(proc.MachineConfig{Root: d.root, Own: d.own})
	d.tune = func(o *Options) {
		o.Cheap, o.Slow, o.Warner, o.Cloud, o.Clocks = d.machine, []Slow{someone{d.machine}}, d, checkedCloud{fakeCloud{d.world}, d}, d.clocks
	}
	ctx, cancel := context.WithCancel(d.t.Context())
	d.ended = make(chan struct{})
	agent := d.world.make(d.t)
	d.agent, d.end = agent, cancel
	ended := d.ended
	go func() {
		defer close(ended)
		_ = agent.Run(ctx) // the result does not matter
	}()
	<-agent.Ready()
	d.disturb(d.interval)
}

func (d *day) down() {
	d.end()
	<-d.ended
	d.real.Close()
}

// reboot boots the machine after it was stopped.
func (d *day) reboot() {
	d.down()
	d.boots++
	d.with(func() {
		d.stopped, d.bootID = false, fmt.Sprintf("boot-%d", d.boots+1)
		d.boot.at, d.boot.slept, d.up = time.Now(), d.slept, time.Now()
		d.snoozed, d.leased, d.completed = time.Time{}, time.Time{}, time.Time{}
		if !d.tagless() { // without a source of tags, the last known deadline applies
			d.deadline = time.Time{}
			delete(d.tags, "lull:ttl-deadline")
		}
		clear(d.warnedAt)
	})
	d.start()
	d.disturb(d.grace)
}

// disturb notes that for span from now, an idle machine may be stopped later than
// usual.
func (d *day) disturb(span time.Duration) {
	if at := time.Now().Add(span); at.After(d.disturbed) {
		d.disturbed = at
	}
}

// breaks calls do now, and undo after span.
func (d *day) breaks(span time.Duration, do, undo func()) {
	d.with(do)
	d.mends[time.Now().Add(span)] = undo
	d.disturb(span)
}

func (d *day) between(least, most time.Duration) time.Duration {
	return least + time.Duration(d.rng.Int64N(int64(most-least)))
}

// set changes a setting in the tags.
func (d *day) set(name string, s *setting, to time.Duration) {
	d.with(func() {
		d.tags["lull:"+name] = to.String()
		s.set(to)
	})
	d.disturb(configEvery)
}

func (d *day) draw(of ...time.Duration) time.Duration { return of[d.rng.IntN(len(of))] }

// happen causes one random event.
func (d *day) happen() {
	switch d.rng.IntN(18) {
	case 0, 1, 2:
		if !d.tagless() {
			d.set("idle-timeout", &d.timeout, d.draw(time.Minute, 2*time.Minute, 5*time.Minute, 15*time.Minute, 40*time.Minute))
		}
	case 3:
		if !d.tagless() {
			d.set("warn-before", &d.warnBefore, d.draw(10*time.Second, 30*time.Second, 2*time.Minute))
		}
	case 4:
		d.restart()
	case 5:
		d.sleep(d.between(time.Minute, 5*time.Hour))
	case 6: // the clock is set
		d.step(5 * time.Minute)
		d.disturb(0)
	case 7, 8: // a signal cannot be read for a while
		s := []string{proc.SignalCPU, proc.SignalDisk, proc.SignalTerminals, proc.SignalUsers}[d.rng.IntN(4)]
		d.breaks(d.between(5*time.Minute, time.Hour), func() { d.broken[s] = true }, func() { d.broken[s] = false })
	case 9:
		d.snooze(d.between(time.Minute, 40*time.Minute))
	case 10: // the tags become unreadable; a restarted agent may have lost the cached ones
		if d.tagless() {
			return
		}
		if _, err := d.agent.Reload(d.t.Context()); err != nil { // the agent does not reread the file by itself
			d.t.Error(err)
		}
		d.untagged = time.Now().Add(d.between(0, 90*time.Minute))
		d.with(func() { d.tagsErr = errBoom })
		d.mends[d.untagged] = func() { d.tagsErr = nil }
		if d.rng.IntN(3) > 0 {
			d.restart()
		}
	case 11:
		if _, err := d.agent.Reload(d.t.Context()); err != nil {
			d.t.Error(err)
		}
	case 12, 16:
		d.breaks(d.between(5*time.Minute, time.Hour), func() { d.hangs = true }, func() { d.hangs = false })
	case 13: // the clock is set so often that no two samples can be compared
		d.storm = time.Now().Add(d.between(10*time.Minute, time.Hour))
		d.disturb(time.Until(d.storm))
	case 17:
		d.lease(d.between(time.Minute, 40*time.Minute))
	case 14:
		if !d.tagless() && d.deadline.IsZero() {
			d.with(func() {
				d.deadline = d.wall(time.Now()).Add(d.between(10*time.Minute, 90*time.Minute)).Truncate(time.Second)
				d.tags["lull:ttl-deadline"] = d.deadline.UTC().Format(time.RFC3339)
			})
			d.disturb(configEvery)
		}
	case 15:
		d.with(func() { d.completed = time.Now() }) // only the first completion after a boot counts, and it may act before it answers
		if _, err := d.agent.Complete(d.t.Context(), agentctl.CompleteRequest{}); err != nil {
			d.t.Error(err)
		}
	}
}

// sleep suspends the machine. What ends meanwhile ends while the machine is asleep.
func (d *day) sleep(length time.Duration) {
	d.with(func() {
		d.slept += length
		d.snoozed, d.leased, d.up = d.snoozed.Add(-length), d.leased.Add(-length), time.Now()
	})
	d.disturb(0)
}

// step sets the machine's clock forward or back by up to most.
func (d *day) step(most time.Duration) {
	d.with(func() { d.skew += d.between(-most, most) })
	d.skewed = time.Now()
}

// restart restarts the agent, unless the clock was set a moment ago: a snooze ends by
// the clock's time, and only a running agent notices when the clock is set.
func (d *day) restart() {
	if time.Since(d.skewed) > d.interval+2*probeLimit {
		d.down()
		d.start()
	}
}

func (d *day) tagless() bool { return time.Now().Before(d.untagged) }

// snooze, and lease below, protect the machine unless a stop has already been sent.
func (d *day) snooze(length time.Duration) {
	if _, err := d.agent.Snooze(d.t.Context(), agentctl.SnoozeRequest{For: idle.Duration(length)}); err == nil {
		d.with(func() { d.snoozed = time.Now().Add(length - noise - time.Second) })
		d.disturb(length)
	}
}

func (d *day) lease(length time.Duration) {
	if _, err := d.agent.HoldLease(d.t.Context(), agentctl.LeaseRequest{Holder: "job", TTL: idle.Duration(length)}); err == nil {
		d.with(func() { d.leased = time.Now().Add(length - noise - time.Second) })
		d.disturb(length)
	}
}

// react makes users react to a warning.
func (d *day) react() {
	var n int
	d.with(func() { n = len(d.warnings) })
	if n == d.answered {
		return
	}
	d.answered = n
	switch d.rng.IntN(10) {
	case 0:
		d.snooze(d.between(5*time.Minute, 40*time.Minute))
	case 1:
		d.lease(d.between(5*time.Minute, 40*time.Minute))
	case 2, 3, 4:
		if !d.tagless() {
			d.set("idle-timeout", &d.timeout, 40*time.Minute)
		}
	case 5:
		d.sleep(d.between(time.Minute, 5*time.Hour))
	}
}

// missed fails the test if a machine without faults was left running although it is
// idle or its deadline has passed.
func (d *day) missed(now time.Time) {
	from := d.disturbed
	for _, t := range []time.Time{d.up, d.snoozed, d.leased} {
		from = later(from, t)
	}
	slack := max(d.warnBefore.now, d.warnBefore.before) + 3*d.interval + 4*time.Minute // includes the hook's run
	switch {
	case d.deadline.IsZero() || d.wall(now).Before(d.deadline) || d.tagless() || now.Before(d.storm) || now.Sub(d.boot.at) < d.grace:
		d.passed = time.Time{}
	case d.passed.IsZero():
		d.passed = now
	case now.Sub(d.passed) > slack+2*configEvery:
		d.t.Errorf("%s: it still runs %s after its deadline", now.Format(time.TimeOnly), now.Sub(d.passed))
		d.passed = now.Add(time.Hour) // report it once
	}
	for _, u := range d.use {
		if last, ok := u.Last(now); ok {
			from = later(from, last)
		}
	}
	if idle := now.Sub(from); idle > max(d.timeout.now, d.timeout.before)+slack {
		s := mustStatus(d.t, d.agent)
		d.t.Errorf("%s: idle and undisturbed for %s, timeout %s, and it still runs: %v", now.Format(time.TimeOnly), idle, d.timeout.now, s.Verdict.Blocks)
		d.disturb(time.Hour) // report it once
	}
}

// TestOracle checks what the agent does to a machine whose use was drawn in advance,
// under random tags, clocks, signals, users and faults of the agent itself.
//
// No idle stop may hit a machine that was in use within its timeout or that a user
// protects. A completion must respect leases and snoozes, and a deadline must not. A
// warning must precede each action, and an idle machine must be stopped. Package
// mutants has the faults that this test finds. LULL_DAYS is the number of days.
func TestOracle(t *testing.T) {
	days := scaletest.Count(t, "LULL_DAYS", 24)
	seed, judged := scaletest.Seed(t), map[string]int{}
	for n := range days {
		synctest.Test(t, func(t *testing.T) { oneDay(t, seed+uint64(n), judged) })
		if t.Failed() {
			return
		}
	}
	t.Logf("stops in %d days: %v", days, judged)
	if judged[reasonIdle] == 0 {
		t.Error("nothing was ever stopped")
	}
}

func oneDay(t *testing.T, seed uint64, judged map[string]int) {
	rng := rand.New(rand.NewPCG(seed, 1))
	defer func() {
		if t.Failed() {
			t.Logf("LULL_SEED=%d LULL_DAYS=1", seed)
		}
	}()
	began := time.Now()
	const hours = 8 * time.Hour
	d := &day{t: t, rng: rng, warnedAt: map[string]time.Time{}, mends: map[time.Time]func(){}, judged: judged, up: began}
	d.interval, d.grace = d.draw(10*time.Second, 30*time.Second, time.Minute, 4*time.Minute), d.draw(0, 20*time.Minute)
	w := newWorld()
	d.machine = &machine{world: w, root: t.TempDir(), began: began, at: began}
	d.boot.at = began
	for _, s := range truth.Draw(rng, began, hours, d.draw(10*time.Minute, time.Hour, 2*time.Hour)).Spans() {
		for n := 1 + rng.IntN(2); n > 0; n-- {
			kind := rng.IntN(kinds)
			d.use[kind] = truth.Of(append(d.use[kind].Spans(), s)...)
		}
	}
	for _, dir := range []string{"proc", "dev/pts"} {
		errtest.None(t, os.MkdirAll(filepath.Join(d.root, dir), 0o755))
	}
	errtest.None(t, os.WriteFile(filepath.Join(d.root, "dev/pts/0"), nil, 0o600))
	d.timeout, d.warnBefore = setting{now: 5 * time.Minute, before: 5 * time.Minute}, setting{now: 30 * time.Second, before: 30 * time.Second}
	w.tags["lull:idle-timeout"], w.tags["lull:warn-before"] = "5m", "30s"
	w.tags["lull:check-interval"], w.tags["lull:snooze"], w.tags["lull:boot-grace"] = d.interval.String(), "1m", d.grace.String()
	w.tags["lull:on-complete"], w.tags["lull:ttl-action"] = "stop", "stop"
	if rng.IntN(3) > 0 {
		took := d.between(time.Second, 2*time.Minute)
		w.config = []byte("pre-stop: /bin/prepare\n")
		w.hook = func(h HookSpec) agentctl.Hook {
			begun := time.Now()
			time.Sleep(took)
			d.with(func() { d.hooked = append(d.hooked, truth.Span{From: begun, To: time.Now().Add(2 * time.Second)}) })
			return agentctl.Hook{Command: h.Command}
		}
	}
	errtest.None(t, d.write(began))
	d.start()
	d.disturb(d.grace)
	next := began
	for time.Since(began) < hours {
		time.Sleep(time.Second)
		now := time.Now()
		for at, mend := range d.mends {
			if !now.Before(at) {
				d.with(mend)
				delete(d.mends, at)
			}
		}
		gone := false
		d.with(func() { gone = d.stopped })
		if gone {
			time.Sleep(d.between(0, 10*time.Minute))
			d.reboot()
			continue
		}
		if now.Before(d.storm) && now.Second()%8 == 0 {
			d.step(8 * time.Second)
		}
		d.react()
		d.missed(now)
		if now.After(next) {
			next = now.Add(d.between(0, 12*time.Minute))
			d.happen()
		}
	}
	d.down()
	synctest.Wait()
}
