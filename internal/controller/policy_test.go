package controller

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/policy"
	"lull/internal/core/policy/when"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/rules"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/lib/errtest"
	"lull/internal/store/mem"
)

// local returns a time in Berlin, given as 2006-01-02 15:04.
func local(t *testing.T, text string) time.Time {
	t.Helper()
	m, err := when.Moment(time.Now(), text+" Europe/Berlin")
	errtest.None(t, err)
	return m
}

func (r *rig) until(m time.Time) {
	r.t.Helper()
	if time.Now().After(m) {
		r.t.Fatalf("%s is over", m)
	}
	time.Sleep(time.Until(m))
}

// office creates the schedule "office", whose hours also start workers. more are
// further windows.
func (r *rig) office(more ...string) {
	r.t.Helper()
	s := policy.Schedule{Name: "office", Zone: "Europe/Berlin", Start: true}
	for _, text := range append([]string{"mon-fri 08:00-18:00"}, more...) {
		w, err := policy.ParseWindow(text)
		if err != nil {
			r.t.Fatal(err)
		}
		w.Hold = text != "mon-fri 08:00-18:00"
		s.Windows = append(s.Windows, w)
	}
	if _, err := r.fleet.PutSchedule(r.t.Context(), operator, s, true); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) apply(sel policy.Scope, a rules.Application) {
	r.t.Helper()
	if _, _, err := r.fleet.Apply(r.t.Context(), operator, sel, a); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) override(o policy.Override) policy.Override {
	r.t.Helper()
	o, err := r.fleet.AddOverride(r.t.Context(), operator, o)
	if err != nil {
		r.t.Fatal(err)
	}
	return o
}

// use adds one event, of now, to a worker's CML.
func (r *rig) use(id string) {
	m := r.machine(id)
	r.world.mu.Lock()
	defer r.world.mu.Unlock()
	r.world.advance(m)
	if m.State == "running" {
		m.events = append(m.events, cmlEvent{at: time.Now(), arrives: time.Now()})
	}
}

