package agent

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/agentctl"
)

func TestTTLEndsAMachineInUse(t *testing.T) {
	for _, action := range []string{"stop", "terminate"} {
		t.Run(action, func(t *testing.T) {
			w := newWorld()
			w.busy["cpu"] = true
			w.tags["lull:ttl-deadline"] = "2000-01-01T02:00:00Z"
			w.tags["lull:ttl-action"] = action
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(115*time.Minute - time.Second)
				if n := len(w.warned()); n != 0 {
					t.Fatalf("warned %d times, too early", n)
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				if n := w.warned(); len(n) != 1 || n[0].Reason != reasonTTL {
					t.Fatalf("warnings %v", n)
				}
				time.Sleep(5*time.Minute - 2*time.Second)
				if len(w.sent()) > 0 {
					t.Fatal("before the deadline")
				}
				time.Sleep(5 * time.Second)
				synctest.Wait()
				s := mustStatus(t, a)
				if d := cmp.Diff([]string{action}, w.sent()); d != "" {
					t.Fatal(d, s.Verdict.Blocks)
				}
				if !slices.ContainsFunc(s.Last.InUse, func(use string) bool { return strings.HasPrefix(use, "cpu ") }) {
					t.Errorf("in use: %v", s.Last.InUse)
				}
			})
		})
	}
}

func TestTTLMovedAndHalted(t *testing.T) {
	w := newWorld()
	w.tags["lull:ttl-deadline"] = "2000-01-01T02:00:00Z"
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(118 * time.Minute)
		w.with(func() { w.tags["lull:ttl-deadline"] = "2000-01-01T04:00:00Z" })
		time.Sleep(30 * time.Minute)
		if len(w.sent()) > 0 {
			t.Fatal("the deadline was moved")
		}
		errtest.Get(a.Halt(t.Context(), agentctl.HaltRequest{On: true, Reason: "test"}))(t)
		time.Sleep(3 * time.Hour)
		if len(w.sent()) > 0 {
			t.Fatal("it was halted")
		}
		errtest.Get(a.Halt(t.Context(), agentctl.HaltRequest{}))(t)
		time.Sleep(7 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
			t.Fatal(d)
		}
	})
}

// TestHaltEnds checks that a halt with an end is lifted by itself, that this is
// recorded, and that no warning is sent before.
func TestHaltEnds(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "1h"
	bubble(t, w, func(t *testing.T, a *Agent) {
		end := time.Now().Add(3 * time.Hour)
		errtest.Get(a.Halt(t.Context(), agentctl.HaltRequest{On: true, Until: &end, Reason: "demo"}))(t)
		past := time.Now().Add(-time.Second)
		if _, err := a.Halt(t.Context(), agentctl.HaltRequest{On: true, Until: &past}); err == nil {
			t.Error("a halt until a time that is over")
		}
		time.Sleep(3*time.Hour - time.Second)
		s, err := a.Status(t.Context())
		if err != nil || s.Halted == nil || s.WarnedAt != nil || len(w.sent()) > 0 {
			t.Fatalf("halted: %+v, sent %v, %v", s.Halted, w.sent(), err)
		}
		if at := s.Verdict.TargetPauseAt; at == nil || !at.Equal(end.Add(5*time.Minute).Round(0)) {
			t.Errorf("it is stopped at %v, and its users are warned from %v on", at, end)
		}
		time.Sleep(2 * time.Second)
		if s, err = a.Status(t.Context()); err != nil || s.Halted != nil {
			t.Errorf("after its end: %+v, %v", s.Halted, err)
		}
		time.Sleep(7 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
			t.Error(d)
		}
	})
}

func TestCompletion(t *testing.T) {
	for _, action := range []string{"stop", "hibernate", "terminate", "none"} {
		for _, how := range []string{"command", "file"} {
			t.Run(action+" by "+how, func(t *testing.T) {
				w := newWorld()
				w.busy["cpu"] = true
				w.tags["lull:on-complete"] = action
				bubble(t, w, func(t *testing.T, a *Agent) {
					time.Sleep(time.Hour)
					if how == "file" {
						w.with(func() { w.complete = time.Now() })
					} else if _, err := a.Complete(t.Context(), agentctl.CompleteRequest{Status: "failed"}); err != nil {
						t.Fatal(err)
					}
					time.Sleep(4 * time.Minute)
					if len(w.sent()) > 0 {
						t.Fatal("without a warning of five minutes")
					}
					time.Sleep(4 * time.Minute)
					synctest.Wait()
					want := []string{action}
					if action == "none" {
						want = []string{}
					}
					if d := cmp.Diff(want, w.sent()); d != "" {
						t.Fatal(d)
					}
					if s := mustStatus(t, a); s.Completion == "" {
						t.Error("the completion is not shown")
					}
				})
			})
		}
	}
}

