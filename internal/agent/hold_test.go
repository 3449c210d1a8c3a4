package agent

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

// TestSnoozeAndLeaseHoldACompletion checks that a manual snooze or a lease delays a
// completion, even if it began after it, and that users are warned before a delayed
// completion acts.
func TestSnoozeAndLeaseHoldACompletion(t *testing.T) {
	hold := map[string]func(t *testing.T, a *Agent){
		"snooze": func(t *testing.T, a *Agent) {
			_, err := a.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(2 * time.Hour)})
			errtest.None(t, err)
		},
		"lease": func(t *testing.T, a *Agent) {
			_, err := a.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "job", TTL: idle.Duration(2 * time.Hour)})
			errtest.None(t, err)
		},
	}
	complete := func(t *testing.T, a *Agent) {
		_, err := a.Complete(t.Context(), agentctl.CompleteRequest{})
		errtest.None(t, err)
	}
	for how, hold := range hold {
		for name, order := range map[string][]func(*testing.T, *Agent){
			how + " first":             {hold, complete},
			"completion first, " + how: {complete, hold},
		} {
			t.Run(name, func(t *testing.T) {
				w := newWorld()
				w.busy["cpu"] = true
				w.tags["lull:on-complete"] = "stop"
				bubble(t, w, func(t *testing.T, a *Agent) {
					time.Sleep(time.Hour)
					for _, f := range order {
						f(t, a)
						time.Sleep(time.Minute)
					}
					time.Sleep(118*time.Minute - 10*time.Second)
					if len(w.sent()) > 0 {
						t.Fatal("the hold did not hold the completion off")
					}
					if n := w.warned(); len(n) == 0 || n[len(n)-1].Reason != reasonComplete {
						t.Errorf("warnings %v", n)
					}
					time.Sleep(2 * time.Minute)
					synctest.Wait()
					if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
						t.Error("after the hold:", d)
					}
				})
			})
		}
	}
}

// TestNothingHoldsATTL checks that neither a snooze nor a lease delays a deadline.
func TestNothingHoldsATTL(t *testing.T) {
	w := newWorld()
	w.tags["lull:ttl-deadline"] = "2000-01-01T02:00:00Z"
	bubble(t, w, func(t *testing.T, a *Agent) {
		_, err := a.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(9 * time.Hour)})
		errtest.None(t, err)
		_, err = a.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "job", TTL: idle.Duration(9 * time.Hour)})
		errtest.None(t, err)
		time.Sleep(2*time.Hour + 5*time.Second)
		synctest.Wait()
		if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
			t.Error(d)
		}
	})
}