// TestScheduleWeeks simulates a week around each clock change. A user works on
// weekdays from 8:00 to 17:30, and operators give various commands. Each line of the
// table states what must be true at its time.
func TestScheduleWeeks(t *testing.T) {
	for _, c := range []struct{ name, monday string }{{"spring forward", "2000-03-20"}, {"fall back", "2000-10-23"}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				monday, err := when.ParseDate(c.monday)
				errtest.None(t, err)
				on := func(day int, clock string) time.Time { return local(t, monday.Add(day).String()+" "+clock) }
				time.Sleep(time.Until(on(0, "06:00")))
				r := newRig(t, options{settings: map[string]any{"worker_idle_timeout_minutes": 180}})
				defer r.stop()
				r.office("sat 22:00-23:00")
				w := r.create()
				id := w.ID
				r.await(id, power.WorkerRunning, 5*time.Minute)
				r.apply(policy.Scope{Tags: map[string]string{"team": ""}}, rules.Application{Schedule: new("office")})
				errtest.Get(r.fleet.UpdateWorker(t.Context(), operator, id, 0, worker.Profile{Tags: map[string]string{"team": "net"}}))(t)
				ctx, end := context.WithCancel(t.Context())
				defer end()
				loc, err := when.Zone("Europe/Berlin")
				errtest.None(t, err)
				go func() { // the user at work
					for delay.For(ctx, 15*time.Minute) == nil {
						now := time.Now().In(loc)
						clock := when.Clock(now.Hour()*60 + now.Minute())
						if d := now.Weekday(); d != time.Saturday && d != time.Sunday && clock >= 8*60 && clock < 17*60+30 {
							r.use(id)
						}
					}
				}()
				type line struct {
					day   int
					clock string
					run   bool
					why   power.Reason // of the last pause
					do    func()
				}
				on5 := func(o policy.Override) { o.Selector = policy.Scope{Workers: []string{id}}; r.override(o) }
				for _, l := range []line{
					{0, "17:55", true, "", nil},
					{0, "18:03", false, power.ReasonSchedule, nil},
					{1, "07:58", false, power.ReasonSchedule, nil},
					{1, "08:03", true, power.ReasonSchedule, nil},
					{1, "17:00", true, "", func() { on5(policy.Override{Kind: policy.Keep, Until: on(1, "19:00")}) }},
					{1, "18:58", true, "", nil},
					{1, "19:08", false, power.ReasonSchedule, nil}, // the closing takes effect when the override ends
					{2, "08:03", true, "", nil},
					{2, "12:00", true, "", func() { on5(policy.Override{Kind: policy.Skip, Until: on(3, "00:00")}) }},
					{2, "19:00", true, "", nil},
					{2, "20:40", false, power.ReasonIdleTimeout, nil}, // the closing was skipped, but idleness still counts
					{3, "08:03", true, "", nil},
					{3, "18:30", false, power.ReasonSchedule, func() { on5(policy.Override{Kind: policy.Freeze, Until: on(4, "09:30")}) }},
					{4, "09:25", false, "", nil}, // frozen, therefore still stopped
					{4, "09:35", true, "", nil},  // the opening takes effect after the freeze
					{4, "12:00", true, "", func() {
						if _, err := r.fleet.StopWorker(t.Context(), operator, id); err != nil {
							t.Error(err)
						}
					}},
					{4, "12:03", false, power.ReasonManual, nil},
					{5, "10:00", false, power.ReasonManual, func() { // a user starts it outside the hours
						if _, err := r.fleet.ResumeWorker(t.Context(), operator, id); err != nil {
							t.Error(err)
						}
					}},
					{5, "10:58", true, "", nil}, // runs until idle, at the earliest after its snooze
					{5, "12:58", true, "", nil}, // the idle timeout counts from the start
					{5, "13:12", false, power.ReasonIdleTimeout, nil},
					{5, "22:05", true, "", nil},  // the maintenance window has started it
					{5, "22:58", true, "", nil},  // and keeps it running
					{5, "23:25", false, "", nil}, // until the window ends
					{6, "12:00", false, "", nil}, // the night of the clock change is over
					{7, "07:58", false, "", nil},
					{7, "08:03", true, "", nil},
					{7, "18:03", false, power.ReasonSchedule, nil},
				} {
					r.until(on(l.day, l.clock))
					w := r.worker(id)
					if running := w.Status == power.WorkerRunning; running != l.run || !l.run && l.why != "" && w.PauseReason != l.why {
						st, _ := r.c.Live(id)
						t.Fatalf("day %d at %s it is %s (%s by %s), want running %t (%s); blocks %+v", l.day, l.clock, w.Status, w.PauseReason, w.LastPausedBy, l.run, l.why, st.Idle.Blocks)
					}
					if l.do != nil {
						l.do()
					}
				}
				w = r.worker(id)
				if w.ManualResumeCount != 1 || w.ManualPauseCount != 1 || w.AutoResumeCount != 6 {
					t.Errorf("counted %d and %d resumes, %d pauses by users", w.ManualResumeCount, w.AutoResumeCount, w.ManualPauseCount)
				}
				if !strings.HasPrefix(w.LastResumedBy, "schedule office") {
					t.Errorf("last resumed by %q", w.LastResumedBy)
				}
				m := r.machine(id)
				if n := len(m.warned); n < 5 {
					t.Errorf("%d warnings", n)
				}
			})
		})
	}
}

