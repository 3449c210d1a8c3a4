package servertest

import (
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/agentctl"
)

// TestWhoStops checks who stops an idle machine, in every combination of holder and
// sources, with the agent's clock right or hours wrong.
func TestWhoStops(t *testing.T) {
	for _, sources := range [][]string{{"agent"}, {"cml", "agent"}, {"cml"}} {
		for _, holder := range []string{worker.HolderController, worker.HolderAgent} {
			for _, skew := range []time.Duration{0, 3 * time.Hour, -3 * time.Hour} {
				t.Run(strings.Join(sources, "+")+" "+holder+" "+skew.String(), func(t *testing.T) {
					run(t, options{holder: holder, sources: sources, skew: skew}, func(r *rig) {
						by := audit.ByController.Name
						if holder == worker.HolderAgent {
							by = worker.HolderAgent
						}
						took := r.until("the stop", 90*time.Minute, r.stopped)
						r.acted(by)
						if len(r.warned) != 1 {
							t.Errorf("users were warned %d times", len(r.warned))
						}
						if least := map[string]time.Duration{worker.HolderController: 25 * time.Minute, worker.HolderAgent: 19 * time.Minute}[holder]; took < least {
							t.Errorf("stopped after %s, the timeout is longer", took)
						}
						if holder == worker.HolderAgent && r.tag("idle-action") != "stopped" {
							t.Errorf("the state tag is %q", r.tag("idle-action"))
						}
						if l, ok := r.ctl.Live(r.w); !ok || l.Agent == nil || l.Agent.Report.Version != "v1.1.0" {
							t.Errorf("the server does not show the agent: %+v", l.Agent)
						}
					})
				})
			}
		}
	}
}

// TestUseHolds checks that use of each listed source keeps the machine running, that
// it is stopped when the use ends, and that use of a source that is not listed has no
// effect.
func TestUseHolds(t *testing.T) {
	for _, skew := range []time.Duration{0, 3 * time.Hour, -3 * time.Hour} {
		t.Run("agent "+skew.String(), func(t *testing.T) {
			run(t, options{holder: worker.HolderController, sources: []string{"cml", "agent"}, skew: skew}, func(r *rig) {
				r.with(func() { r.busy["cpu"] = true })
				r.stays(2 * time.Hour)
				if s := r.idle(); !s.Has(idle.RecentActivity) && !s.Has(idle.NotIdleYet) {
					t.Errorf("blocks %+v", s.Blocks)
				}
				if w := r.worker(); w.LastActivityAt == nil || time.Since(*w.LastActivityAt) > 10*time.Minute || w.LastActivityAt.After(time.Now()) {
					t.Errorf("last activity at %v, it is %v", w.LastActivityAt, time.Now())
				}
				if !slices.ContainsFunc(r.idle().Readings, func(x idle.Reading) bool { return x.Signal == "agent:cpu" && x.State == idle.Active }) {
					t.Errorf("the agent's signals are not shown: %+v", r.idle().Readings)
				}
				r.with(func() { r.busy["cpu"] = false })
				if took := r.until("the stop", time.Hour, r.stopped); took < 25*time.Minute {
					t.Errorf("stopped %s after the use ended", took)
				}
				r.acted(audit.ByController.Name)
			})
		})
	}
	t.Run("cml", func(t *testing.T) {
		run(t, options{holder: worker.HolderController, sources: []string{"cml", "agent"}}, func(r *rig) {
			r.with(func() { r.used = true })
			r.stays(2 * time.Hour)
			r.with(func() { r.used = false })
			r.until("the stop", time.Hour, r.stopped)
		})
	})
	t.Run("not listed", func(t *testing.T) {
		run(t, options{holder: worker.HolderController, sources: []string{"cml"}}, func(r *rig) {
			r.with(func() { r.busy["cpu"] = true })
			r.until("the stop", time.Hour, r.stopped)
		})
	})
}

