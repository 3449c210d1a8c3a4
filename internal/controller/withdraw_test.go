package controller

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/rules"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/store/mem"
)

// TestStartsAndStopsInEveryOrder gives three commands, or crashes of the server, in
// every order and at several distances. It checks that the last command takes effect,
// and that each requested start ends exactly once: as a resume, as withdrawn, or as
// not needed.
func TestStartsAndStopsInEveryOrder(t *testing.T) {
	acts := []string{"start", "stop", "drain", "cancel-drain", "crash"}
	for _, gap := range []time.Duration{0, 2 * time.Second, 13 * time.Second, 45 * time.Second} {
		for _, up := range []bool{true, false} {
			t.Run(fmt.Sprintf("gap=%s,up=%t", gap, up), func(t *testing.T) {
				for _, a := range acts {
					for _, b := range acts {
						for _, c := range acts {
							order := []string{a, b, c}
							synctest.Test(t, func(t *testing.T) { inOrder(t, up, gap, order) })
							if t.Failed() {
								t.Fatalf("in the order %v", order)
							}
						}
					}
				}
			})
		}
	}
}

func inOrder(t *testing.T, up bool, gap time.Duration, order []string) {
	r := newRig(t, options{})
	defer func() { r.stop() }()
	id := r.create().ID
	r.await(id, power.WorkerRunning, 5*time.Minute)
	ec2, wanted := r.worker(id).EC2InstanceID, power.WorkerRunning
	if !up {
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerStopped, 5*time.Minute)
		wanted = power.WorkerStopped
	}
	for i, act := range order {
		var err error
		to := power.WorkerStopped
		switch act {
		case "start":
			_, err = r.fleet.StartWorker(t.Context(), operator, id)
			to = power.WorkerRunning
		case "stop":
			_, err = r.fleet.StopWorker(t.Context(), operator, id)
		case "drain":
			_, err = r.fleet.DrainWorker(t.Context(), operator, id)
		case "cancel-drain":
			_, err = r.fleet.CancelDrain(t.Context(), operator, id)
			to = power.WorkerRunning
		case "crash":
			r.stop()
			r.run(r.db.Client(), options{server: fmt.Sprintf("server-%d", i+2)})
			to = wanted
		}
		if err == nil {
			wanted = to
		}
		time.Sleep(gap)
	}
	time.Sleep(12 * time.Minute)
	w := r.worker(id)
	r.world.mu.Lock()
	m := r.world.insts[ec2]
	r.world.advance(m)
	state := m.State
	r.world.mu.Unlock()
	if w.Status != wanted || w.DesiredStatus != wanted || state != strings.ToLower(string(wanted)) {
		t.Errorf("it is %s, wanted %s, the instance %s; the last word was %s", w.Status, w.DesiredStatus, state, wanted)
	}
	if w.Intent != nil || w.StartOrigin != worker.OriginNone || w.StartBy != "" || w.StartAskedAt != nil || w.StartReason != "" || w.StatusReason != "" || w.Draining {
		t.Errorf("left behind: intent %v, origin %q by %q at %v, reason %q", w.Intent, w.StartOrigin, w.StartBy, w.StartAskedAt, w.StatusReason)
	}
	page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	n := map[string]int64{}
	for _, e := range page.Entries {
		n[e.Action]++
		if (e.Action == "pause_cancelled" || e.Action == audit.DrainCancelled) && e.By.Kind == audit.KindController {
			n["not needed"]++
		}
	}
	if asked, ended := n["resume_intended"], n["resumed"]+n[audit.StartWithdrawn]+n["not needed"]; asked != ended {
		t.Errorf("%d starts were asked for, %d ended: %v", asked, ended, n)
	}
	if w.ManualResumeCount != n["resumed"] || w.AutoResumeCount+w.ExternalResumeCount+w.ExternalPauseCount+w.AutoPauseCount != 0 || (w.LastResumedAt != nil) != (n["resumed"]+n["started"] > 0) {
		t.Errorf("counted: resumes %d/%d/%d, pauses %d/%d/%d, last resumed %v; %v", w.AutoResumeCount, w.ManualResumeCount, w.ExternalResumeCount,
			w.AutoPauseCount, w.ManualPauseCount, w.ExternalPauseCount, w.LastResumedAt, n)
	}
	if n["late_action"]+n["external_start"]+n["external_pause"] != 0 {
		t.Errorf("taken for another user's: %v", n)
	}
	if t.Failed() {
		for _, e := range page.Entries {
			t.Log(e.At.Format("15:04:05"), e.By.Name, e.Action, e.From, e.To, e.Reason, e.Detail)
		}
	}
}

