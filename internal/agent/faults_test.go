package agent

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/lib/delay"
	"lull/internal/platform/ec2"
	"lull/internal/protocol/agentctl"
)

// trouble is a fault that occurs between idle and stopped, and what must happen.
type trouble struct {
	name   string
	set    func(w *world)
	during func(t *testing.T, w *world, a *Agent) // after the agent has started
	sleep  time.Duration                          // default 45 min; the timeout is 30 min
	calls  []string
	alarm  string // code of the alarm that must be raised at the end
	then   string // text for the published table: what the agent does
	check  func(t *testing.T, w *world, s agentctl.Status)
}

var errBoom = errors.New("boom")

func faults() []trouble {
	hook := func(h agentctl.Hook, took time.Duration) func(HookSpec) agentctl.Hook {
		return func(HookSpec) agentctl.Hook { time.Sleep(took); return h }
	}
	withHook := func(w *world) { w.config = []byte("pre-stop: /opt/save\n") }
	return []trouble{
		{name: "nothing", then: "warned five minutes before", calls: []string{"stop"}},
		{name: "nothing is configured", then: "only monitors (`no_policy`), without an alarm", set: func(w *world) { clear(w.tags) }, sleep: 9 * time.Hour, check: func(t *testing.T, _ *world, s agentctl.Status) {
			if !s.Verdict.Has(codeNoPolicy) || len(s.Alarms) > 0 || s.Config[1].State != "read" {
				t.Errorf("blocks %v, alarms %v, config %+v", s.Verdict.Blocks, s.Alarms, s.Config)
			}
		}},
		{name: "tags unreadable, nothing cached", then: "only monitors (`config_unreadable`)", set: func(w *world) { w.tagsErr = errBoom }, sleep: 9 * time.Hour, alarm: "config_unreadable",
			check: func(t *testing.T, _ *world, s agentctl.Status) {
				if !s.Verdict.Has(codeConfig) || s.Config[1].State != "unreadable" {
					t.Errorf("blocks %v, config %+v", s.Verdict.Blocks, s.Config)
				}
			}},
		{name: "tags unreadable for an hour, cached", then: "the last values read apply", during: anHourInUse(errBoom), calls: []string{"stop"}, alarm: "config_stale"},
		{name: "tags readable again after an hour, and changed", then: "the new timeout applies and the alarm clears", during: func(t *testing.T, w *world, a *Agent) {
			anHourInUse(errBoom)(t, w, a)
			w.with(func() { w.tagsErr, w.tags["lull:idle-timeout"] = nil, "8h" })
		}, check: func(t *testing.T, _ *world, s agentctl.Status) {
			if len(s.Alarms) > 0 || s.Config[1].State != "read" {
				t.Errorf("alarms %v, config %+v", s.Alarms, s.Config)
			}
		}},
		{name: "timeout is lowered while running", then: "the new timeout applies within five minutes", during: func(_ *testing.T, w *world, _ *Agent) {
			w.with(func() { w.tags["lull:idle-timeout"] = "10m" })
		}, sleep: 14 * time.Minute, calls: []string{"stop"}},
		{name: "timeout is raised while running", then: "waits until the new timeout", during: func(_ *testing.T, w *world, _ *Agent) {
			w.with(func() { w.tags["lull:idle-timeout"] = "8h" })
		}, check: blocked(idle.NotIdleYet)},
		{name: "every tag is deleted while running", then: "only monitors (`no_policy`)", during: func(_ *testing.T, w *world, _ *Agent) {
			w.with(func() { clear(w.tags) })
		}, check: blocked(codeNoPolicy)},
		{name: "metadata hangs at the final check", then: "gives up after 10 s and uses the last tags read", set: func(w *world) { withHook(w) }, during: func(_ *testing.T, w *world, _ *Agent) {
			w.with(func() {
				w.hook = func(HookSpec) agentctl.Hook {
					w.with(func() { w.tagsHang = true })
					return agentctl.Hook{}
				}
			})
		}, calls: []string{"stop"}, alarm: "config_stale"},
		{name: "metadata hangs", then: "each read of the tags times out after 10 s", during: func(_ *testing.T, w *world, _ *Agent) { w.with(func() { w.tagsHang = true }) },
			calls: []string{"stop"}, alarm: "config_stale"},
		{name: "one tag is wrong", then: "the alarm names the tag and its value; the default or last good value applies", set: func(w *world) { w.tags["lull:idle-cpu"] = "lots" }, calls: []string{"stop"}, alarm: "config_faults"},
		{name: "timeout becomes wrong while running", then: "the last good value applies", during: func(_ *testing.T, w *world, _ *Agent) {
			w.with(func() { w.tags["lull:idle-timeout"] = "30 minutes" })
		}, calls: []string{"stop"}, alarm: "config_faults"},
		{name: "local file cannot be read", then: "only monitors", set: func(w *world) { w.config = []byte("unreadable") }, alarm: "config_unreadable"},
		{name: "local file is not valid yaml", then: "only monitors", set: func(w *world) { w.config = []byte("a: [") }, alarm: "config_unreadable"},
		{name: "timeout is raised at the last second", then: "the action is canceled", set: func(w *world) { withHook(w) }, during: func(_ *testing.T, w *world, _ *Agent) {
			w.with(func() {
				w.hook = func(HookSpec) agentctl.Hook {
					w.with(func() { w.tags["lull:idle-timeout"] = "8h" })
					return agentctl.Hook{}
				}
			})
		}, check: cancelled("no longer idle")},
		{name: "detection is switched off", then: "`detection_disabled`", during: func(_ *testing.T, w *world, _ *Agent) {
			w.with(func() { w.tags["lull:enabled"] = "false" })
		}, check: blocked(idle.DetectionDisabled)},
		{name: "the server holds the pause", then: "`pause_holder`: reports only", set: func(w *world) { w.tags["lull:pause-holder"] = "controller" }, check: blocked(codeHolder)},

		{name: "hook fails", then: "stops anyway: the hook is asked to clean up, not for permission", set: func(w *world) { withHook(w); w.hook = hook(agentctl.Hook{ExitCode: 3}, time.Minute) },
			calls: []string{"stop"}, alarm: "hook_failed"},
		{name: "hook runs into its deadline", then: "its whole process group is killed", set: func(w *world) {
			withHook(w)
			w.hook = hook(agentctl.Hook{ExitCode: -1, TimedOut: true}, 5*time.Minute)
		}, calls: []string{"stop"}, alarm: "hook_failed"},
		{name: "hook works hard", then: "the hook's own work does not count as activity", set: func(w *world) {
			withHook(w)
			w.hook = func(HookSpec) agentctl.Hook {
				w.with(func() { w.busy["cpu"], w.busy["disk"] = true, true })
				time.Sleep(4 * time.Minute)
				w.with(func() { w.busy["cpu"], w.busy["disk"] = false, false })
				return agentctl.Hook{}
			}
		}, calls: []string{"stop"}},
		{name: "a user types while the hook runs", then: "the action is canceled", set: func(w *world) {
			withHook(w)
			w.hook = func(HookSpec) agentctl.Hook {
				w.with(func() { w.typed = time.Now() })
				return agentctl.Hook{}
			}
		}, check: cancelled("Last used 1m ago (terminals)")},
		{name: "work begins while the hook runs", then: "the action is canceled", set: func(w *world) {
			withHook(w)
			w.hook = func(HookSpec) agentctl.Hook {
				w.with(func() { w.busy["cpu"] = true })
				return agentctl.Hook{}
			}
		}, check: cancelled("machine was used")},
		{name: "hook vetoes", then: "no stop during this idle period, for at most 4 h", set: func(w *world) { withHook(w); w.hook = hook(agentctl.Hook{ExitCode: HookVeto}, 0) },
			check: blocked(idle.HookVeto)},
		{name: "hook always vetoes", then: "overruled after 4 h", sleep: 4*time.Hour + 36*time.Minute, set: func(w *world) { withHook(w); w.hook = hook(agentctl.Hook{ExitCode: HookVeto}, 0) },
			calls: []string{"stop"}},
		{name: "hook defers once", then: "asked again after 10 min", set: func(w *world) {
			withHook(w)
			n := 0
			w.hook = func(HookSpec) agentctl.Hook {
				if n++; n == 1 {
					return agentctl.Hook{ExitCode: HookDefer}
				}
				return agentctl.Hook{}
			}
		}, sleep: 48 * time.Minute, calls: []string{"stop"}},
		{name: "tag hook is refused", then: "stops without running the hook", set: func(w *world) { w.tags["lull:pre-stop"] = "/evil" }, calls: []string{"stop"}, alarm: "tag_hook_refused",
			check: func(t *testing.T, w *world, _ agentctl.Status) {
				if w.hooks != 0 {
					t.Error("it ran")
				}
			}},
		{name: "tag hook is allowed", then: "the local file sets `allow-tag-hooks: true`", set: func(w *world) { w.tags["lull:pre-stop"] = "/fine"; w.config = []byte("allow-tag-hooks: true\n") },
			calls: []string{"stop"}, check: func(t *testing.T, w *world, s agentctl.Status) {
				if w.hooks != 1 || s.Last.Hook.Command != "/fine" {
					t.Errorf("ran %d times: %+v", w.hooks, s.Last.Hook)
				}
			}},

		{name: "hibernate", set: func(w *world) { w.tags["lull:hibernate-on-idle"] = "true" }, calls: []string{"hibernate"}, check: tagged("hibernating")},
		{name: "hibernation not configured", then: "an instance that was not launched for hibernation is stopped", set: func(w *world) { w.tags["lull:hibernate-on-idle"] = "true"; w.hibernate = false }, calls: []string{"stop"}},
		{name: "hibernation refused", set: func(w *world) {
			w.tags["lull:hibernate-on-idle"] = "true"
			w.stopErr = []error{refusal(ec2.HibernateUnsupported)}
		}, calls: []string{"hibernate", "stop"}},
		{name: "stop not allowed", then: "retried after 5 min, then at doubling intervals up to 1 h; the hook runs once", set: func(w *world) { withHook(w); w.stopErr = slices.Repeat([]error{refusal(ec2.Unauthorized)}, 99) },
			sleep: 44 * time.Minute, calls: []string{"stop", "stop"}, alarm: "action_failed", check: func(t *testing.T, w *world, s agentctl.Status) {
				if w.hooks != 1 || len(w.warnings) > 3 || !s.Verdict.Has(idle.Cooldown) {
					t.Errorf("%d hooks, %d warnings, blocks %v", w.hooks, len(w.warnings), s.Verdict.Blocks)
				}
			}},
		{name: "stop throttled once", then: "retried after 5 min", set: func(w *world) { w.stopErr = []error{refusal(ec2.Throttled)} }, sleep: 43 * time.Minute, calls: []string{"stop", "stop"}},
		{name: "stop hangs", then: "times out after 60 s, retried after 5 min", set: func(w *world) { w.stopHang = true }, calls: []string{"stop", "stop"}, alarm: "action_failed"},
		{name: "hibernation not allowed", then: "retried after 5 min; not replaced by a stop", set: func(w *world) {
			w.tags["lull:hibernate-on-idle"] = "true"
			w.stopErr = slices.Repeat([]error{refusal(ec2.Unauthorized)}, 99)
		}, calls: []string{"hibernate", "hibernate"}, alarm: "action_failed"},
		{name: "hibernation throttled once", then: "retried after 5 min", set: func(w *world) {
			w.tags["lull:hibernate-on-idle"] = "true"
			w.stopErr = []error{refusal(ec2.Throttled)}
		}, calls: []string{"hibernate", "hibernate"}},
		{name: "hibernation cannot be looked up", then: "hibernate is requested anyway and EC2's answer decides", set: func(w *world) { w.tags["lull:hibernate-on-idle"] = "true"; w.descErr = errBoom },
			calls: []string{"hibernate"}},
		{name: "accepted and never done", then: "accepted is not done: counts as failed after 10 min", sleep: 41 * time.Minute, calls: []string{"stop"}, alarm: "action_failed"},
		{name: "state tags cannot be written", set: func(w *world) { w.writeErr = errBoom }, calls: []string{"stop"}, alarm: "tags_unwritten"},
		{name: "writing the state tags hangs", then: "times out after 10 s", set: func(w *world) { w.writeHang = true }, calls: []string{"stop"}, alarm: "tags_unwritten"},
		{name: "the warning hangs", then: "times out after 10 s", set: func(w *world) { w.warnHang = true }, calls: []string{"stop"}, alarm: "warning_undelivered"},
		{name: "the disk hangs", then: "the intent cannot be made durable, so no call is made", set: func(w *world) { w.saveTook = 2 * time.Hour }, alarm: "disk_hangs"},
		{name: "disk is full", then: "the intent cannot be made durable, so no call is made", set: func(w *world) { w.saveErr = errBoom }, alarm: "state_unsaved"},

		{name: "asleep while it counts", then: "idle time starts over, with a snooze", during: asleepAt(20 * time.Minute), sleep: 25 * time.Minute, check: resumed},
		{name: "asleep after the warning", then: "idle time starts over, with a second warning", during: asleepAt(27 * time.Minute), sleep: 36 * time.Minute, calls: []string{"stop"}, check: func(t *testing.T, w *world, s agentctl.Status) {
			resumed(t, w, s)
			if len(w.warnings) != 2 {
				t.Errorf("warned %d times, want once before the sleep and once after it", len(w.warnings))
			}
		}},
		{name: "asleep while the hook runs", then: "the action is canceled", set: func(w *world) {
			withHook(w)
			w.hook = func(HookSpec) agentctl.Hook {
				w.with(func() { w.slept += 3 * time.Hour })
				return agentctl.Hook{}
			}
		}, check: func(t *testing.T, w *world, s agentctl.Status) { cancelled("meanwhile")(t, w, s); resumed(t, w, s) }},
		{name: "asleep at the last second", then: "the action is canceled", during: atFence(func(w *world) { w.slept += 8 * time.Hour }),
			check: func(t *testing.T, w *world, s agentctl.Status) { cancelled("meanwhile")(t, w, s); resumed(t, w, s) }},
		{name: "clock set forward an hour", then: "treated as a resume: idle time starts over", during: stepAt(20*time.Minute, time.Hour), sleep: 25 * time.Minute, check: resumed},
		{name: "clock set back an hour", then: "idle time starts over", during: stepAt(20*time.Minute, -time.Hour), sleep: 25 * time.Minute, check: blocked(idle.NotIdleYet)},
		{name: "clock set forward at the last second", then: "the action is canceled", during: atFence(func(w *world) { w.skew += time.Hour }), check: cancelled("no longer idle")},
		{name: "clock set back at the last second", then: "the action is canceled", during: atFence(func(w *world) { w.skew -= time.Hour }), check: cancelled("no longer idle")},

		{name: "snooze at the last second", then: "the action is canceled", set: func(w *world) {}, during: func(t *testing.T, w *world, a *Agent) {
			w.with(func() {
				w.atFence = func() {
					if _, err := a.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(2 * time.Hour)}); err != nil {
						t.Error(err)
					}
				}
			})
		}, check: cancelled("no longer idle")},
		{name: "lease at the last second", then: "the action is canceled", during: func(t *testing.T, w *world, a *Agent) {
			w.with(func() {
				w.atFence = func() {
					if _, err := a.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "job", TTL: idle.Duration(time.Hour)}); err != nil {
						t.Error(err)
					}
				}
			})
		}, check: cancelled("no longer idle")},
		{name: "halt at the last second", then: "the action is canceled", during: func(t *testing.T, w *world, a *Agent) {
			w.with(func() {
				w.atFence = func() {
					if _, err := a.Halt(t.Context(), agentctl.HaltRequest{On: true, Reason: "maintenance"}); err != nil {
						t.Error(err)
					}
				}
			})
		}, check: func(t *testing.T, w *world, s agentctl.Status) {
			if s.Halted == nil || s.Last.Phase != phaseCancelled || w.tags["lull:idle-action"] != "" {
				t.Errorf("halted %v, last %+v, tags %v", s.Halted, s.Last, w.tags)
			}
			tagged("stopping")(t, w, s) // and withdrawn again
		}},
		{name: "a key at the last second", then: "the action is canceled", during: func(_ *testing.T, w *world, _ *Agent) {
			w.with(func() { w.atFence = func() { w.with(func() { w.typed = time.Now() }) } })
		}, check: cancelled("Last used 0s ago (terminals)")},
	}
}

