package controller

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/rules"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
)

// TestEndOfAStoppedWorker checks that a stopped worker is terminated at its expiry,
// after a warning, if ttl_action is terminate, and that whatever protects a running
// worker from its expiry also protects a stopped one.
func TestEndOfAStoppedWorker(t *testing.T) {
	terminate, stop := "terminate", "stop"
	halt := func(r *rig, until *time.Time) {
		if _, err := r.fleet.SetHalt(r.t.Context(), operator, halt.Request{On: true, Until: until}); err != nil {
			r.t.Error(err)
		}
	}
	for name, c := range map[string]struct {
		action *string
		do     func(r *rig, id string, end time.Time) // between the warning and the expiry
		calls  bool
		status power.Worker // an hour after the expiry
	}{
		"terminate": {&terminate, nil, true, power.WorkerTerminated},
		"stop":      {&stop, nil, false, power.WorkerStopped},
		"moved": {&terminate, func(r *rig, id string, end time.Time) {
			later := end.Add(24 * time.Hour)
			r.profile(id, worker.Profile{TTLDeadline: &later})
		}, false, power.WorkerStopped},
		"taken away": {&terminate, func(r *rig, id string, _ time.Time) {
			r.profile(id, worker.Profile{TTLDeadline: &time.Time{}})
		}, false, power.WorkerStopped},
		"halted": {&terminate, func(r *rig, _ string, _ time.Time) { halt(r, nil) }, false, power.WorkerStopped},
		"halted for a while": {&terminate, func(r *rig, _ string, end time.Time) {
			until := end.Add(10 * time.Minute)
			halt(r, &until)
		}, true, power.WorkerTerminated},
		"protected": {&terminate, func(r *rig, _ string, _ time.Time) {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			failing("terminate", Protected, false)(r.world)
		}, true, power.WorkerFailed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				defer func() { r.stop() }()
				id := r.create().ID
				r.await(id, power.WorkerRunning, 5*time.Minute)
				end := time.Now().Add(6 * time.Hour).UTC().Round(0)
				r.profile(id, worker.Profile{TTLDeadline: &end, TTLAction: c.action})
				r.await(id, power.WorkerStopped, 4*time.Hour) // the worker is unused
				pauses := r.c.Stats().AutoPause
				time.Sleep(time.Until(end.Add(-time.Minute)))
				page, err := r.fleet.Audit(t.Context(), audit.Query{Action: "pause_warning"})
				if err != nil || len(page.Entries) == 0 {
					t.Fatal(page.Entries, err)
				}
				x := page.Entries[len(page.Entries)-1].Warning
				if warned := x.Reason == power.ReasonTTL; warned != (*c.action == terminate) {
					t.Fatalf("a minute before the end the last warning is %+v", x)
				} else if warned && (x.Action != terminate || !x.PauseAt.Equal(end) || !strings.Contains(x.Sentence("x", time.UTC), "terminated")) {
					t.Errorf("the warning is %+v", x)
				}
				if s := r.worker(id).Status; s != power.WorkerStopped {
					t.Fatalf("before its end it is %s", s)
				}
				if c.do != nil {
					c.do(r, id, end)
				}
				time.Sleep(time.Hour)
				r.world.mu.Lock()
				calls := r.world.calls["terminate"]
				r.world.mu.Unlock()
				if w := r.worker(id); w.Status != c.status || c.calls != (calls > 0) {
					t.Errorf("an hour later it is %s (%s), after %d calls", w.Status, w.StatusReason, calls)
				}
				if n := r.c.Stats().AutoPause; n != pauses {
					t.Errorf("its end counts as %d pauses", n-pauses)
				}
			})
		})
	}
}