// TestWishDuringAWrite checks that a different intent that arrives while a job writes
// cancels the job after the write, because its next step was decided before. The
// job's own write, or one with the same intent, does not.
func TestWishDuringAWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		wrote := r.worker(id)
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		since := r.worker(id)
		r.stop()
		for _, tc := range []struct {
			what    string
			learned worker.Worker
			off     bool
		}{{"another wish", since, true}, {"its own write", wrote, false}} {
			ctx, cancel := context.WithCancel(t.Context())
			e := &entry{id: id, heap: -1, w: wrote, cancel: cancel}
			j := &job{c: r.c, e: e}
			r.c.entries[id] = e
			end := j.writes()
			e.w = tc.learned
			if ctx.Err() != nil {
				t.Errorf("%s: called off during the write", tc.what)
			}
			j.took(wrote)
			end()
			if off := ctx.Err() != nil; off != tc.off {
				t.Errorf("%s: called off %v, want %v", tc.what, off, tc.off)
			}
			cancel()
		}
	})
}

// TestLateStart checks that a start that was sent, withdrawn, and takes effect after
// the worker was seen stopped is followed by a stop. A later start in the AWS console
// is not.
func TestLateStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		ec2 := r.worker(id).EC2InstanceID
		ask := func(_ worker.Worker, err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		ask(r.fleet.StopWorker(t.Context(), operator, id))
		r.await(id, power.WorkerStopped, 5*time.Minute)
		r.world.mu.Lock()
		r.world.fault = func(c string) (time.Duration, error, bool) {
			if c == "start" {
				return 30 * time.Second, callErr(Unreachable), false // the outcome is unknown
			}
			return 0, nil, false
		}
		r.world.mu.Unlock()
		ask(r.fleet.StartWorker(t.Context(), operator, id))
		for r.await(id, power.WorkerStarting, time.Minute).StartSentAt == nil {
			time.Sleep(time.Second)
		}
		ask(r.fleet.StopWorker(t.Context(), operator, id))
		r.await(id, power.WorkerStopped, 5*time.Minute)
		lands := func() {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			r.world.fault = nil
			errtest.None(t, r.world.start(ec2))
		}
		lands()
		time.Sleep(5 * time.Minute)
		w := r.await(id, power.WorkerStopped, time.Minute)
		if s := r.c.Stats(); s.LateActions != 1 || w.ManualPauseCount != 2 || w.ManualResumeCount+w.ExternalResumeCount+w.AutoResumeCount != 0 {
			t.Errorf("late actions %d, record %+v", s.LateActions, w)
		}
		lands()
		time.Sleep(5 * time.Minute)
		if w = r.worker(id); w.Status != power.WorkerRunning || w.ExternalResumeCount != 1 || w.LastResumedBy != "external" {
			t.Errorf("a start from the console: %s, counted %d, by %s", w.Status, w.ExternalResumeCount, w.LastResumedBy)
		}
	})
}

// TestAutomaticStartIsKept checks that a halt, dry run or a freeze holds an automatic
// start at every stage, and that nothing holds a user's start.
func TestAutomaticStartIsKept(t *testing.T) {
	for name, keep := range map[string]struct {
		on, off func(r *rig, id string)
		why     string
	}{
		"halted": {func(r *rig, _ string) { _, _ = r.fleet.SetHalt(r.t.Context(), operator, halt.Request{On: true}) },
			func(r *rig, _ string) { _, _ = r.fleet.SetHalt(r.t.Context(), operator, halt.Request{}) }, "halted"},
		"in dry-run mode": {func(r *rig, id string) { _, _ = r.fleet.ArmWorker(r.t.Context(), operator, id, false) },
			func(r *rig, id string) { _, _ = r.fleet.ArmWorker(r.t.Context(), operator, id, true) }, "dry-run mode"},
		"frozen": {func(r *rig, id string) {
			r.override(policy.Override{Kind: policy.Freeze, Selector: policy.Scope{Workers: []string{id}}, Until: time.Now().Add(10 * time.Minute)})
		}, func(r *rig, _ string) { time.Sleep(10 * time.Minute) }, "frozen"},
	} {
		for _, begun := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,begun=%t", name, begun), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t, options{})
					defer func() { r.stop() }()
					id := r.create().ID
					r.await(id, power.WorkerRunning, 5*time.Minute)
					ec2 := r.worker(id).EC2InstanceID
					r.world.mu.Lock()
					if begun {
						r.world.fault = failNow("start", Capacity)
					}
					err := r.world.stop(ec2, CauseServer) // lull restarts a worker that the cloud stopped
					r.world.mu.Unlock()
					if err != nil {
						t.Fatal(err)
					}
					if begun {
						r.await(id, power.WorkerStarting, 5*time.Minute)
						time.Sleep(10 * time.Second)
						if name == "frozen" {
							return // a start in progress is completed
						}
					}
					keep.on(r, id)
					time.Sleep(6 * time.Second)
					calls := func() int {
						r.world.mu.Lock()
						defer r.world.mu.Unlock()
						return r.world.calls["start"]
					}
					before := calls()
					time.Sleep(8 * time.Minute)
					w := r.worker(id)
					if n := calls() - before; n > 0 || w.Status != power.WorkerStopped || w.DesiredStatus != power.WorkerRunning || !strings.Contains(w.StatusReason, keep.why) {
						t.Errorf("%d starts were sent, it is %s/%s (%s)", n, w.Status, w.DesiredStatus, w.StatusReason)
					}
					r.world.mu.Lock()
					r.world.fault = nil
					r.world.mu.Unlock()
					if begun {
						errtest.Get(r.fleet.StartWorker(t.Context(), operator, id))(t)
					} else {
						keep.off(r, id)
					}
					w = r.await(id, power.WorkerRunning, 5*time.Minute)
					if w.AutoResumeCount+w.ManualResumeCount != 1 || (w.ManualResumeCount == 1) != begun {
						t.Errorf("counted %d and %d", w.AutoResumeCount, w.ManualResumeCount)
					}
				})
			})
		}
	}
}