// TestScheduleInUse checks that a schedule does not stop a worker in use. With force
// it stops the worker after a warning, and the record says what was in use.
func TestScheduleInUse(t *testing.T) {
	for _, force := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			time.Sleep(time.Until(local(t, "2000-02-29 08:00"))) // a leap day, a Tuesday
			r := newRig(t, options{})
			defer r.stop()
			r.office()
			errtest.Get(r.fleet.PutPolicy(t.Context(), operator, policy.Named{Name: "strict", Values: policy.Values{Force: &force, Schedule: new("office")}}, true))(t)
			id := r.create().ID
			r.await(id, power.WorkerRunning, 5*time.Minute)
			r.apply(policy.Scope{Workers: []string{id}}, rules.Application{Policy: new("strict")})
			ctx, end := context.WithCancel(t.Context())
			defer end()
			go func() {
				for delay.For(ctx, 4*time.Minute) == nil {
					r.use(id)
				}
			}()
			r.until(local(t, "2000-02-29 18:30"))
			w := r.worker(id)
			if stopped := w.Status == power.WorkerStopped; stopped != force {
				t.Fatalf("force %t: it is %s", force, w.Status)
			}
			if !force {
				end()
				r.until(local(t, "2000-02-29 19:00"))
				if w = r.worker(id); w.Status != power.WorkerStopped || w.PauseReason != power.ReasonSchedule {
					t.Errorf("after its user has gone it is %s (%s)", w.Status, w.PauseReason)
				}
				return
			}
			page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "pause_intended"})
			if err != nil || len(page.Entries) != 1 || !strings.Contains(page.Entries[0].Detail, "cml") || page.Entries[0].Reason != "schedule" {
				t.Errorf("recorded as %+v, %v", page.Entries, err)
			}
			page, err = r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "pause_warning"})
			if err != nil || len(page.Entries) != 1 || page.Entries[0].Warning == nil {
				t.Fatalf("warned as %+v, %v", page.Entries, err)
			}
			x := page.Entries[0].Warning
			if !x.Forced || x.Reason != power.ReasonSchedule || x.Cause != "schedule office" || !strings.Contains(x.Use, "cml") || w.LastPausedAt.Sub(x.PauseAt).Abs() > time.Minute {
				t.Errorf("the warning is %+v; it was paused at %s", x, w.LastPausedAt)
			}
			m := r.machine(id)
			if len(m.warned) != 1 || !m.warned[0].Equal(x.PauseAt) || m.warned[0].Before(local(t, "2000-02-29 17:59")) {
				t.Errorf("warned of %v", m.warned)
			}
		})
	}
}

// many creates n workers, waits until they run and returns their IDs.
func (r *rig) many(n int) []string {
	r.t.Helper()
	var ids []string
	for i := range n {
		w, err := r.fleet.CreateWorker(r.t.Context(), operator, fleet.NewWorker{Name: fmt.Sprintf("n%d", i), AWSRegion: region0, TemplateName: "small"})
		if err != nil {
			r.t.Fatal(err)
		}
		ids = append(ids, w.ID)
	}
	for _, id := range ids {
		r.await(id, power.WorkerRunning, 10*time.Minute)
	}
	return ids
}

// times returns the times of the audit entries that pick accepts.
func (r *rig) times(pick func(audit.Entry) bool) []time.Time {
	r.t.Helper()
	var out []time.Time
	for q := (audit.Query{Limit: 1000}); ; {
		page, err := r.fleet.Audit(r.t.Context(), q)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, e := range page.Entries {
			if pick(e) {
				out = append(out, e.At)
			}
		}
		if q.After = page.Next; page.Next == "" {
			slices.SortFunc(out, time.Time.Compare)
			return out
		}
	}
}

// most returns the largest number of times within any interval of length per.
func most(times []time.Time, per time.Duration) int {
	best, from := 0, 0
	for i, t := range times {
		for t.Sub(times[from]) >= per {
			from++
		}
		best = max(best, i-from+1)
	}
	return best
}