// anHourInUse makes the machine be in use for an hour, during which the tags cannot
// be read.
func anHourInUse(err error) func(*testing.T, *world, *Agent) {
	return func(_ *testing.T, w *world, _ *Agent) {
		w.with(func() { w.tagsErr, w.busy["cpu"] = err, true })
		time.Sleep(time.Hour)
		w.with(func() { w.busy["cpu"] = false })
	}
}

// asleepAt suspends the machine for three hours, d after the start.
func asleepAt(d time.Duration) func(*testing.T, *world, *Agent) {
	return func(_ *testing.T, w *world, _ *Agent) {
		time.Sleep(d)
		w.with(func() { w.slept += 3 * time.Hour })
	}
}

// stepAt sets the machine's clock by step, d after the start.
func stepAt(d, step time.Duration) func(*testing.T, *world, *Agent) {
	return func(_ *testing.T, w *world, _ *Agent) {
		time.Sleep(d)
		w.with(func() { w.skew += step })
	}
}

// atFence calls f between the last reading of the tags and the last reading of the
// signals.
func atFence(f func(w *world)) func(*testing.T, *world, *Agent) {
	return func(_ *testing.T, w *world, _ *Agent) {
		w.with(func() { w.atFence = func() { w.with(func() { f(w) }) } })
	}
}