func TestBootGraceAndSnooze(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "10m"
	w.tags["lull:warn-before"] = "0s"
	w.tags["lull:boot-grace"] = "90m" // the machine booted an hour ago, so 30 more minutes
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(29 * time.Minute)
		if len(w.sent()) > 0 || !mustStatus(t, a).Verdict.Has(codeBootGrace) {
			t.Fatal("boot grace does not hold")
		}
		errtest.Get(a.Snooze(agentctl.WithCaller(t.Context(), "ada"), agentctl.SnoozeRequest{For: idle.Duration(2 * time.Hour)}))(t)
		time.Sleep(2*time.Hour - time.Second)
		if len(w.sent()) > 0 {
			t.Fatal("snooze does not hold")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
			t.Fatal(d)
		}
		if _, err := a.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(time.Hour)}); err == nil {
			t.Error("a snooze after the call was taken")
		}
	})
}

func TestResumeFromHibernation(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	w.tags["lull:hibernate-on-idle"] = "true"
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(31 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"hibernate"}, w.sent()); d != "" {
			t.Fatal(d)
		}
		w.with(func() { w.slept += 9 * time.Hour })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		s := mustStatus(t, a)
		if s.Last.Phase != phaseDone || s.Counters.Resumes != 1 || s.ResumedAt == nil || !s.Verdict.InSnoozePeriod {
			t.Fatalf("last %+v, counters %+v, verdict %+v", s.Last, s.Counters, s.Verdict)
		}
		if s.Verdict.IdleMinutes > 3 {
			t.Errorf("the idle clock was not restarted: %g minutes", s.Verdict.IdleMinutes)
		}
		if w.tag("idle-action") != "hibernated" || w.tag("idle-status") != "active" {
			t.Errorf("tags %s, %s", w.tag("idle-action"), w.tag("idle-status"))
		}
		time.Sleep(25 * time.Minute)
		if len(w.sent()) != 1 {
			t.Error("stopped again before the timeout")
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"hibernate", "hibernate"}, w.sent()); d != "" {
			t.Error(d)
		}
	})
}

func TestClockSteps(t *testing.T) {
	for _, step := range []time.Duration{time.Hour, -time.Hour, 30 * 24 * time.Hour, -5 * 365 * 24 * time.Hour, 20 * time.Second, -20 * time.Second} {
		t.Run(step.String(), func(t *testing.T) {
			w := newWorld()
			w.tags["lull:idle-timeout"] = "30m"
			bubble(t, w, func(t *testing.T, a *Agent) {
				errtest.Get(a.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "job", TTL: idle.Duration(2 * time.Hour)}))(t)
				time.Sleep(20 * time.Minute)
				w.with(func() { w.skew += step })
				time.Sleep(2 * time.Minute)
				s := mustStatus(t, a)
				if len(w.sent()) > 0 || s.Verdict.Has(idle.ClockInFuture) {
					t.Fatalf("calls %v, blocks %v", w.sent(), s.Verdict.Blocks)
				}
				if big := step >= time.Minute || step <= -time.Minute; big && s.Verdict.IdleMinutes > 4 {
					t.Errorf("idle for %g minutes after a step", s.Verdict.IdleMinutes)
				}
				// The lease keeps its remaining time although the clock is set.
				time.Sleep(97 * time.Minute)
				if len(w.sent()) > 0 {
					t.Fatal("the lease does not hold")
				}
				time.Sleep(8 * time.Minute)
				synctest.Wait()
				if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
					t.Fatal(d, mustStatus(t, a).Verdict.Blocks)
				}
			})
		})
	}
}

func TestHaltSurvivesARestart(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "10m"
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		a := w.start(t, ctx)
		errtest.Get(a.Halt(t.Context(), agentctl.HaltRequest{On: true, Reason: "audit"}))(t)
		cancel()
		synctest.Wait()
		ctx, cancel = context.WithCancel(t.Context())
		defer cancel()
		a = w.start(t, ctx)
		time.Sleep(5 * time.Hour)
		s := mustStatus(t, a)
		if s.Halted == nil || len(w.sent()) > 0 || !s.Verdict.Has(idle.Halted) {
			t.Errorf("halted %v, calls %v", s.Halted, w.sent())
		}
		cancel()
		synctest.Wait()
	})
}