// TestBudgets checks that budgets, with random limits, hold across two servers whose
// store loses answers. Every worker must be stopped and started in the end, and
// workers that a user waits for must start first.
func TestBudgets(t *testing.T) {
	seed := baseSeed(t)
	rng := rand.New(rand.NewPCG(seed, 3))
	stops, starts := 1+rng.IntN(6), 2+rng.IntN(13) // with one start in 3 min, the last wake would wait longer than aged
	stopPer, startPer := 1+rng.IntN(10), 1+rng.IntN(3)
	percent := rng.IntN(2) == 0
	t.Logf("at most %d stops in %d min (percent %t), %d starts in %d min", stops, stopPer, percent, starts, startPer)
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(local(t, "2000-01-03 10:00")))
		settings := map[string]any{"worker_warn_before_minutes": 0, "max_workers_per_region": 100}
		r := newRig(t, options{settings: settings})
		first := r.stop
		defer func() { first() }()
		client := r.db.Client()
		n := 0
		client.Inject(func(c mem.Call) mem.Fault {
			if n++; c.Kind == mem.Commit && n%97 == 0 {
				return mem.Fault{LoseAnswer: true, Late: time.Second}
			}
			return mem.Fault{}
		})
		r.run(client, options{settings: settings, server: "server-2"})
		second := r.stop
		defer func() { second() }()
		const workers = 40
		ids := r.many(workers)
		b := policy.Budget{Name: "gently", For: policy.Stops, MaxActions: &stops, PerMinutes: stopPer}
		if percent {
			b.MaxActions, b.MaxPercent = nil, new(float64(stops)*100/workers)
		}
		for _, b := range []policy.Budget{b, {Name: "starts", For: policy.Starts, MaxActions: &starts, PerMinutes: startPer}} {
			errtest.Get(r.fleet.PutBudget(t.Context(), operator, b))(t)
		}
		all := func(s power.Worker, within time.Duration) {
			t.Helper()
			for end := time.Now().Add(within); ; time.Sleep(10 * time.Second) {
				left := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return r.worker(id).Status == s })
				if len(left) == 0 {
					return
				}
				if time.Now().After(end) {
					w := r.worker(left[0])
					st, _ := r.c.Live(w.ID)
					t.Fatalf("%d are not %s after %s; %s is %s (%s) %+v", len(left), s, within, w.ID, w.Status, w.StatusReason, st.Idle.Blocks)
				}
			}
		}
		waves := time.Duration(workers/stops+2) * time.Duration(stopPer) * time.Minute
		all(power.WorkerStopped, 3*time.Hour+2*waves)
		paused := r.times(func(e audit.Entry) bool { return e.Action == "pause_intended" })
		if got := most(paused, time.Duration(stopPer)*time.Minute); got > stops || len(paused) < workers {
			t.Errorf("%d stops, up to %d in %d min", len(paused), got, stopPer)
		}
		// In the morning the schedule starts all workers but four. Users wait for
		// those four, two minutes later.
		r.office()
		r.apply(policy.Scope{}, rules.Application{Schedule: new("office")})
		var tokens []string
		for _, id := range ids[:4] {
			errtest.Get(r.fleet.UpdateWorker(t.Context(), operator, id, 0, worker.Profile{Tags: map[string]string{"kind": "on demand"}}))(t)
			token, err := r.fleet.NewWakeToken(t.Context(), operator, id)
			errtest.None(t, err)
			tokens = append(tokens, token)
		}
		r.apply(policy.Scope{Tags: map[string]string{"kind": "on demand"}}, rules.Application{Schedule: new("office"), Priority: new(5)})
		errtest.Get(r.fleet.AddOverride(t.Context(), operator, policy.Override{Kind: policy.Skip, Selector: policy.Scope{Tags: map[string]string{"kind": ""}}, Until: local(t, "2000-01-04 07:00").Add(8 * time.Hour)}))(t)
		begun := local(t, "2000-01-04 08:00")
		r.until(begun.Add(10 * time.Second))
		for i, token := range tokens {
			errtest.Get(r.fleet.WakeWorker(t.Context(), ids[i], token))(t)
		}
		waves = time.Duration(workers/starts+2) * time.Duration(startPer) * time.Minute
		all(power.WorkerRunning, 2*waves+15*time.Minute)
		taken := r.times(func(e audit.Entry) bool {
			return e.From == power.WorkerStopped && e.To == power.WorkerStarting && !e.At.Before(begun)
		})
		if got := most(taken, time.Duration(startPer)*time.Minute); got > starts || len(taken) != workers {
			t.Errorf("%d starts, up to %d in %d min", len(taken), got, startPer)
		}
		if starts > 6 {
			part := time.Duration(startPer) * time.Minute / 6
			if got := most(taken, part); got > (starts+5)/6 {
				t.Errorf("up to %d starts in %s: it is no stream", got, part)
			}
		}
		var waited []time.Time
		for _, id := range ids[:4] {
			at := r.times(func(e audit.Entry) bool {
				return e.WorkerID == id && e.From == power.WorkerStopped && e.To == power.WorkerStarting
			})
			waited = append(waited, at[len(at)-1])
		}
		last := slices.MaxFunc(waited, time.Time.Compare)
		before := 0
		for _, at := range taken {
			if at.After(begun.Add(15*time.Second)) && at.Before(last) && !slices.Contains(waited, at) {
				before++
			}
		}
		if before > 2 {
			t.Errorf("%d starts by schedule were before those that a user waited for", before)
		}
		t.Logf("%d stops, %d starts in %s; a user waited %s", len(paused), len(taken), taken[len(taken)-1].Sub(begun), last.Sub(begun.Add(10*time.Second)))
	})
}