// TestUpcoming checks that the first action announced by the status is the next one
// to happen, for every combination of TTL, completion, snooze and lease.
func TestUpcoming(t *testing.T) {
	for name, c := range map[string]struct {
		tags     map[string]string
		complete bool
		snooze   time.Duration
		reasons  []string
	}{
		"nothing":                          {reasons: []string{}},
		"idleness":                         {tags: map[string]string{"idle-timeout": "30m"}, reasons: []string{reasonIdle}},
		"a TTL before the end of a snooze": {tags: map[string]string{"ttl-deadline": "2000-01-01T01:00:00Z", "idle-timeout": "30m"}, snooze: 2 * time.Hour, reasons: []string{reasonTTL, reasonIdle}},
		"a snooze before a TTL":            {tags: map[string]string{"ttl-deadline": "2000-01-01T05:00:00Z", "idle-timeout": "30m"}, snooze: 2 * time.Hour, reasons: []string{reasonIdle, reasonTTL}},
		"a completion and a snooze":        {tags: map[string]string{"on-complete": "stop"}, complete: true, snooze: 2 * time.Hour, reasons: []string{reasonComplete}},
		"a completion":                     {tags: map[string]string{"on-complete": "terminate", "ttl-deadline": "2000-01-01T05:00:00Z"}, complete: true, reasons: []string{reasonComplete, reasonTTL}},
		"a completion without a meaning":   {tags: map[string]string{"ttl-deadline": "2000-01-01T05:00:00Z"}, complete: true, reasons: []string{reasonTTL}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			for k, v := range c.tags {
				w.tags["lull:"+k] = v
			}
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(2 * time.Minute)
				if c.complete {
					_, err := a.Complete(t.Context(), agentctl.CompleteRequest{})
					errtest.None(t, err)
				}
				if c.snooze > 0 {
					_, err := a.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(c.snooze)})
					errtest.None(t, err)
				}
				time.Sleep(time.Second)
				said := mustStatus(t, a).Upcoming
				got := []string{}
				for _, u := range said {
					got = append(got, u.Reason)
				}
				if d := cmp.Diff(c.reasons, got); d != "" {
					t.Fatal(d, said)
				}
				if len(said) == 0 {
					return
				}
				time.Sleep(time.Until(said[0].At) - time.Second)
				if len(w.sent()) > 0 {
					t.Errorf("stopped before %s", said[0].At)
				}
				time.Sleep(5 * time.Second)
				synctest.Wait()
				if s := mustStatus(t, a); len(w.sent()) != 1 || w.sent()[0] != said[0].Action || s.Last.Reason != said[0].Reason {
					t.Errorf("calls %v, last %+v, said %+v", w.sent(), s.Last, said)
				}
			})
		})
	}
}

// TestTTLExtend checks that an extension moves the deadline, in the tag too and
// across a restart, and that a deadline set later overrides the extension.
func TestTTLExtend(t *testing.T) {
	extend := func(t *testing.T, a *Agent, d time.Duration) error {
		t.Helper()
		_, err := a.ExtendTTL(t.Context(), agentctl.ExtendRequest{For: idle.Duration(d)})
		return err
	}
	for _, source := range []string{"tag", "file", "stale tag"} {
		t.Run(source, func(t *testing.T) {
			w := newWorld()
			if source == "file" {
				w.config = []byte("ttl-deadline: 2000-01-01T02:00:00Z\n")
			} else {
				w.tags["lull:ttl-deadline"] = "2000-01-01T02:00:00Z"
			}
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				a := w.start(t, ctx)
				time.Sleep(116 * time.Minute) // until users are warned
				for _, d := range []time.Duration{0, -time.Hour, 31 * 24 * time.Hour} {
					if extend(t, a, d) == nil {
						t.Errorf("extended by %s", d)
					}
				}
				errtest.None(t, extend(t, a, time.Hour))
				errtest.None(t, extend(t, a, time.Hour))
				if got := w.tag("ttl-deadline"); source != "file" && got != "2000-01-01T04:00:00Z" {
					t.Errorf("the tag says %q", got)
				}
				if source == "stale tag" { // as with outdated metadata
					w.with(func() { w.tags["lull:ttl-deadline"] = "2000-01-01T02:00:00Z" })
				}
				cancel()
				synctest.Wait()
				ctx, cancel = context.WithCancel(t.Context())
				defer cancel()
				a = w.start(t, ctx)
				time.Sleep(2*time.Hour + 3*time.Minute + 50*time.Second)
				synctest.Wait()
				if len(w.sent()) > 0 {
					t.Fatal("the extension does not hold")
				}
				time.Sleep(20 * time.Second)
				synctest.Wait()
				if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
					t.Error(d)
				}
				w.with(func() {
					if !slices.ContainsFunc(w.withdrawn, func(x Withdrawal) bool { return x.Warning.Reason == reasonTTL }) {
						t.Errorf("the first warning was not withdrawn: %+v", w.withdrawn)
					}
				})
				if extend(t, a, time.Hour) == nil {
					t.Error("extended while the stop is in progress")
				}
				cancel()
				synctest.Wait()
			})
		})
	}
	t.Run("a new deadline wins", func(t *testing.T) {
		w := newWorld()
		w.tags["lull:ttl-deadline"] = "2000-01-01T02:00:00Z"
		bubble(t, w, func(t *testing.T, a *Agent) {
			errtest.None(t, extend(t, a, 5*time.Hour))
			w.with(func() { w.tags["lull:ttl-deadline"] = "2000-01-01T03:00:00Z" })
			time.Sleep(3*time.Hour + 5*time.Second)
			synctest.Wait()
			if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
				t.Error(d)
			}
		})
	})
	t.Run("no deadline", func(t *testing.T) {
		w := newWorld()
		bubble(t, w, func(t *testing.T, a *Agent) {
			if extend(t, a, time.Hour) == nil {
				t.Error("extended what has no end")
			}
		})
	})
	t.Run("the tag cannot be written", func(t *testing.T) {
		w := newWorld()
		w.tags["lull:ttl-deadline"] = "2000-01-01T02:00:00Z"
		w.writeErr = errBoom
		bubble(t, w, func(t *testing.T, a *Agent) {
			if s := mustStatus(t, a); extend(t, a, time.Hour) == nil || !s.TTL.Equal(time.Date(2000, 1, 1, 2, 0, 0, 0, time.UTC)) {
				t.Error("a server would stop it at the old deadline")
			}
		})
	})
	t.Run("the server's record", func(t *testing.T) {
		w, to := newWorld(), &ear{}
		end := time.Date(2000, 1, 1, 2, 0, 0, 0, time.UTC)
		w.tags["lull:ttl-deadline"] = end.Format(time.RFC3339)
		to.answer = control.AgentAnswer{WorkerID: "w-1", Holder: holderAgent, TTLDeadline: &end, TTLAction: "stop"}
		w.tune = func(o *Options) { o.Reporter = to }
		bubble(t, w, func(t *testing.T, a *Agent) {
			time.Sleep(2 * time.Minute)
			if extend(t, a, time.Hour) == nil {
				t.Error("extended, and the server writes its own deadline again")
			}
		})
	})
}

