package agent

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
)

func mustStatus(t *testing.T, a *Agent) agentctl.Status {
	t.Helper()
	s, err := a.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestIdleMachineIsWarnedAndStopped(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	bubble(t, w, func(t *testing.T, a *Agent) {
		start := time.Now()
		s := mustStatus(t, a)
		if s.Verdict.Eligible {
			t.Fatal("eligible at the start")
		}
		time.Sleep(24 * time.Minute)
		synctest.Wait()
		if len(w.warned()) != 0 || len(w.sent()) != 0 {
			t.Fatalf("too early: warnings %v, calls %v", w.warned(), w.sent())
		}
		time.Sleep(90 * time.Second)
		synctest.Wait()
		if len(w.warned()) != 1 {
			t.Fatalf("warnings: %v", w.warned())
		}
		if got := w.warned()[0].At.Sub(start).Round(time.Second); got != 30*time.Minute {
			t.Fatalf("announced for %s after the start", got)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
			t.Fatalf("%s\n%+v", d, mustStatus(t, a).Verdict.Blocks)
		}
		s = mustStatus(t, a)
		if s.Last == nil || s.Last.Phase != phaseAccepted || w.tag("idle-action") != "stopping" || w.tag("idle-status") != "idle" {
			t.Fatalf("last %+v, tag %s", s.Last, w.tag("idle-action"))
		}
		if len(w.warned()) != 1 {
			t.Fatalf("warned more than once: %v", w.warned())
		}
	})
}

func TestUseHolds(t *testing.T) {
	for _, signal := range []string{"cpu", "network", "disk", "gpu", "users", "recent"} {
		t.Run(signal, func(t *testing.T) {
			w := newWorld()
			w.tags["lull:idle-timeout"] = "10m"
			w.tags["lull:warn-before"] = "0s"
			w.busy[signal] = true
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(5 * time.Hour)
				synctest.Wait()
				s := mustStatus(t, a)
				if len(w.sent()) != 0 || !s.Verdict.Has(idle.RecentActivity) {
					t.Fatalf("calls %v, blocks %v", w.sent(), s.Verdict.Blocks)
				}
				w.with(func() { w.busy[signal] = false })
				ended := time.Now()
				time.Sleep(12 * time.Minute)
				synctest.Wait()
				if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
					t.Fatalf("%s after it ended: %s %v", time.Since(ended), d, mustStatus(t, a).Verdict.Blocks)
				}
			})
		})
	}
}

func TestUnknownHolds(t *testing.T) {
	for _, signal := range []string{"cpu", "network", "disk", "gpu", "users", "recent"} {
		for _, how := range []string{"broken", "hangs"} {
			if how == "hangs" && (signal == "cpu" || signal == "network" || signal == "disk") {
				continue
			}
			t.Run(signal+" "+how, func(t *testing.T) {
				w := newWorld()
				w.tags["lull:idle-timeout"] = "10m"
				w.broken[signal] = how == "broken"
				w.hang[signal] = how == "hangs"
				bubble(t, w, func(t *testing.T, a *Agent) {
					time.Sleep(5*time.Hour + 30*time.Second)
					synctest.Wait()
					s := mustStatus(t, a)
					if len(w.sent()) != 0 || !s.Verdict.Has(idle.SignalUnknown) {
						t.Fatalf("calls %v, blocks %v", w.sent(), s.Verdict.Blocks)
					}
					if s.Counters.Unknown == 0 || len(s.Alarms) != 1 || s.Alarms[0].Code != "unknown_"+signal {
						t.Fatalf("not told: %d unknown, alarms %v", s.Counters.Unknown, s.Alarms)
					}
				})
			})
		}
	}
}