// TestShadowPolicy checks that a policy in dry run decides and records everything,
// but does nothing: it neither pauses nor starts, neither warns nor ends a worker at
// its expiry, and writes no tags.
func TestShadowPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(local(t, "2000-01-03 10:00")))
		r := newRig(t, options{})
		defer r.stop()
		r.office()
		if _, err := r.fleet.PutPolicy(t.Context(), operator, policy.Named{Name: "try", Values: policy.Values{
			Shadow: new(true), Schedule: new("office"), IdleTimeoutMinutes: new(30)}}, true); err != nil {
			t.Fatal(err)
		}
		ids := r.many(3)
		r.apply(policy.Scope{}, rules.Application{Policy: new("try")})
		at := time.Now().Add(4 * time.Hour)
		errtest.Get(r.fleet.UpdateWorker(t.Context(), operator, ids[0], 0, worker.Profile{TTLDeadline: &at}))(t)
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, ids[2]))(t)
		r.await(ids[2], power.WorkerStopped, 5*time.Minute)
		r.world.mu.Lock()
		clear(r.world.calls)
		r.world.mu.Unlock()
		time.Sleep(26 * time.Hour)
		r.world.mu.Lock()
		for _, call := range []string{"stop", "start", "terminate", "tags"} {
			if n := r.world.calls[call]; n > 0 {
				t.Errorf("%d calls of %s", n, call)
			}
		}
		for _, m := range r.world.insts {
			if len(m.warned) > 0 {
				t.Error("a user was warned of what does not happen")
			}
		}
		r.world.mu.Unlock()
		for action, want := range map[string]int{"would_pause": 2, "would_resume": 1} {
			if got := len(r.times(func(e audit.Entry) bool { return e.Action == action })); got < want {
				t.Errorf("%d of %s, want %d", got, action, want)
			}
		}
	})
}

// tags returns the current tags of a worker's EC2 instance.
func (r *rig) tags(id string) map[string]string {
	m := r.machine(id)
	r.world.mu.Lock()
	defer r.world.mu.Unlock()
	return maps.Clone(m.Tags)
}