// TestEndOfAFailedWorker checks that the instance of a worker whose start failed
// is stopped or terminated at its expiry, after a warning, and that a refused
// termination is not repeated.
func TestEndOfAFailedWorker(t *testing.T) {
	for name, c := range map[string]struct {
		action    string
		protected bool
		status    power.Worker // two hours after the expiry
		calls     string
	}{
		"stop":      {worker.ActionStop, false, power.WorkerStopped, "stop"},
		"terminate": {"terminate", false, power.WorkerTerminated, "terminate"},
		"protected": {"terminate", true, power.WorkerFailed, "terminate"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				defer func() { r.stop() }()
				r.world.mu.Lock()
				r.world.unaddressed = true
				if c.protected {
					failing("terminate", Protected, false)(r.world)
				}
				r.world.mu.Unlock()
				id := r.create().ID
				r.await(id, power.WorkerFailed, time.Hour)
				end := time.Now().Add(6 * time.Hour).UTC().Round(0)
				r.profile(id, worker.Profile{TTLDeadline: &end, TTLAction: &c.action})
				time.Sleep(time.Until(end.Add(-time.Minute)))
				if w := r.worker(id); w.Status != power.WorkerFailed || w.WarningFor != power.ReasonTTL {
					t.Errorf("a minute before its end it is %s, warned for %q", w.Status, w.WarningFor)
				}
				time.Sleep(2 * time.Hour)
				r.world.mu.Lock()
				calls := r.world.calls[c.calls]
				r.world.mu.Unlock()
				if w := r.worker(id); w.Status != c.status || calls == 0 || c.protected && calls > 1 {
					t.Errorf("two hours later it is %s (%s), after %d calls", w.Status, w.StatusReason, calls)
				}
			})
		})
	}
}

// TestWarningOfTTL checks that a worker in use is warned of its expiry as early
// as its policy says, and at least a minute before. If the deadline is nearer,
// it is warned now and expires when that time has passed.
func TestWarningOfTTL(t *testing.T) {
	for name, c := range map[string]struct {
		before *int          // the policy's warning time in minutes; the fleet's is 5
		left   time.Duration // to the deadline, when it is set
		sent   time.Duration // from setting the deadline to the warning and to the expiry
		ends   time.Duration
	}{
		"the fleet's lead":          {nil, time.Hour, 55 * time.Minute, time.Hour},
		"the policy's lead":         {new(20), time.Hour, 40 * time.Minute, time.Hour},
		"nearer than its lead":      {new(3), 30 * time.Second, 0, 3 * time.Minute},
		"a policy without warnings": {new(0), time.Hour, 59 * time.Minute, time.Hour},
		"without, and near":         {new(0), 10 * time.Second, 0, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				defer func() { r.stop() }()
				id := r.create().ID
				r.await(id, power.WorkerRunning, 5*time.Minute)
				if c.before != nil {
					errtest.Get(r.fleet.PutPolicy(t.Context(), operator, policy.Named{Name: "own", Values: policy.Values{WarnBeforeMinutes: c.before}}, true))(t)
					r.apply(policy.Scope{}, rules.Application{Policy: new("own")})
				}
				since := time.Now()
				end := since.Add(c.left)
				r.profile(id, worker.Profile{TTLDeadline: &end})
				for r.worker(id).Status == power.WorkerRunning && time.Since(since) < 2*time.Hour {
					r.use(id)
					time.Sleep(5 * time.Second)
				}
				const slack = 40 * time.Second // the poll interval
				stopped := r.worker(id).LastPausedAt
				if stopped == nil || stopped.Sub(since) < c.ends || stopped.Sub(since) > c.ends+slack {
					t.Fatalf("its end is at %v, %s after its deadline was set", stopped, time.Since(since))
				}
				page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "pause_warning"})
				if err != nil || len(page.Entries) != 1 {
					t.Fatalf("warned by %+v, %v", page.Entries, err)
				}
				e := page.Entries[0]
				if sent := e.At.Sub(since); sent < c.sent || sent > c.sent+slack {
					t.Errorf("warned after %s", sent)
				}
				if x := e.Warning; x.Reason != power.ReasonTTL || x.PauseAt.Sub(*stopped).Abs() > slack {
					t.Errorf("the warning is %+v, and it is stopped at %s", x, stopped)
				}
			})
		})
	}
}

