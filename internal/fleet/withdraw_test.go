package fleet_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
)

var bob = audit.Actor{Name: "bob", Kind: audit.KindUser}

// pending is one state in which a start is pending.
type pending struct {
	name string
	make func(t *testing.T, fl *fleet.Fleet, id string)
}

// change changes a worker as the controller would.
func change(t *testing.T, fl *fleet.Fleet, id string, fn func(w *worker.Worker)) {
	t.Helper()
	errtest.Get(fl.Change(t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, _ *worker.Tx) error { fn(w); return nil }))(t)
}

func pendingStarts() []pending {
	must := func(t *testing.T, _ worker.Worker, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	resume := func(t *testing.T, fl *fleet.Fleet, id string, by audit.Actor) {
		w, err := fl.ResumeWorker(t.Context(), by, id)
		must(t, w, err)
	}
	queued := func(by audit.Actor) func(*testing.T, *fleet.Fleet, string) {
		return func(t *testing.T, fl *fleet.Fleet, id string) {
			put(t, fl, id, power.WorkerStopped)
			resume(t, fl, id, by)
		}
	}
	behind := func(p *worker.Pause) func(*testing.T, *fleet.Fleet, string) {
		return func(t *testing.T, fl *fleet.Fleet, id string) {
			put(t, fl, id, power.WorkerRunning)
			if p != nil {
				w, err := fl.PauseWorker(t.Context(), ada, id, *p)
				must(t, w, err)
			}
			change(t, fl, id, func(w *worker.Worker) { w.Status, w.DesiredStatus = power.WorkerStopping, power.WorkerStopped })
			resume(t, fl, id, ada)
		}
	}
	starting := func(ec2 string, sent bool) func(*testing.T, *fleet.Fleet, string) {
		return func(t *testing.T, fl *fleet.Fleet, id string) {
			queued(ada)(t, fl, id)
			change(t, fl, id, func(w *worker.Worker) {
				w.Status, w.EC2State = power.WorkerStarting, ec2
				if now := time.Now().UTC(); sent {
					w.StartSentAt = &now
				}
			})
		}
	}
	return []pending{
		{"queued", queued(cal)},
		{"queued for a user", queued(ada)},
		{"behind a user's stop", behind(&worker.Pause{})},
		{"behind an idle stop", behind(&worker.Pause{Reason: power.ReasonIdleTimeout})},
		{"behind a stop from outside", behind(nil)},
		{"starting", starting("stopped", false)},
		{"starting, sent", starting("stopped", true)},
		{"starting, seen", starting("pending", true)},
	}
}

// TestStartWithdrawn checks the effect of each command on a pending start. The record
// must name who withdrew the start. The start must not count as a resume or affect
// how a later start is counted.
func TestStartWithdrawn(t *testing.T) {
	commands := map[string]func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error){
		"stop": func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.StopWorker(ctx, bob, id)
		},
		"drain": func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.DrainWorker(ctx, bob, id)
		},
		"cancel-drain": func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.CancelDrain(ctx, bob, id)
		},
		"terminate": func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.TerminateWorker(ctx, bob, id)
		},
		"start": func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.StartWorker(ctx, bob, id)
		},
		"auto": func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.PauseWorker(ctx, audit.ByController, id, worker.Pause{Reason: power.ReasonIdleTimeout})
		},
	}
	// end is the expected result of a command: status/desired, whether the start is
	// withdrawn, and how many more pauses are counted.
	type end struct {
		to        string
		withdrawn bool
		pauses    int64
	}
	stays := func(s string) end { return end{to: s + "/RUNNING"} }
	want := map[string]map[string]end{
		"queued":                     {"stop": {"STOPPED/STOPPED", true, 0}, "drain": {"STOPPED/STOPPED", true, 0}, "terminate": {"TERMINATING/TERMINATED", true, 0}, "start": stays("STOPPED")},
		"queued for a user":          {"stop": {"STOPPED/STOPPED", true, 0}, "drain": {"STOPPED/STOPPED", true, 0}, "terminate": {"TERMINATING/TERMINATED", true, 0}, "start": stays("STOPPED")},
		"behind a user's stop":       {"stop": {"STOPPING/STOPPED", true, 0}, "drain": {"STOPPING/STOPPED", true, 0}, "terminate": {"TERMINATING/TERMINATED", true, 0}, "start": stays("STOPPING")},
		"behind an idle stop":        {"stop": {"STOPPING/STOPPED", true, 1}, "drain": {"STOPPING/STOPPED", true, 1}, "terminate": {"TERMINATING/TERMINATED", true, 0}, "start": stays("STOPPING")},
		"behind a stop from outside": {"stop": {"STOPPING/STOPPED", true, 1}, "drain": {"STOPPING/STOPPED", true, 1}, "terminate": {"TERMINATING/TERMINATED", true, 0}, "start": stays("STOPPING")},
		"starting":                   {"stop": {"STARTING/STOPPED", true, 1}, "terminate": {"TERMINATING/TERMINATED", true, 0}, "start": stays("STARTING")},
	}
	want["starting, sent"], want["starting, seen"] = want["starting"], want["starting"]
	for _, p := range pendingStarts() {
		for name, run := range commands {
			t.Run(p.name+"/"+name, func(t *testing.T) {
				bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
					id := create(t, fl).ID
					p.make(t, fl, id)
					passMinute()
					before, err := fl.Worker(t.Context(), id)
					errtest.None(t, err)
					w, err := run(t.Context(), fl, id)
					end, ok := want[p.name][name]
					if !ok {
						if _, refused := errors.AsType[*failure.Refused](err); !refused {
							t.Fatalf("got %v, want it refused", err)
						}
						return
					}
					if got := string(w.Status) + "/" + string(w.DesiredStatus); err != nil || got != end.to {
						t.Fatalf("got %s and %v, want %s", got, err, end.to)
					}
					if n := w.AutoPauseCount + w.ManualPauseCount - before.AutoPauseCount - before.ManualPauseCount; n != end.pauses {
						t.Errorf("%d pauses were counted, want %d", n, end.pauses)
					}
					page, err := fl.Audit(t.Context(), audit.Query{WorkerID: id, Action: audit.StartWithdrawn})
					if err != nil {
						t.Fatal(err)
					}
					if !end.withdrawn {
						if w.StartWithdrawnAt != nil || len(page.Entries) > 0 || w.StartOrigin == worker.OriginNone {
							t.Errorf("withdrawn at %v, %d entries, origin %q", w.StartWithdrawnAt, len(page.Entries), w.StartOrigin)
						}
						return
					}
					const by = "bob"
					if w.StartWithdrawnAt == nil || !w.StartWithdrawnAt.Equal(time.Now()) || w.StartWithdrawnBy != by {
						t.Errorf("withdrawn at %v by %q", w.StartWithdrawnAt, w.StartWithdrawnBy)
					}
					if len(page.Entries) != 1 || page.Entries[0].By.Name != by || page.Entries[0].Events[len(page.Entries[0].Events)-1] != audit.EventStartWithdrawn {
						t.Errorf("the audit log has %+v", page.Entries)
					}
					if w.StartOrigin != worker.OriginNone || w.StartBy != "" || w.StartReason != "" || w.StartAskedAt != nil || !w.LastResumedAt.Equal(*before.LastResumedAt) {
						t.Errorf("left behind: %+v", w)
					}
					if kept := w.StartSentAt != nil; kept != (p.name == "starting, sent") {
						t.Errorf("the mark of a start that was sent is kept: %t", kept)
					}
					if w.Status != power.WorkerTerminating {
						if w, err = fl.StartWorker(t.Context(), ada, id); err != nil || w.DesiredStatus != power.WorkerRunning || w.StartWithdrawnAt != nil {
							t.Errorf("started again: desired %s, withdrawn %v, %v", w.DesiredStatus, w.StartWithdrawnAt, err)
						}
					}
				})
			})
		}
	}
}