func resumed(t *testing.T, _ *world, s agentctl.Status) {
	t.Helper()
	if s.Counters.Resumes != 1 || s.ResumedAt == nil {
		t.Errorf("%d resumes at %v, want one", s.Counters.Resumes, s.ResumedAt)
	}
}

func cancelled(why string) func(*testing.T, *world, agentctl.Status) {
	return func(t *testing.T, w *world, s agentctl.Status) {
		t.Helper()
		if s.Last == nil || s.Last.Phase != phaseCancelled || !strings.Contains(s.Last.Detail, why) {
			t.Errorf("last action %+v, want it cancelled because %s", s.Last, why)
		}
	}
}

func blocked(code idle.Code) func(*testing.T, *world, agentctl.Status) {
	return func(t *testing.T, _ *world, s agentctl.Status) {
		t.Helper()
		if !s.Verdict.Has(code) {
			t.Errorf("blocks %v, want %s", s.Verdict.Blocks, code)
		}
	}
}

func tagged(action string) func(*testing.T, *world, agentctl.Status) {
	return func(t *testing.T, w *world, _ agentctl.Status) {
		t.Helper()
		if !slices.ContainsFunc(w.writes, func(x map[string]string) bool { return x["lull:idle-action"] == action }) {
			t.Errorf("tags written %v, want action %s", w.writes, action)
		}
	}
}

