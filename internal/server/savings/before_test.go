package savings

import (
	"context"
	"math"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/server/history"
	"lull/internal/server/roster"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// lived is a fleet whose audit log contains the life of one worker. It also serves as
// roster and as source of templates.
type lived struct {
	t      *testing.T
	fleet  *fleet.Fleet
	w      worker.Worker
	commit func(audit.Entry)
}

func live(t *testing.T) *lived {
	t.Helper()
	db := mem.New(mem.Options{}).Client()
	t.Cleanup(db.Close)
	f, err := fleet.New(fleet.Options{Store: db, ID: "f1"})
	if err != nil {
		t.Fatal(err)
	}
	return &lived{t: t, fleet: f, w: worker.Worker{ID: "w", TemplateName: "disk", AWSRegion: "us-east-1", CreatedAt: moment(t, "2026-01-01T00:00:00Z")}, commit: func(e audit.Entry) {
		e.WorkerID = "w"
		ops, err := audit.Ops(e)
		if err == nil {
			_, err = db.Commit(t.Context(), store.Txn{Then: ops})
		}
		if err != nil {
			t.Fatal(err)
		}
	}}
}

// move changes the worker's status at an hour of its life.
func (l *lived) move(hour float64, to power.Worker) {
	l.commit(audit.Entry{At: l.at(hour), Action: "status_changed", By: audit.ByController, From: l.w.Status, To: to})
	l.w.Status = to
}

// pause records a decision to stop the worker at an hour. The stop follows within the
// hour.
func (l *lived) pause(hour float64, reason power.Reason) {
	e := audit.Entry{At: l.at(hour), Action: "pause_intended", Events: []string{audit.EventPaused}, Reason: string(reason), By: audit.Actor{Name: "x"}}
	if reason == power.ReasonScaleDown {
		e.Action, e.From, e.To = audit.DrainStarted, l.w.Status, power.WorkerDraining
		l.w.Status = power.WorkerDraining
	}
	l.commit(e)
	at := l.at(hour)
	l.w.PauseReason, l.w.LastPausedAt = reason, &at
	l.move(hour+0.25, power.WorkerStopping)
	l.move(hour+0.5, power.WorkerStopped)
}

func (l *lived) at(hour float64) time.Time {
	return l.w.CreatedAt.Add(time.Duration(hour * float64(time.Hour)))
}

func (l *lived) All(context.Context) ([]*roster.Line, int64, error) {
	return []*roster.Line{{Worker: l.w}}, 0, nil
}

func (l *lived) Template(context.Context, string) (launch.Template, error) {
	return launch.Template{Capacity: launch.Capacity{StorageGB: 100}}, nil
}

// past returns the worker's past between two times.
func (l *lived) past(from, to time.Time) map[string]*history.Past {
	l.t.Helper()
	all, err := (&history.Reader{Log: l.fleet, Roster: l, Templates: l}).Workers(l.t.Context(), worker.Filter{}, from, to)
	if err != nil || all["w"] == nil {
		l.t.Fatal(all, err)
	}
	return all
}

// between sums up the worker's states between two hours, and simulates a policy that
// never pauses, as if the worker had been checked all the time.
func (l *lived) between(from, to float64) (savings.Sum, *evidence.Trial) {
	l.t.Helper()
	a, b := l.at(from), l.at(to)
	all := l.past(a, b)
	_, total := savings.Prices{}.Group(uses(all, a, b, false), func(u savings.Use) (string, string) { return u.Worker, "" })
	run := &evidence.Trial{Policy: &idle.Policy{Name: "never"}, Never: true, Off: all["w"].Off, From: a, To: all["w"].Until(b)}
	run.Add(evidence.Stretch{Check: &evidence.Record{At: a}, From: a, To: b, Known: true})
	run.End()
	return total, run
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

// TestPeriodBeginsInAStop checks that a stop that began before the period is
// attributed to lull or to others, as decided then, whether it was in progress when
// the period began, ends within it or lasts longer.
func TestPeriodBeginsInAStop(t *testing.T) {
	for _, reason := range []power.Reason{power.ReasonIdleTimeout, power.ReasonSchedule, power.ReasonTTL, power.ReasonScaleDown, power.ReasonManual, power.ReasonExternal} {
		for _, ends := range []bool{false, true} {
			for _, from := range []float64{10.125, 10.375, 12} { // after the decision, during the stop, and stopped
				l := live(t)
				l.move(0, power.WorkerPending)
				l.move(1, power.WorkerRunning)
				l.pause(2, power.ReasonManual)
				l.move(3, power.WorkerStarting)
				l.move(4, power.WorkerRunning)
				for h := 5.0; h < 10; h += 0.125 {
					l.commit(audit.Entry{At: l.at(h), Action: "activity_updated"})
				}
				l.pause(10, reason)
				up := 24.0
				if ends {
					up = 20
					l.move(up, power.WorkerRunning)
				}
				got, run := l.between(from, 24)
				off := up - max(from, 10.25)
				avoided, other := off, 0.0
				if !reason.Automatic() {
					avoided, other = 0, off
				}
				if !near(got.AvoidedHours, avoided) || !near(got.OtherHours, other) || !near(got.RunningHours, 24-from-off) {
					t.Errorf("%s, from %g to %g: %+v, want %g h avoided and %g h of others", reason, from, up, got, avoided, other)
				}
				if !near(run.Other.Hours(), other) {
					t.Errorf("%s, from %g to %g: replayed %s of others, want %g h", reason, from, up, run.Other, other)
				}
			}
		}
	}
}

// TestEndedWorkersSaveNothing checks that a terminated worker has no running time, no
// avoided time and no storage costs, whatever its state before, and that a
// termination refused by EC2 does not end a worker.
func TestEndedWorkersSaveNothing(t *testing.T) {
	for _, gone := range []power.Worker{power.WorkerTerminating, power.WorkerTerminated} {
		l := live(t)
		l.move(0, power.WorkerRunning)
		l.pause(10, power.ReasonIdleTimeout)
		l.move(20, gone)
		if gone == power.WorkerTerminating {
			l.move(21, power.WorkerTerminated)
		}
		for _, c := range [][4]float64{{0, 100, 9.75, 10.25}, {12, 100, 8, 0}, {20.5, 100, 0, 0}, {30, 100, 0, 0}, {0, 15, 4.75, 10.25}} {
			got, run := l.between(c[0], c[1])
			if !near(got.AvoidedHours, c[2]) || !near(got.RunningHours, c[3]) || got.OtherHours != 0 || !near(got.UnknownStorageHours, c[2]) {
				t.Errorf("%s, from %g to %g: %+v, want %g h avoided and %g h running", gone, c[0], c[1], got, c[2], c[3])
			}
			if have := (run.Running + run.Other + run.Paused).Hours(); have > c[2]+c[3]+1e-6 {
				t.Errorf("%s, from %g to %g: %g hours are replayed of %g", gone, c[0], c[1], have, c[2]+c[3])
			}
		}
	}
	l := live(t)
	l.move(0, power.WorkerRunning)
	l.commit(audit.Entry{At: l.at(5), Action: "ttl_terminate", From: power.WorkerRunning, To: power.WorkerTerminating, Reason: string(power.ReasonTTL)})
	l.w.Status = power.WorkerTerminated
	if got, _ := l.between(0, 10); !near(got.RunningHours, 5) || got.AvoidedHours != 0 || got.OtherHours != 0 {
		t.Errorf("ended by its TTL while it ran: %+v", got)
	}
	l = live(t)
	l.move(0, power.WorkerRunning)
	l.pause(10, power.ReasonIdleTimeout)
	l.move(20, power.WorkerTerminating)
	l.move(21, power.WorkerFailed)
	if got, _ := l.between(0, 30); !near(got.AvoidedHours, 19.75) {
		t.Errorf("EC2 refused to end it: %+v", got)
	}
}
