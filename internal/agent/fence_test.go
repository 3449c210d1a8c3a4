package agent

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

// TestFenceIsTheLast checks that the call is based on readings at most five seconds
// old, whatever takes long between decision and call. The test's cloud panics
// otherwise.
func TestFenceIsTheLast(t *testing.T) {
	for name, slow := range map[string]func(w *world){
		"the disk takes 20 s":            func(w *world) { w.saveTook = 20 * time.Second },
		"describing takes 9 s":           func(w *world) { w.descTook = 9 * time.Second },
		"describing takes half a minute": func(w *world) { w.descTook = 30 * time.Second },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.tags["lull:idle-timeout"] = "30m"
			w.tags["lull:hibernate-on-idle"] = "true"
			slow(w)
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(38 * time.Minute)
				synctest.Wait()
				if d := cmp.Diff([]string{"hibernate"}, w.sent()); d != "" {
					t.Error(d, mustStatus(t, a).Last)
				}
			})
		})
	}
}

// TestUseWhileTheDiskIsSlow checks that an action is canceled by a key press, and by
// a halt, that come while its intent is written to a slow disk.
func TestUseWhileTheDiskIsSlow(t *testing.T) {
	for name, use := range map[string]func(t *testing.T, w *world, a *Agent){
		"a key": func(_ *testing.T, w *world, _ *Agent) { w.with(func() { w.typed = time.Now() }) },
		"a halt": func(t *testing.T, _ *world, a *Agent) {
			go a.Halt(t.Context(), agentctl.HaltRequest{On: true, Reason: "test"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.tags["lull:idle-timeout"] = "30m"
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(29*time.Minute + 30*time.Second)
				w.with(func() { w.saveTook = 20 * time.Second })
				for mustStatus(t, a).Last == nil || mustStatus(t, a).Last.Phase != phaseCalling {
					time.Sleep(time.Second)
				}
				time.Sleep(10 * time.Second)
				use(t, w, a)
				time.Sleep(5 * time.Minute)
				synctest.Wait()
				if s := mustStatus(t, a); len(w.sent()) > 0 || s.Last.Phase != phaseCancelled {
					t.Errorf("calls %v, last %+v", w.sent(), s.Last)
				}
			})
		})
	}
}

// TestResumeBeforeTheAnswer checks a machine that goes down before the call is
// answered, as with a command that hibernates and answers after the resume.
func TestResumeBeforeTheAnswer(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	w.tags["lull:hibernate-on-idle"] = "true"
	w.stopTook = 20 * time.Second
	bubble(t, w, func(t *testing.T, a *Agent) {
		for len(w.sent()) == 0 {
			time.Sleep(time.Second)
		}
		w.with(func() { w.slept += 9 * time.Hour })
		time.Sleep(12 * time.Minute)
		synctest.Wait()
		s := mustStatus(t, a)
		if s.Last.Phase != phaseDone || len(s.Alarms) > 0 || w.tag("idle-action") != "hibernated" {
			t.Errorf("last %+v, alarms %v, tag %s", s.Last, s.Alarms, w.tag("idle-action"))
		}
	})
}

// TestCompletionEndsOnce checks that a machine that hibernated because its work was
// complete, and was resumed, does not go down again for the same completion, but does
// for a new one.
func TestCompletionEndsOnce(t *testing.T) {
	for _, how := range []string{"command", "file", "both"} {
		t.Run(how, func(t *testing.T) {
			w := newWorld()
			w.busy["cpu"] = true
			w.tags["lull:on-complete"] = "hibernate"
			complete := func(t *testing.T, a *Agent) {
				if how != "file" {
					if _, err := a.Complete(t.Context(), agentctl.CompleteRequest{}); err != nil {
						t.Error(err)
					}
				}
				if how != "command" {
					w.with(func() { w.complete = time.Now() })
				}
			}
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(time.Hour)
				complete(t, a)
				time.Sleep(7 * time.Minute)
				w.with(func() { w.slept += 9 * time.Hour })
				time.Sleep(3 * time.Hour)
				synctest.Wait()
				if d := cmp.Diff([]string{"hibernate"}, w.sent()); d != "" {
					t.Fatal("after the resume:", d)
				}
				if s := mustStatus(t, a); s.Completion != "" || s.Last.Phase != phaseDone {
					t.Errorf("completion %q, last %+v", s.Completion, s.Last)
				}
				complete(t, a)
				time.Sleep(7 * time.Minute)
				synctest.Wait()
				if d := cmp.Diff([]string{"hibernate", "hibernate"}, w.sent()); d != "" {
					t.Error("after it completed again:", d)
				}
			})
		})
	}
}

// TestTerminateIsWarnedOf checks that an action that was announced as a stop does not
// become a termination unless users are warned of that.
func TestTerminateIsWarnedOf(t *testing.T) {
	for _, late := range []bool{false, true} {
		w := newWorld()
		w.busy["cpu"] = true
		w.tags["lull:ttl-deadline"] = "2000-01-01T02:00:00Z"
		bubble(t, w, func(t *testing.T, a *Agent) {
			change := func() { w.with(func() { w.tags["lull:ttl-action"] = "terminate" }) }
			if late {
				w.with(func() { w.atFence = func() {} })
				time.Sleep(2*time.Hour - time.Second)
			} else {
				time.Sleep(2*time.Hour - time.Minute)
			}
			change()
			time.Sleep(4 * time.Minute)
			synctest.Wait()
			if n := w.warned(); len(w.sent()) > 0 || len(n) != 2 || n[1].Action != "terminate" || !strings.Contains(n[1].Text(), "terminated") {
				t.Fatalf("late %t: calls %v, warnings %v", late, w.sent(), n)
			}
			time.Sleep(4 * time.Minute)
			synctest.Wait()
			if d := cmp.Diff([]string{"terminate"}, w.sent()); d != "" {
				t.Errorf("late %t: %s", late, d)
			}
		})
	}
}