// TestCompleteUndo checks that a completion can be withdrawn until its action is
// sent, however it was signaled, and can then be signaled again.
func TestCompleteUndo(t *testing.T) {
	for _, how := range []string{"command", "file", "both"} {
		t.Run(how, func(t *testing.T) {
			w := newWorld()
			w.busy["cpu"] = true
			w.tags["lull:on-complete"] = "stop"
			complete := func(t *testing.T, a *Agent) {
				if how != "file" {
					_, err := a.Complete(t.Context(), agentctl.CompleteRequest{})
					errtest.None(t, err)
				}
				if how != "command" {
					w.with(func() { w.complete = time.Now() })
				}
			}
			undo := func(t *testing.T, a *Agent) error {
				_, err := a.Complete(t.Context(), agentctl.CompleteRequest{Undo: true})
				return err
			}
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(time.Hour)
				if undo(t, a) == nil {
					t.Error("nothing was taken back")
				}
				complete(t, a)
				time.Sleep(3 * time.Minute)
				errtest.None(t, undo(t, a))
				time.Sleep(3 * time.Hour)
				synctest.Wait()
				if s := mustStatus(t, a); len(w.sent()) > 0 || s.Completion != "" || len(s.Upcoming) > 0 {
					t.Fatalf("calls %v, completion %q, upcoming %v", w.sent(), s.Completion, s.Upcoming)
				}
				w.with(func() {
					if n := len(w.withdrawn); n == 0 || w.withdrawn[n-1].Warning.Reason != reasonComplete {
						t.Errorf("the warning was not withdrawn: %+v", w.withdrawn)
					}
				})
				complete(t, a)
				time.Sleep(7 * time.Minute)
				synctest.Wait()
				if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
					t.Error("completed again:", d)
				}
				if undo(t, a) == nil {
					t.Error("taken back after the stop was sent")
				}
			})
		})
	}
}