// TestUnknownHolds checks that the machine keeps running while the agent's state is
// unknown: with an unreadable signal, without an agent, and while the server cannot
// be reached.
func TestUnknownHolds(t *testing.T) {
	for name, trouble := range map[string]struct{ on, off func(r *rig) }{
		"a signal":      {func(r *rig) { r.broken["cpu"] = true }, func(r *rig) { r.broken["cpu"] = false }},
		"the server":    {func(r *rig) { r.cut = true }, func(r *rig) { r.cut = false }},
		"CML, a second": {func(r *rig) { r.cml.Unknown = "unreachable" }, func(r *rig) { r.cml.Unknown = "" }},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, options{holder: worker.HolderController, sources: []string{"cml", "agent"}}, func(r *rig) {
				r.wait(10 * time.Minute)
				r.with(func() { trouble.on(r) })
				r.stays(2 * time.Hour)
				if s := r.idle(); !s.Has(idle.SignalUnknown) {
					t.Errorf("blocks %+v", s.Blocks)
				}
				r.with(func() { trouble.off(r) })
				r.until("the stop", 90*time.Minute, r.stopped)
				r.acted(audit.ByController.Name)
			})
		})
	}
	t.Run("the agent", func(t *testing.T) {
		run(t, options{holder: worker.HolderController, sources: []string{"agent"}}, func(r *rig) {
			r.wait(10 * time.Minute)
			r.with(func() { r.cut = true }) // from now on, the agent stays unreachable
			r.stays(6 * time.Hour)
		})
	})
}

// TestLostServer checks that losing its server makes no agent act: neither one that
// only reports, nor one that decides, because it cannot read whether the server's
// record forbids the action.
func TestLostServer(t *testing.T) {
	for _, holder := range []string{worker.HolderController, worker.HolderAgent} {
		t.Run(holder, func(t *testing.T) {
			run(t, options{holder: holder, sources: []string{"agent"}}, func(r *rig) {
				r.wait(5 * time.Minute)
				r.with(func() { r.cut = true })
				r.stays(6 * time.Hour)
				if !slices.ContainsFunc(r.status().Alarms, func(a agentctl.Alarm) bool { return a.Code == "server_unreachable" }) {
					t.Errorf("no alarm: %+v", r.status().Alarms)
				}
				if l := r.status().Server; l.Holder != holder || l.Error == "" {
					t.Errorf("the link says %+v", l)
				}
				r.with(func() { r.cut = false })
				r.until("the stop", 3*time.Hour, r.stopped)
			})
		})
	}
	t.Run("never heard", func(t *testing.T) {
		run(t, options{holder: worker.HolderAgent, sources: []string{"agent"}, unknown: true}, func(r *rig) {
			// If the server knows no such worker, the agent decides.
			r.wait(19 * time.Minute)
			if len(r.calls) != 0 {
				t.Errorf("the agent called %v before the timeout", r.calls)
			}
			r.wait(5 * time.Minute)
			if len(r.calls) != 1 {
				t.Errorf("the agent called %v: %+v", r.calls, r.status().Verdict.Blocks)
			}
		})
	})
}

// TestHolds checks that everything by which users keep a machine running, on the
// machine or on the server, holds both the agent and the controller.
func TestHolds(t *testing.T) {
	for _, holder := range []string{worker.HolderController, worker.HolderAgent} {
		for name, c := range map[string]struct {
			on, off func(r *rig)
			code    idle.Code // code of the server's block if the controller decides
		}{
			"agent snooze": {
				func(r *rig) {
					errtest.Get(r.agent.Snooze(r.t.Context(), agentctl.SnoozeRequest{For: idle.Duration(5 * time.Hour)}))(r.t)
				},
				func(r *rig) { errtest.Get(r.agent.Snooze(r.t.Context(), agentctl.SnoozeRequest{}))(r.t) }, idle.InSnoozePeriod},
			"agent lease": {
				func(r *rig) {
					errtest.Get(r.agent.HoldLease(r.t.Context(), agentctl.LeaseRequest{Holder: "job", TTL: idle.Duration(20 * time.Hour)}))(r.t)
				},
				func(r *rig) {
					if err := r.agent.ReleaseLease(r.t.Context(), "job"); err != nil {
						r.t.Error(err)
					}
				}, idle.LeaseHeld},
			"agent halt": {
				func(r *rig) { errtest.Get(r.agent.Halt(r.t.Context(), agentctl.HaltRequest{On: true}))(r.t) },
				func(r *rig) { errtest.Get(r.agent.Halt(r.t.Context(), agentctl.HaltRequest{}))(r.t) }, "halted"},
			"fleet halt": {
				func(r *rig) { errtest.Get(r.fleet.SetHalt(r.t.Context(), operator, halt.Request{On: true}))(r.t) },
				func(r *rig) { errtest.Get(r.fleet.SetHalt(r.t.Context(), operator, halt.Request{}))(r.t) }, ""},
			"worker snooze": {
				func(r *rig) {
					errtest.Get(r.fleet.SnoozeWorker(r.t.Context(), operator, r.w, time.Now().Add(5*time.Hour)))(r.t)
				},
				func(r *rig) { errtest.Get(r.fleet.SnoozeWorker(r.t.Context(), operator, r.w, time.Time{}))(r.t) }, idle.InSnoozePeriod},
			"detection off": {
				func(r *rig) { errtest.Get(r.fleet.SetIdleDetection(r.t.Context(), operator, r.w, false))(r.t) },
				func(r *rig) { errtest.Get(r.fleet.SetIdleDetection(r.t.Context(), operator, r.w, true))(r.t) }, idle.DetectionDisabled},
			"not armed": {
				func(r *rig) { errtest.Get(r.fleet.ArmWorker(r.t.Context(), operator, r.w, false))(r.t) },
				func(r *rig) { errtest.Get(r.fleet.ArmWorker(r.t.Context(), operator, r.w, true))(r.t) }, idle.Shadow},
		} {
			t.Run(holder+" "+name, func(t *testing.T) {
				run(t, options{holder: holder, sources: []string{"agent"}}, func(r *rig) {
					r.wait(12 * time.Minute)
					c.on(r)
					r.stays(90 * time.Minute)
					if holder == worker.HolderController && c.code != "" && !r.idle().Has(c.code) {
						t.Errorf("the server blocks by %+v, want %s", r.idle().Blocks, c.code)
					}
					c.off(r)
					r.until("the stop", 2*time.Hour, r.stopped)
				})
			})
		}
	}
}