// TestStartThatIsNotNeeded checks that canceling a stop before it is sent also ends
// the start that waited for it: no resume is counted, then or later.
func TestStartThatIsNotNeeded(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		id := create(t, fl).ID
		put(t, fl, id, power.WorkerRunning)
		errtest.Get(fl.StopWorker(t.Context(), ada, id))(t)
		change(t, fl, id, func(w *worker.Worker) { w.Status = power.WorkerStopping })
		errtest.Get(fl.ResumeWorker(t.Context(), ada, id))(t)
		w, err := fl.Change(t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, tx *worker.Tx) error {
			return w.CallOff(tx, nil, "resumed by ada")
		})
		if err != nil || w.Status != power.WorkerRunning || w.StartOrigin != worker.OriginNone || w.StartAskedAt != nil || w.StartWithdrawnAt != nil {
			t.Errorf("it is %+v: %v", w, err)
		}
	})
}

// TestStartTakenOver checks that a requester with higher priority takes over a
// pending start.
func TestStartTakenOver(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		id := create(t, fl).ID
		put(t, fl, id, power.WorkerStopped)
		ask := func(by audit.Actor, origin worker.Origin, reason, who string) {
			t.Helper()
			w, err := fl.ResumeWorker(t.Context(), by, id)
			if err != nil || w.StartOrigin != origin || w.StartReason != reason || w.StartBy != who {
				t.Errorf("after %s: %s/%s by %s, %v", by.Name, w.StartOrigin, w.StartReason, w.StartBy, err)
			}
		}
		ask(cal, worker.OriginAuto, policy.ForSchedule, "calendar")
		passMinute()
		ask(audit.Actor{Name: "token", Kind: audit.KindWake}, worker.OriginAuto, policy.ForWake, "token")
		ask(cal, worker.OriginAuto, policy.ForWake, "token")
		ask(ada, worker.OriginManual, policy.ByUser, "ada")
		ask(bob, worker.OriginManual, policy.ByUser, "ada")
		ask(cal, worker.OriginManual, policy.ByUser, "ada")
	})
}

// TestTerminationForTTL checks that a user's request takes over a termination
// requested by a deadline, so that a halt no longer delays it.
func TestTerminationForTTL(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		id := create(t, fl).ID
		put(t, fl, id, power.WorkerRunning)
		change(t, fl, id, func(w *worker.Worker) {
			at := time.Now()
			w.TTLDeadline, w.TTLAction = &at, "terminate"
		})
		w, err := fl.ExpireTTL(t.Context(), id, 0, "nothing")
		if err != nil || w.Status != power.WorkerTerminating || w.TerminateFor != power.ReasonTTL {
			t.Fatalf("it is %s for %q: %v", w.Status, w.TerminateFor, err)
		}
		if w, err = fl.TerminateWorker(t.Context(), bob, id); err != nil || w.TerminateFor != "" {
			t.Errorf("after a user asked it is for %q: %v", w.TerminateFor, err)
		}
	})
}