// TestPolicyTags checks that applying a policy tags many instances with one call and
// writes only what changes, that removing the policy removes the tags, and that a
// deadline in a tag stops the worker even while it is in use.
func TestPolicyTags(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"max_workers_per_region": 100}})
		defer r.stop()
		ids := r.many(12)
		calls := func() int {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			n := r.world.calls["tags"]
			r.world.calls["tags"] = 0
			return n
		}
		calls()
		r.apply(policy.Scope{}, rules.Application{Policy: new("conservative")})
		time.Sleep(time.Minute)
		if n := calls(); n < 1 || n > 2 { // two if a pass begins while the policy is still being applied
			t.Errorf("%d calls for one policy on %d instances", n, len(ids))
		}
		want := map[string]string{"lull:idle-timeout": "4h0m0s", "lull:hibernate-on-idle": "false", "lull:pause-holder": "server", "lull:policy": "conservative", "lull:enabled": "true"}
		for _, id := range ids {
			have := r.tags(id)
			for k, v := range want {
				if have[k] != v {
					t.Errorf("%s is %q, want %q", k, have[k], v)
				}
			}
		}
		at := time.Now().Add(time.Hour).UTC()
		m, other := r.machine(ids[1]), r.machine(ids[2])
		r.world.mu.Lock()
		m.Tags["lull:ttl-deadline"] = at.Format(time.RFC3339)
		other.Tags["lull:idle-timeout"] = "99h" // changed outside lull
		r.world.mu.Unlock()
		time.Sleep(25 * time.Minute) // long enough for a full pass to see both tags
		if w := r.worker(ids[1]); w.TTLDeadline == nil || !w.TTLDeadline.Equal(at.Truncate(time.Second)) || !w.TTLFromTag {
			t.Errorf("the deadline of the tag is %v", w.TTLDeadline)
		}
		if v := r.tags(ids[2])["lull:idle-timeout"]; v != "4h0m0s" {
			t.Errorf("a changed tag stays %q", v)
		}
		r.apply(policy.Scope{}, rules.Application{Policy: new("")})
		time.Sleep(2 * time.Minute)
		for k := range r.tags(ids[3]) {
			if _, ours := want[k]; ours {
				t.Errorf("%s stays although no policy is applied", k)
			}
		}
		if n := calls(); n > 4 {
			t.Errorf("%d calls", n)
		}
		for range 12 { // the worker is in use all the time and still expires
			time.Sleep(5 * time.Minute)
			r.use(ids[1])
		}
		if w := r.worker(ids[1]); w.Status != power.WorkerStopped || w.PauseReason != power.ReasonTTL {
			t.Errorf("past its deadline it is %s (%s)", w.Status, w.PauseReason)
		}
		page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: ids[1], Action: "pause_warning"})
		if err != nil || len(page.Entries) == 0 {
			t.Fatalf("warned as %+v, %v", page.Entries, err)
		}
		if x := page.Entries[len(page.Entries)-1].Warning; x == nil || x.Reason != power.ReasonTTL || x.Action != worker.ActionStop || !x.PauseAt.Equal(at.Truncate(time.Second)) || !strings.Contains(x.Use, "cml") {
			t.Errorf("the warning of its deadline is %+v", x)
		}
	})
}

// TestPauseTellsWhenItWasChecked checks that a pause, whether automatic or by a user,
// records when activity was last checked.
func TestPauseTellsWhenItWasChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"worker_activity_detection_interval": 300}})
		defer r.stop()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		w := r.await(id, power.WorkerStopped, 3*time.Hour)
		if at := w.LastActivityCheckAt; at == nil || w.LastPausedAt.Sub(*at) > time.Minute {
			t.Errorf("paused at %s for its idleness, last checked at %v", w.LastPausedAt, at)
		}
		errtest.Get(r.fleet.StartWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(28 * time.Minute)
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		w = r.await(id, power.WorkerStopped, 5*time.Minute)
		if at := w.LastActivityCheckAt; at == nil || w.LastPausedAt.Sub(*at) > 6*time.Minute {
			t.Errorf("paused at %s by a user, last checked at %v", w.LastPausedAt, at)
		}
	})
}
