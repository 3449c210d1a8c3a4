package controller

import (
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
)

// TestPlannedChecks checks that, without faults, a worker is never unknown just
// because lull did not read it. The next check is late if the pause is far away or a
// spent budget delays it, and it happens when it was announced.
func TestPlannedChecks(t *testing.T) {
	for name, c := range map[string]struct {
		settings map[string]any
		budget   bool
	}{
		"a pause that is hours away": {settings: map[string]any{"worker_idle_timeout_minutes": 240}},
		"a spent budget":             {settings: map[string]any{"worker_idle_timeout_minutes": 30}, budget: true},
		"a pause that comes near":    {settings: map[string]any{"worker_idle_timeout_minutes": 90}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{settings: c.settings})
				defer func() { r.stop() }()
				if c.budget {
					one := 1
					if _, err := r.fleet.PutBudget(t.Context(), operator, policy.Budget{Name: "one", For: policy.Stops, MaxActions: &one, PerMinutes: 24 * 60}); err != nil {
						t.Fatal(err)
					}
					r.await(r.create().ID, power.WorkerStopped, 2*time.Hour) // spends the budget
				}
				id := r.create().ID
				r.await(id, power.WorkerRunning, 10*time.Minute)
				m := r.machine(id)
				fetches := func() int { r.world.mu.Lock(); defer r.world.mu.Unlock(); return m.fetches }
				begun, said, read, longest := time.Now(), time.Time{}, 0, time.Duration(0)
				for r.worker(id).Status == power.WorkerRunning && time.Since(begun) < 5*time.Hour {
					time.Sleep(7 * time.Second)
					l, ok := r.c.Live(id)
					if !ok || l.Idle == nil {
						t.Fatal("it is unknown")
					}
					n := fetches()
					if n > 0 && l.Idle.Has(idle.SignalUnknown) && r.worker(id).Status == power.WorkerRunning {
						t.Fatalf("%s after the start: %+v", time.Since(begun), l.Idle.Blocks)
					}
					if n > read && !said.IsZero() && time.Until(said) > 15*time.Second && r.worker(id).Status == power.WorkerRunning {
						t.Fatalf("it was checked %s early", time.Until(said))
					}
					next := l.Idle.NextIdleCheckAt
					if read > 0 && (next.IsZero() || time.Since(next) > 15*time.Second) && r.worker(id).Status == power.WorkerRunning {
						t.Fatalf("the next check is said to be at %s, now is %s", next, time.Now())
					}
					if n == read && !said.IsZero() && !next.Equal(said) && time.Until(said) > 15*time.Second {
						t.Fatalf("the next check moved from %s to %s without a check", said, next)
					}
					said, read = next, n
					longest = max(longest, time.Until(next))
				}
				if longest < 20*time.Minute {
					t.Errorf("the longest wait for a check was %s: the plan was never far", longest)
				}
				if page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "signal_unknown"}); err != nil || len(page.Entries) != 0 {
					t.Errorf("%d alarms, %v", len(page.Entries), err)
				}
				stopped := r.worker(id).Status != power.WorkerRunning
				if stopped == c.budget {
					t.Errorf("stopped: %t", stopped)
				}
				if l, _ := r.c.Live(id); stopped && !l.Idle.NextIdleCheckAt.IsZero() {
					t.Errorf("a stopped worker is to be checked at %s", l.Idle.NextIdleCheckAt)
				}
				// An answer made from the record alone gives no time of the next
				// check.
				if st, err := r.fleet.GetWorkerIdleStatus(t.Context(), id); err != nil || !st.NextIdleCheckAt.IsZero() {
					t.Errorf("by the record alone the next check is at %s, %v", st.NextIdleCheckAt, err)
				}
			})
		})
	}
}
