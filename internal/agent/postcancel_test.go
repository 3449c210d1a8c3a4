package agent

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/platform/ec2"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

// commands returns the commands of the hooks that have run, in order.
func (w *world) commands() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := []string{}
	for _, h := range w.ran {
		out = append(out, h.Command)
	}
	return out
}

// TestPostCancel checks that post-cancel runs once, and that this is reported,
// whatever cancels a stop after pre-stop has run, and that it does not run if the
// stop happens.
func TestPostCancel(t *testing.T) {
	both := []string{"save", "load"}
	for name, c := range map[string]struct {
		during func(t *testing.T, w *world, a *Agent) // called while pre-stop runs
		set    func(w *world)
		want   []string
		calls  []string
	}{
		"a stop that happens": {want: []string{"save"}, calls: []string{"stop"}},
		"use":                 {during: func(_ *testing.T, w *world, _ *Agent) { w.with(func() { w.typed = time.Now() }) }, want: both},
		"a snooze": {during: func(t *testing.T, _ *world, a *Agent) {
			_, err := a.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(5 * time.Hour)})
			errtest.None(t, err)
		}, want: both},
		"a halt": {during: func(t *testing.T, _ *world, a *Agent) {
			_, err := a.Halt(t.Context(), agentctl.HaltRequest{On: true})
			errtest.None(t, err)
		}, want: both},
		"a suspend": {during: func(_ *testing.T, w *world, _ *Agent) { w.with(func() { w.slept += time.Hour }) }, want: both},
		"a veto": {set: func(w *world) {
			w.hook = func(h HookSpec) agentctl.Hook {
				if h.Command == "save" {
					return agentctl.Hook{ExitCode: HookVeto}
				}
				return agentctl.Hook{}
			}
		}, want: both},
		"a call that fails and is tried again": {set: func(w *world) { w.stopErr = []error{refusal(ec2.Throttled)} }, want: []string{"save"}, calls: []string{"stop", "stop"}},
		"a call that fails, and then use": {set: func(w *world) { w.stopErr = []error{refusal(ec2.Throttled)} }, during: func(t *testing.T, w *world, _ *Agent) {
			go func() {
				time.Sleep(2 * time.Minute)
				w.with(func() { w.typed = time.Now() })
			}()
		}, want: both, calls: []string{"stop"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.tags["lull:idle-timeout"] = "30m"
			w.config = []byte("pre-stop: save\npost-cancel: load\n")
			if c.set != nil {
				c.set(w)
			}
			bubble(t, w, func(t *testing.T, a *Agent) {
				if c.during != nil {
					w.hook = func(h HookSpec) agentctl.Hook {
						if h.Command == "save" {
							c.during(t, w, a)
						}
						return agentctl.Hook{ExitCode: 3, Output: "line one\nline two\n"}
					}
				}
				time.Sleep(40 * time.Minute)
				synctest.Wait()
				if d := cmp.Diff(c.want, w.commands()); d != "" {
					t.Error("hooks:", d)
				}
				if d := cmp.Diff(append([]string{}, c.calls...), w.sent()); d != "" {
					t.Error("calls:", d)
				}
				s := mustStatus(t, a)
				if len(c.want) == 2 && (s.Last.PostCancel == nil || !strings.Contains(strings.Join(w.ran[1].Env, " "), "LULL_CANCELED=")) {
					t.Errorf("last %+v, env %v", s.Last, w.ran[1].Env)
				}
				if c.during != nil && (s.Last.Hook == nil || s.Last.Hook.Output == "" || !hasAlarm(s, "post_cancel_failed", "line two")) {
					t.Errorf("hook %+v, alarms %+v", s.Last.Hook, s.Alarms)
				}
			})
		})
	}
}

// TestPostCancelWaitsForPreStop checks that if a stop is canceled while pre-stop
// runs, post-cancel runs after pre-stop has ended, and the result of pre-stop is
// kept.
func TestPostCancelWaitsForPreStop(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	w.config = []byte("pre-stop: save\npost-cancel: load\n")
	saving := false
	w.hook = func(h HookSpec) agentctl.Hook {
		if h.Command == "load" {
			if saving {
				t.Error("post-cancel ran beside pre-stop")
			}
			return agentctl.Hook{}
		}
		saving = true
		time.Sleep(3 * time.Minute) // pre-stop does not end when the stop is canceled
		saving = false
		return agentctl.Hook{ExitCode: 3}
	}
	bubble(t, w, func(t *testing.T, a *Agent) {
		for len(w.commands()) == 0 {
			time.Sleep(time.Second)
		}
		_, err := a.Halt(t.Context(), agentctl.HaltRequest{On: true})
		errtest.None(t, err)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"save", "load"}, w.commands()); d != "" {
			t.Error(d)
		}
		if l := mustStatus(t, a).Last; l.Hook == nil || l.Hook.ExitCode != 3 || l.PostCancel == nil {
			t.Errorf("last %+v", l)
		}
	})
}