// TestFloorHoldsTheAgent checks that the fleet's floor also holds an agent that
// decides.
func TestFloorHoldsTheAgent(t *testing.T) {
	run(t, options{holder: worker.HolderAgent, sources: []string{"agent"}, settings: map[string]any{"min_workers": 1}}, func(r *rig) {
		r.stays(2 * time.Hour)
		if l := r.status().Last; l == nil || !strings.Contains(l.Detail, "min_workers") {
			t.Errorf("the agent was told %+v", l)
		}
		if n := r.worker().AutoPauseCount; n != 0 {
			t.Errorf("%d pauses were counted", n)
		}
	})
}

func slowly() agentctl.Hook { pass(8 * time.Minute); return agentctl.Hook{} }

const hooked = "pre-stop: /bin/true\npre-stop-timeout: 10m\n"

// TestHookWhenAsked checks that the controller has the agent run its hook before
// every stop, but not before a termination, and that a veto cancels only idle stops.
func TestHookWhenAsked(t *testing.T) {
	stop := func(r *rig) {
		if _, err := r.fleet.StopWorker(r.t.Context(), operator, r.w); err != nil {
			r.t.Error(err)
		}
	}
	veto := func() agentctl.Hook { return agentctl.Hook{ExitCode: 100} }
	for name, c := range map[string]struct {
		sources []string
		hook    func() agentctl.Hook
		do      func(r *rig)
		stops   bool
		reason  power.Reason
	}{
		"idle":                   {[]string{"agent"}, nil, nil, true, power.ReasonIdleTimeout},
		"idle by CML alone":      {[]string{"cml"}, nil, nil, true, power.ReasonIdleTimeout},
		"a user":                 {[]string{"agent"}, nil, stop, true, power.ReasonManual},
		"a user, vetoed":         {[]string{"agent"}, veto, stop, true, power.ReasonManual},
		"idle, vetoed":           {[]string{"agent"}, veto, nil, false, ""},
		"idle by CML, vetoed":    {[]string{"cml"}, veto, nil, false, ""},
		"idle, the hook is slow": {[]string{"agent"}, slowly, nil, true, power.ReasonIdleTimeout},
		"idle, the hook fails":   {[]string{"agent"}, func() agentctl.Hook { return agentctl.Hook{ExitCode: 3} }, nil, true, power.ReasonIdleTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, options{holder: worker.HolderController, sources: c.sources, config: hooked}, func(r *rig) {
				r.with(func() { r.hook = c.hook })
				r.wait(5 * time.Minute)
				if c.do != nil {
					c.do(r)
				}
				if !c.stops {
					r.wait(70 * time.Minute)
					if w := r.worker(); w.Status != power.WorkerRunning || len(r.stops)+len(r.calls) != 0 || !r.audited("pause_cancelled") {
						t.Errorf("the veto did not hold: %s", r.say())
					}
					if !r.idle().Has(idle.HookVeto) {
						t.Errorf("the server's blocks are %+v", r.idle().Blocks)
					}
				} else {
					r.until("the stop", 2*time.Hour, r.stopped)
					if w := r.worker(); w.PauseReason != c.reason || len(r.calls) != 0 || len(r.stops) != 1 {
						t.Errorf("stopped wrongly: %s", r.say())
					}
				}
				if len(r.hooks) == 0 || c.stops && len(r.hooks) != 1 {
					t.Errorf("the hook ran %d times: %v", len(r.hooks), r.hooks)
				}
			})
		})
	}
	t.Run("an agent that is gone delays nothing", func(t *testing.T) {
		run(t, options{holder: worker.HolderController, sources: []string{"cml"}, config: hooked}, func(r *rig) {
			r.with(func() { r.cut = true })
			r.wait(10 * time.Minute)
			stop(r)
			if took := r.until("the stop", time.Hour, r.stopped); took > 5*time.Minute || len(r.hooks) != 0 {
				t.Errorf("it took %s and %d hooks", took, len(r.hooks))
			}
		})
	})
}