// TestScheduledStartWithdrawn checks that a start requested by a schedule is
// withdrawn if it is still pending when the schedule closes, and that one withdrawn
// by a user is not requested again before the next opening.
func TestScheduledStartWithdrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(local(t, "2000-03-06 18:30")))
		r := newRig(t, options{})
		defer r.stop()
		r.office()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		r.apply(policy.Scope{Workers: []string{id}}, rules.Application{Schedule: new("office")})
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerStopped, 5*time.Minute)
		errtest.Get(r.fleet.PutBudget(t.Context(), operator, policy.Budget{Name: "starts", For: policy.Starts, MaxActions: new(0), PerMinutes: 1}))(t)
		r.until(local(t, "2000-03-07 08:10"))
		if w := r.worker(id); w.DesiredStatus != power.WorkerRunning || w.Status != power.WorkerStopped || !strings.HasPrefix(w.StatusReason, turnSaying) {
			t.Fatalf("it does not wait: %s/%s (%s)", w.Status, w.DesiredStatus, w.StatusReason)
		}
		r.until(local(t, "2000-03-07 18:05"))
		if w := r.worker(id); w.DesiredStatus != power.WorkerStopped || w.StartWithdrawnBy != "schedule office" || w.StatusReason != "" {
			t.Errorf("after the schedule has closed: %s, withdrawn by %q (%s)", w.DesiredStatus, w.StartWithdrawnBy, w.StatusReason)
		}
		r.until(local(t, "2000-03-08 08:10"))
		if w := r.worker(id); w.DesiredStatus != power.WorkerRunning {
			t.Fatalf("it does not wait again: %s", w.DesiredStatus)
		}
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		r.until(local(t, "2000-03-08 12:00"))
		if w := r.worker(id); w.DesiredStatus != power.WorkerStopped || w.StartWithdrawnBy != operator.Name || w.AutoResumeCount != 0 {
			t.Errorf("a user's word against the schedule: %s, withdrawn by %q", w.DesiredStatus, w.StartWithdrawnBy)
		}
	})
}

// TestAnswerSurvivesItsOwnPause checks that a requested check is answered even if the
// pause that it decided on returns through the watch before the check is done.
func TestAnswerSurvivesItsOwnPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"worker_warn_before_minutes": 0}})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		errtest.Get(r.fleet.SetHalt(t.Context(), operator, halt.Request{On: true}))(t)
		time.Sleep(2 * time.Hour)
		// Lose the answer of the write, so that the watch delivers the change first.
		r.c.fleet.Store().(*mem.Client).Inject(func(c mem.Call) mem.Fault {
			switch {
			case c.Kind == mem.Commit && len(c.Txn.Then) > 0:
				return mem.Fault{LoseAnswer: true}
			case c.Kind == mem.Commit:
				return mem.Fault{Latency: 100 * time.Millisecond}
			}
			return mem.Fault{}
		})
		errtest.Get(r.fleet.SetHalt(t.Context(), operator, halt.Request{}))(t)
		q, err := r.fleet.AskOwner(t.Context(), operator, fleet.RequestDetect, id, true)
		errtest.None(t, err)
		time.Sleep(time.Minute)
		if q, err = r.fleet.Request(t.Context(), q.ID); err != nil || q.AnsweredAt == nil {
			t.Errorf("not answered: %+v: %v", q, err)
		}
	})
}

// TestAnswerOfTheCheckBefore checks that a check requested while another decides on a
// pause is answered with that pause, not with the fact that the worker is stopping.
func TestAnswerOfTheCheckBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"worker_warn_before_minutes": 0}})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		asked := make(chan fleet.Request, 1)
		r.c.fleet.Store().(*mem.Client).Inject(func(c mem.Call) mem.Fault {
			for _, op := range c.Txn.Then {
				if c.Kind == mem.Commit && strings.HasPrefix(op.Key, "workers/") && strings.Contains(string(op.Data), `"reason":"idle_timeout"`) && len(asked) == 0 {
					q, err := r.fleet.AskOwner(context.Background(), operator, fleet.RequestDetect, id, true)
					if err != nil {
						t.Error(err)
					}
					asked <- q
				}
			}
			return mem.Fault{}
		})
		q := <-asked
		time.Sleep(10 * time.Second)
		q, err := r.fleet.Request(t.Context(), q.ID)
		if err != nil || q.Error != "" || q.Detect == nil || !q.Detect.AutoPauseTriggered || !q.Detect.IdleCheckPerformed || q.Detect.Action != worker.ActPause {
			t.Errorf("answered %+v: %v", q, err)
		}
	})
}