func hasAlarm(s agentctl.Status, code, part string) bool {
	for _, x := range s.Alarms {
		if x.Code == code && strings.Contains(x.Sentence, part) {
			return true
		}
	}
	return false
}

// TestPostCancelAfterARestart checks that if an agent is killed after pre-stop has
// begun, the next one runs post-cancel, unless the machine was rebooted in between.
func TestPostCancelAfterARestart(t *testing.T) {
	for _, reboot := range []bool{false, true} {
		w := newWorld()
		w.tags["lull:idle-timeout"] = "30m"
		w.config = []byte("pre-stop: save\npost-cancel: load\n")
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			w.hook = func(h HookSpec) agentctl.Hook {
				if h.Command == "save" {
					time.Sleep(time.Minute)
				}
				return agentctl.Hook{}
			}
			w.start(t, ctx)
			for len(w.commands()) == 0 {
				time.Sleep(time.Second)
			}
			cancel()
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			if reboot {
				w.with(func() { w.bootID = "boot-2" })
			}
			ctx, cancel = context.WithCancel(t.Context())
			defer cancel()
			w.start(t, ctx)
			time.Sleep(5 * time.Minute)
			synctest.Wait()
			want := []string{"save", "load"}
			if reboot {
				want = want[:1]
			}
			if d := cmp.Diff(want, w.commands()); d != "" {
				t.Errorf("reboot %t: %s", reboot, d)
			}
			cancel()
			synctest.Wait()
		})
	}
}

// TestPostCancelOfTheServersStop checks that post-cancel runs if the server cancels
// its stop after pre-stop has run, and does not run if the server has sent the stop.
func TestPostCancelOfTheServersStop(t *testing.T) {
	for _, sent := range []bool{false, true} {
		w, to := newWorld(), &ear{}
		w.config = []byte("idle-timeout: 30m\npre-stop: save\npost-cancel: load\npause-holder: controller\n")
		w.tune = func(o *Options) { o.Reporter = to }
		bubble(t, w, func(t *testing.T, a *Agent) {
			order := func(o *control.AgentOrder) { to.mu.Lock(); to.order = o; to.mu.Unlock() }
			order(&control.AgentOrder{Generation: 7, Action: "stop", Reason: "idle_timeout"})
			time.Sleep(5 * time.Minute)
			if sent {
				order(&control.AgentOrder{Generation: 7, Action: "stop", Reason: "idle_timeout", Sent: true})
			} else {
				order(nil)
			}
			time.Sleep(5 * time.Minute)
			synctest.Wait()
			want := []string{"save", "load"}
			if sent {
				want = want[:1]
			}
			if d := cmp.Diff(want, w.commands()); d != "" {
				t.Errorf("sent %t: %s", sent, d)
			}
		})
	}
}

// TestWithdrawal checks that a warning of a stop that does not happen is withdrawn,
// once, everywhere it was delivered, and that the next stop is announced again.
func TestWithdrawal(t *testing.T) {
	for name, cancel := range map[string]func(t *testing.T, w *world, a *Agent){
		"use": func(_ *testing.T, w *world, _ *Agent) { w.with(func() { w.typed = time.Now() }) },
		"a snooze": func(t *testing.T, _ *world, a *Agent) {
			_, err := a.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(2 * time.Hour)})
			errtest.None(t, err)
		},
		"a lease": func(t *testing.T, _ *world, a *Agent) {
			_, err := a.HoldLease(t.Context(), agentctl.LeaseRequest{TTL: idle.Duration(2 * time.Hour)})
			errtest.None(t, err)
		},
		"a halt": func(t *testing.T, _ *world, a *Agent) {
			_, err := a.Halt(t.Context(), agentctl.HaltRequest{On: true})
			errtest.None(t, err)
		},
		"a longer timeout": func(t *testing.T, w *world, a *Agent) {
			w.with(func() { w.tags["lull:idle-timeout"] = "3h" })
			_, err := a.Reload(t.Context())
			errtest.None(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.tags["lull:idle-timeout"] = "30m"
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(26 * time.Minute)
				if n := len(w.warned()); n != 1 {
					t.Fatalf("warned %d times", n)
				}
				w.with(func() { w.withdrawn = nil })
				cancel(t, w, a)
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				w.with(func() {
					if len(w.withdrawn) != 1 || w.withdrawn[0].Warning.Reason != reasonIdle || w.withdrawn[0].Why == "" || len(w.withdrawn[0].Left) > 0 {
						t.Errorf("withdrawn %+v", w.withdrawn)
					}
				})
				_, err := a.Halt(t.Context(), agentctl.HaltRequest{})
				errtest.None(t, err)
				for len(w.sent()) == 0 {
					time.Sleep(time.Second)
				}
				n := w.warned()
				if last := n[len(n)-1]; len(n) != 2 || time.Now().Before(last.At) {
					t.Errorf("stopped after warnings %+v", n)
				}
			})
		})
	}
}