func TestFaults(t *testing.T) {
	for _, f := range faults() {
		t.Run(f.name, func(t *testing.T) {
			w := newWorld()
			w.tags["lull:idle-timeout"] = "30m"
			if f.set != nil {
				f.set(w)
			}
			bubble(t, w, func(t *testing.T, a *Agent) {
				watched := watchLoop(t, a)
				defer watched()
				time.Sleep(10 * time.Second)
				if f.during != nil {
					f.during(t, w, a)
				}
				d := f.sleep
				if d == 0 {
					d = 40 * time.Minute
				}
				time.Sleep(d)
				synctest.Wait()
				s := mustStatus(t, a)
				if d := cmp.Diff(append([]string{}, f.calls...), w.sent()); d != "" {
					t.Errorf("calls: %s\nblocks %v\nlast %+v", d, s.Verdict.Blocks, s.Last)
				}
				if f.alarm != "" && !slices.ContainsFunc(s.Alarms, func(x agentctl.Alarm) bool { return x.Code == f.alarm }) {
					t.Errorf("alarms %v, want %s", s.Alarms, f.alarm)
				}
				if f.check != nil {
					w.with(func() { f.check(t, w, s) })
				}
			})
		})
	}
}

// watchLoop calls the agent every seven seconds during a fault. It fails the test if
// the loop is blocked.
func watchLoop(t *testing.T, a *Agent) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for delay.For(ctx, 7*time.Second) == nil {
			asked := time.Now()
			if _, err := a.Status(ctx); err == nil && time.Since(asked) > 0 {
				t.Errorf("the loop was held up for %s", time.Since(asked))
			}
		}
	}()
	return func() { cancel(); <-ended }
}