// TestSleepWhileASignalIsAsked checks that readings from before a suspend are not
// used after it.
func TestSleepWhileASignalIsAsked(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	w.tags["lull:warn-before"] = "0s"
	w.config = []byte("pre-stop: save\n")
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(20*time.Minute + 30*time.Second)
		w.with(func() { w.hang["users"] = true })
		time.Sleep(32 * time.Second) // until a check is in progress
		w.with(func() { w.slept += 9 * time.Hour; w.hang["users"] = false })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		s := mustStatus(t, a)
		if w.hooks > 0 || s.Counters.Actions > 0 || s.Counters.Resumes != 1 {
			t.Errorf("%d hooks, counters %+v", w.hooks, s.Counters)
		}
	})
}

// TestHaltedMachineRunsNoHook checks that a halt on the machine holds a stop by the
// server, unless a user or a deadline caused it.
func TestHaltedMachineRunsNoHook(t *testing.T) {
	for _, forced := range []bool{false, true} {
		w, to := newWorld(), &ear{}
		w.config = []byte("idle-timeout: 30m\npre-stop: save\npause-holder: controller\n")
		w.tune = func(o *Options) { o.Reporter = to }
		bubble(t, w, func(t *testing.T, a *Agent) {
			if _, err := a.Halt(t.Context(), agentctl.HaltRequest{On: true, Reason: "test"}); err != nil {
				t.Fatal(err)
			}
			to.mu.Lock()
			to.order = &control.AgentOrder{Generation: 7, Action: "stop", Reason: "idle_timeout", Forced: forced}
			to.mu.Unlock()
			time.Sleep(5 * time.Minute)
			synctest.Wait()
			last := to.heard[len(to.heard)-1].(control.AgentReport).Ordered
			want := map[bool]string{false: "veto", true: "proceed"}[forced]
			if last == nil || last.Generation != 7 || !last.Done || last.Answer != want || (w.hooks > 0) != forced {
				t.Errorf("forced %t: %d hooks, answer %+v", forced, w.hooks, last)
			}
		})
	}
}

// TestTagsAreReadAnew checks that an action does not rely on a reading of the tags
// that was in progress when the action began, because that reading may have missed a
// change.
func TestTagsAreReadAnew(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(30*time.Minute - 2*time.Second)
		w.with(func() { w.tagsTook = 8 * time.Second })
		go a.Reload(t.Context())
		time.Sleep(time.Second)
		w.with(func() { w.tags["lull:idle-timeout"] = "8h" })
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if s := mustStatus(t, a); len(w.sent()) > 0 || s.Last == nil || s.Last.Phase != phaseCancelled {
			t.Errorf("calls %v, last %+v", w.sent(), s.Last)
		}
	})
}

// TestHaltedFleetEndsNothing checks that a fleet halt is noticed before the call even
// if it was set a moment before the action, for every action and reason.
func TestHaltedFleetEndsNothing(t *testing.T) {
	for _, action := range []string{"stop", "terminate", "idle"} {
		w, to := newWorld(), &ear{}
		w.tune = func(o *Options) { o.Reporter = to }
		if action == "idle" {
			w.tags["lull:idle-timeout"] = "2h"
		} else {
			w.busy["cpu"] = true
			w.tags["lull:ttl-deadline"], w.tags["lull:ttl-action"] = "2000-01-01T02:00:00Z", action
		}
		bubble(t, w, func(t *testing.T, a *Agent) {
			time.Sleep(2*time.Hour - time.Second)
			w.with(func() { w.saveTook = 12 * time.Second }) // so that the call is more than half a minute away
			time.Sleep(25 * time.Second)
			if s := mustStatus(t, a); s.Last == nil || s.Last.EndedAt != nil {
				t.Fatalf("%s: no action is in progress: %+v", action, s.Last)
			}
			to.mu.Lock()
			to.halts = true
			to.mu.Unlock()
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			if s := mustStatus(t, a); len(w.sent()) > 0 || s.Last != nil && s.Last.Phase != phaseCancelled {
				t.Errorf("%s: calls %v, last %+v", action, w.sent(), s.Last)
			}
		})
	}
}

// TestNothingBeforeTheAnnouncedTime checks that the machine runs until the time
// announced to users, for any timeout and warning time.
func TestNothingBeforeTheAnnouncedTime(t *testing.T) {
	for _, c := range [][2]string{{"1m", "5m"}, {"6m", "5m"}, {"30m", "5m"}, {"30m", "20m"}, {"2h", "1m"}, {"10m", "90s"}} {
		t.Run(c[0]+" "+c[1], func(t *testing.T) {
			w := newWorld()
			w.tags["lull:idle-timeout"], w.tags["lull:warn-before"] = c[0], c[1]
			bubble(t, w, func(t *testing.T, a *Agent) {
				for len(w.sent()) == 0 {
					time.Sleep(time.Second)
				}
				called := time.Now()
				if n := w.warned(); len(n) != 1 || called.Before(n[0].At) || called.Sub(n[0].At) > 5*time.Second {
					t.Errorf("stopped at %s, warnings %+v", called, n)
				}
			})
		})
	}
}