// TestWarningOfTTLStands checks that repeated warnings of an idle pause neither
// replace the warning of the expiry nor delay the expiry.
func TestWarningOfTTLStands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"worker_idle_timeout_minutes": 6, "worker_auto_pause_snooze_minutes": 0}})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		end := time.Now().Add(time.Hour)
		r.profile(id, worker.Profile{TTLDeadline: &end})
		for time.Until(end) > -2*time.Minute {
			r.use(id)
			time.Sleep(200 * time.Second)
		}
		if w := r.worker(id); w.PauseReason != power.ReasonTTL || w.LastPausedAt.Sub(end) > time.Minute {
			t.Errorf("stopped at %v (%s), its end is at %s", w.LastPausedAt, w.PauseReason, end)
		}
	})
}

// TestStartAfterItsTTL checks that a worker whose deadline has passed cannot be
// started and that the refusal says what to do. A machine started outside lull is
// stopped again after a warning, once.
func TestStartAfterItsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(local(t, "2000-01-03 10:00")))
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		token, err := r.fleet.NewWakeToken(t.Context(), operator, id)
		errtest.None(t, err)
		end := time.Now().Add(10 * time.Minute)
		r.profile(id, worker.Profile{TTLDeadline: &end})
		r.await(id, power.WorkerStopped, 20*time.Minute)
		for name, start := range map[string]func() (worker.Worker, error){
			"a user":  func() (worker.Worker, error) { return r.fleet.StartWorker(t.Context(), operator, id) },
			"a retry": func() (worker.Worker, error) { return r.fleet.RetryWorker(t.Context(), operator, id) },
			"a wake":  func() (worker.Worker, error) { return r.fleet.WakeWorker(t.Context(), id, token) },
			"a schedule": func() (worker.Worker, error) {
				return r.fleet.ScheduleStart(t.Context(), id, r.worker(id).Revision(), "office")
			},
		} {
			_, err := start()
			refused, is := errors.AsType[*failure.Refused](err)
			if !is || refused.Reason != "ttl_over" || !strings.Contains(err.Error(), new(r.worker(id)).OverdueSince()) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if w := r.worker(id); w.DesiredStatus != power.WorkerStopped || w.StartAskedAt != nil {
			t.Errorf("after refusals it is to be %s, asked at %v", w.DesiredStatus, w.StartAskedAt)
		}
		if w, err := r.fleet.ScaleUp(t.Context(), operator, r.worker(id).TemplateName, region0, "more"); err != nil || w.ID == id {
			t.Errorf("a scale-up takes %s: %v", w.ID, err)
		}
		r.world.mu.Lock()
		if err := r.world.start(r.worker(id).EC2InstanceID); err != nil {
			t.Error(err)
		}
		r.world.mu.Unlock()
		since := time.Now()
		r.await(id, power.WorkerRunning, 15*time.Minute)
		up := time.Now()
		r.await(id, power.WorkerStopped, time.Hour)
		if ran := time.Since(up); ran < 5*time.Minute {
			t.Errorf("started outside, it is stopped after %s", ran)
		}
		page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "pause_warning", From: since})
		if err != nil || len(page.Entries) != 1 {
			t.Errorf("started outside, it is warned by %+v, %v", page.Entries, err)
		}
		later := time.Now().Add(time.Hour)
		r.profile(id, worker.Profile{TTLDeadline: &later})
		errtest.Get(r.fleet.StartWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerRunning, 10*time.Minute)
	})
}

// profile changes a worker's user settings.
func (r *rig) profile(id string, p worker.Profile) {
	r.t.Helper()
	if _, err := r.fleet.UpdateWorker(r.t.Context(), operator, id, 0, p); err != nil {
		r.t.Fatal(err)
	}
}