// TestHookThatHangsHoldsNothingUp checks that the agent answers while a hook hangs.
func TestHookThatHangsHoldsNothingUp(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "10m"
	w.config = []byte("pre-stop: sleep\n")
	w.hook = func(h HookSpec) agentctl.Hook {
		time.Sleep(h.Timeout)
		return agentctl.Hook{TimedOut: true, ExitCode: -1}
	}
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(12 * time.Minute)
		for range 60 {
			time.Sleep(time.Second)
			asked := time.Now()
			s := mustStatus(t, a)
			if time.Since(asked) > 0 || s.Last == nil || s.Last.Phase != phaseHook {
				t.Fatalf("took %s, last %+v", time.Since(asked), s.Last)
			}
		}
		time.Sleep(10 * time.Minute)
	})
}

// TestRestart checks what a new agent does if the previous one was killed, in every
// phase of an action, with and without a reboot in between.
func TestRestart(t *testing.T) {
	for _, at := range []string{phaseIntent, phaseHook, phaseFence, phaseCalling, phaseAccepted} {
		for _, reboot := range []bool{false, true} {
			name := at
			if reboot {
				name += " and a reboot"
			}
			t.Run(name, func(t *testing.T) { restartIn(t, at, reboot) })
		}
	}
}

func restartIn(t *testing.T, phase string, reboot bool) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	w.config = []byte("pre-stop: save\n")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		a := w.start(t, ctx)
		if _, err := a.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "short", TTL: idle.Duration(time.Minute)}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(40 * time.Minute) // the call has been accepted by now
		synctest.Wait()
		w.with(func() {
			// The state on disk is that of a crash in that phase.
			b := w.files[stateFile]
			w.files[stateFile] = []byte(strings.Replace(string(b), `"phase":"accepted"`, `"phase":"`+phase+`"`, 1))
		})
		var files map[string][]byte
		w.with(func() { files = maps.Clone(w.files) })
		cancel()
		synctest.Wait()
		w.with(func() {
			w.files = files
			w.calls = nil
			if reboot {
				w.bootID = "boot-2"
				w.samples = 0
			}
		})
		ctx, cancel = context.WithCancel(t.Context())
		defer cancel()
		a = w.start(t, ctx)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		s := mustStatus(t, a)
		want := phaseCancelled
		if reboot && (phase == phaseCalling || phase == phaseAccepted) {
			want = phaseDone
		}
		if s.Last == nil || s.Last.Phase != want || s.Last.EndedAt == nil {
			t.Errorf("last action %+v, want %s", s.Last, want)
		}
		if want == phaseDone && w.tag("idle-action") != "stopped" {
			t.Errorf("action tag %q, want stopped", w.tag("idle-action"))
		}
		time.Sleep(90 * time.Second)
		synctest.Wait()
		if w.tag("idle-status") != "active" {
			t.Errorf("status tag %q, want active", w.tag("idle-status"))
		}
		// Idle time starts again: no stop before the timeout, then one.
		time.Sleep(26 * time.Minute)
		synctest.Wait()
		if len(w.sent()) > 0 {
			t.Errorf("calls %v before the timeout", w.sent())
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" {
			t.Error(d, mustStatus(t, a).Verdict.Blocks)
		}
		cancel()
		synctest.Wait()
	})
}