// TestUseAtTheLastMoment checks that a stop is canceled if use begins while the stop
// is in progress.
func TestUseAtTheLastMoment(t *testing.T) {
	for _, holder := range []string{worker.HolderController, worker.HolderAgent} {
		t.Run(holder, func(t *testing.T) {
			run(t, options{holder: holder, sources: []string{"agent"}, config: hooked}, func(r *rig) {
				used := false
				r.with(func() {
					r.hook = func() agentctl.Hook {
						// The hook's own work does not count as use. Work that
						// continues after the hook does.
						r.with(func() { r.busy["cpu"], used = true, true })
						return agentctl.Hook{}
					}
				})
				r.until("the hook", 2*time.Hour, func() bool { r.mu.Lock(); defer r.mu.Unlock(); return used })
				r.stays(time.Hour)
				w := r.worker()
				if w.DesiredStatus != power.WorkerRunning || w.Intent != nil || !r.audited("pause_cancelled") {
					t.Errorf("not called off: %s", r.say())
				}
				r.with(func() { r.busy["cpu"], r.hook = false, nil })
				r.until("the stop", 2*time.Hour, r.stopped)
			})
		})
	}
}

// TestHolderChanges changes the holder while the machine is idle, and checks that
// exactly one of agent and controller stops it.
func TestHolderChanges(t *testing.T) {
	for _, to := range []string{worker.HolderController, worker.HolderAgent} {
		for minute := 16; minute <= 36; minute += 2 {
			from := worker.HolderAgent
			if to == worker.HolderAgent {
				from = worker.HolderController
			}
			t.Run(to, func(t *testing.T) {
				run(t, options{holder: from, sources: []string{"agent"}}, func(r *rig) {
					r.wait(time.Duration(minute) * time.Minute)
					errtest.Get(r.fleet.UpdateWorker(r.t.Context(), operator, r.w, 0, worker.Profile{PauseHolder: &to}))(r.t)
					r.until("the stop", 2*time.Hour, r.stopped)
					w := r.worker()
					intents := int64(1)
					if r.audited("pause_cancelled") {
						intents = 2 // one by each holder
					}
					if w.AutoPauseCount != intents || w.ExternalPauseCount != 0 || w.PauseReason != power.ReasonIdleTimeout || len(r.calls)+len(r.stops) != 1 {
						t.Errorf("changed at minute %d: %s", minute, r.say())
					}
				})
			})
		}
	}
}

// TestPersonResumesAgainstTheAgent checks that if a user withdraws an agent's intent,
// the agent is refused and the machine keeps running.
func TestPersonResumesAgainstTheAgent(t *testing.T) {
	run(t, options{holder: worker.HolderAgent, sources: []string{"agent"}, config: hooked}, func(r *rig) {
		r.with(func() {
			r.hook = func() agentctl.Hook {
				if _, err := r.fleet.ResumeWorker(r.t.Context(), operator, r.w); err != nil {
					r.t.Error(err)
				}
				return agentctl.Hook{}
			}
		})
		r.until("the hook", 2*time.Hour, func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.hooks) == 1 })
		r.stays(5 * time.Minute)
		if l := r.status().Last; l == nil || l.Phase != "cancelled" || !strings.Contains(l.Detail, "refuses") {
			t.Errorf("the agent: %+v", l)
		}
	})
}