// TestMomentOfUnknown checks that a signal that is unknown in a single check neither
// withdraws a warning nor lets a stop happen without one.
func TestMomentOfUnknown(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"] = "30m"
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(26 * time.Minute)
		w.with(func() { w.withdrawn = nil; w.broken["disk"] = true })
		time.Sleep(time.Minute)
		w.with(func() { w.broken["disk"] = false })
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"stop"}, w.sent()); d != "" || len(w.warned()) != 1 || len(w.withdrawn) > 0 {
			t.Errorf("%s, %d warnings, withdrawn %+v", d, len(w.warned()), w.withdrawn)
		}
	})
}

// TestWarningFile checks that the warning file exists exactly while a warning is
// pending.
func TestWarningFile(t *testing.T) {
	dir := t.TempDir()
	p := UserWarner{File: filepath.Join(dir, "warning"), Own: newWorld().own, Host: "h"}
	one := Warning{Reason: reasonIdle, Action: "stop", At: time.Now(), Sentence: "It is idle."}
	two := Warning{Reason: reasonTTL, Action: "stop", At: time.Now().Add(time.Hour)}
	errtest.None(t, p.Warn(t.Context(), one))
	errtest.None(t, p.Withdraw(t.Context(), Withdrawal{Warning: one, Why: "snoozed", Left: []Warning{two}}))
	b, err := os.ReadFile(p.File)
	errtest.None(t, err)
	var left Warning
	if errtest.None(t, json.Unmarshal(b, &left)); left.Reason != reasonTTL {
		t.Errorf("the file says %s", b)
	}
	for range 2 {
		errtest.None(t, p.Withdraw(t.Context(), Withdrawal{}))
		if _, err := os.Stat(p.File); !os.IsNotExist(err) {
			t.Errorf("the file is still there: %v", err)
		}
	}
}

// TestIngFormIsTheAction checks that the tag before an action names the action that
// is taken, even if the instance cannot hibernate or EC2 refuses to hibernate it.
func TestIngFormIsTheAction(t *testing.T) {
	for name, set := range map[string]func(w *world){
		"not launched for hibernation": func(w *world) { w.hibernate = false },
		"refused by EC2":               func(w *world) { w.stopErr = []error{refusal(ec2.HibernateUnsupported)} },
	} {
		for _, reason := range []string{"idle", "completion"} {
			t.Run(name+" "+reason, func(t *testing.T) {
				w := newWorld()
				if reason == "idle" {
					w.tags["lull:idle-timeout"], w.tags["lull:hibernate-on-idle"] = "30m", "true"
				} else {
					w.tags["lull:on-complete"] = "hibernate"
				}
				set(w)
				bubble(t, w, func(t *testing.T, a *Agent) {
					if reason == "completion" {
						_, err := a.Complete(t.Context(), agentctl.CompleteRequest{})
						errtest.None(t, err)
					}
					for len(w.sent()) == 0 {
						time.Sleep(time.Second)
					}
					time.Sleep(time.Second)
					synctest.Wait()
					if got := w.tag("idle-action"); got != "stopping" {
						t.Errorf("the tag says %q, calls %v", got, w.sent())
					}
					if s := mustStatus(t, a); s.Last.Action != actionStop || s.Last.Detail == "" {
						t.Errorf("last %+v", s.Last)
					}
					w.with(func() {
						for _, x := range w.writes {
							if name[0] == 'n' && x["lull:idle-action"] == "hibernating" {
								t.Errorf("it was announced as hibernating: %v", w.writes)
							}
						}
					})
				})
			})
		}
	}
}