func TestUnreadableStateMeansHalt(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "10m"
	w.files[stateFile] = []byte("{")
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(5 * time.Hour)
		if s := mustStatus(t, a); s.Halted == nil || len(w.sent()) > 0 || len(s.Alarms) == 0 {
			t.Errorf("halted %v, calls %v, alarms %v", s.Halted, w.sent(), s.Alarms)
		}
	})
}

func TestWarningIsNotUse(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	w.typed = epoch // a shell is open and idle
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(31 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
			t.Fatal(d)
		}
		if n := len(w.warned()); n != 1 {
			t.Errorf("warned %d times", n)
		}
	})
}

func TestKeyAfterTheWarningHolds(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(26 * time.Minute)
		w.with(func() { w.typed = time.Now() })
		time.Sleep(29 * time.Minute)
		if len(w.sent()) > 0 {
			t.Fatal("the answer to the warning was not heard")
		}
	})
}

func TestTagsChangeOnlyOnChange(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "10h"
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(8 * time.Hour)
		synctest.Wait()
		w.with(func() {
			if len(w.writes) != 2 {
				t.Errorf("%d writes: %v", len(w.writes), w.writes)
			}
		})
		if w.tag("idle-status") != "idle" || w.tag("idle-since") != "2000-01-01T00:00:00Z" {
			t.Errorf("tags %s, %s", w.tag("idle-status"), w.tag("idle-since"))
		}
		w.with(func() { w.busy["cpu"] = true })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if w.tag("idle-status") != "active" {
			t.Error("not active again")
		}
	})
}

func TestLeasesAndSnoozesAreChecked(t *testing.T) {
	w := newWorld()
	bubble(t, w, func(t *testing.T, a *Agent) {
		for _, ttl := range []time.Duration{0, -time.Second, 24*time.Hour + time.Second} {
			if _, err := a.HoldLease(t.Context(), agentctl.LeaseRequest{TTL: idle.Duration(ttl)}); err == nil {
				t.Errorf("a lease of %s was taken", ttl)
			}
		}
		if err := a.ReleaseLease(t.Context(), "missing"); err == nil {
			t.Error("a lease that is not held was released")
		}
		for _, r := range []agentctl.SnoozeRequest{{For: -1}, {For: idle.Duration(31 * 24 * time.Hour)}, {Until: time.Now().Add(-time.Hour)}, {For: 1, Until: time.Now()}} {
			if _, err := a.Snooze(t.Context(), r); err == nil {
				t.Errorf("%+v was taken", r)
			}
		}
		errtest.Get(a.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "a", TTL: idle.Duration(time.Hour)}))(t)
		errtest.Get(a.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "b", TTL: idle.Duration(time.Hour)}))(t)
		errtest.None(t, a.ReleaseLease(t.Context(), "a"))
		l, err := a.Leases(t.Context())
		if err != nil || len(l) != 1 || l[0].Holder != "b" {
			t.Errorf("%v, %v", l, err)
		}
	})
}

// TestSmallClockStep checks that even a clock step that is too small for a resume
// invalidates every sample: a rate over a period that the step stretched would look
// quiet.
func TestSmallClockStep(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(20*time.Minute + 30*time.Second)
		w.with(func() { w.skew += 50 * time.Second })
		stepped := time.Now()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		list, err := a.History(t.Context(), agentctl.HistoryQuery{Since: stepped})
		errtest.None(t, err)
		if !slices.ContainsFunc(list, func(e agentctl.Entry) bool { return e.Verdict != nil && e.Verdict.Has(idle.SignalUnknown) }) {
			t.Errorf("the samples before the step still counted: %+v", list)
		}
		if s := mustStatus(t, a); s.Counters.Resumes > 0 || s.Verdict.IdleMinutes < 20 {
			t.Errorf("it is taken for a resume: %+v", s.Verdict)
		}
	})
}

// TestPrismPrefix checks that tags with the prefix prism: work like lull's, including
// the state tags.
func TestPrismPrefix(t *testing.T) {
	w := newWorld()
	w.tune = func(o *Options) { o.Prefix = "prism:" }
	w.tags["prism:idle-timeout"], w.tags["prism:hibernate-on-idle"], w.tags["lull:enabled"] = "30m", "true", "false"
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(32 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"hibernate"}, w.sent()); d != "" {
			t.Error(d, mustStatus(t, a).Verdict.Blocks)
		}
		w.with(func() {
			if w.tags["Prism:IdleStatus"] != "idle" || w.tags["Prism:IdleAction"] != "hibernating" || w.tags["Prism:IdleSince"] == "" || w.tags["lull:idle-status"] != "" {
				t.Errorf("tags %v", w.tags)
			}
		})
	})
}
