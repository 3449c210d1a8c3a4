package host

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
)

var errWorld = errors.New("input/output error")

// asleep runs an instance until it has reached the given step of the ladder.
func (r *rig) asleep(name string, step power.Instance) (id string) {
	r.t.Helper()
	change := deep
	if !r.k.Deep {
		change = func(s *instance.Spec) { s.ReclaimAfter = idle.Duration(time.Minute) }
	}
	id = r.run(name, change)
	time.Sleep(map[power.Instance]time.Duration{power.Paused: 62 * time.Second, power.Reclaimed: 3 * time.Minute, power.Hibernated: 8 * time.Minute}[step])
	r.is(name, step)
	return id
}

// TestAskedWhileThawing checks that a request made during a wake is carried out
// after it, from every sleeping state and at every point of the wake.
func TestAskedWhileThawing(t *testing.T) {
	commands := []struct {
		name string
		do   func(r *rig) error
		want power.Instance
	}{
		{"stop", func(r *rig) error { return r.Stop(context.Background(), "a", ByManual, false) }, power.Stopped},
		{"stop and disable", func(r *rig) error { return r.Stop(context.Background(), "a", ByManual, true) }, power.Stopped},
		{"pause by force", func(r *rig) error { return r.Pause(context.Background(), "a", ByManual, true) }, power.Paused},
		{"resume", func(r *rig) error { return r.Resume(context.Background(), "a", ByManual) }, power.Running},
		{"start", func(r *rig) error { return r.Start(context.Background(), "a", ByManual) }, power.Running},
		{"remove", func(r *rig) error { return r.Delete(context.Background(), "a", ByManual) }, ""},
	}
	for _, step := range []power.Instance{power.Paused, power.Reclaimed, power.Hibernated} {
		for _, at := range []string{"disarm", "thaw", "publish"} {
			for _, c := range commands {
				t.Run(string(step)+"/"+at+"/"+c.name, func(t *testing.T) {
					inBubble(t, func(r *rig) {
						r.k.Deep, r.k.Restore = true, 3*time.Second
						id := r.asleep("a", step)
						asked := make(chan error, 1)
						once := false
						r.at = func(point string, _ *inst) {
							if point == at && !once {
								once = true
								go func() { asked <- c.do(r) }()
								time.Sleep(time.Second) // the request is in the queue now
							}
						}
						client := r.k.Connect(id)
						if err := <-asked; err != nil {
							t.Errorf("it was not done: %v", err)
						}
						synctest.Wait()
						if c.want == "" {
							if _, err := r.Get("a"); err == nil {
								t.Error("it is still there")
							}
							return
						}
						o := r.is("a", c.want)
						if c.want == power.Stopped && (o.ExitCode == nil || *o.ExitCode != 143) {
							t.Errorf("it was not asked to end: exit code %v", o.ExitCode)
						}
						if c.want == power.Running && client.Outcome() != "answered" {
							t.Errorf("the client that woke it is %s", client.Outcome())
						}
					})
				})
			}
		}
	}
}

// TestAnsweredIsNotPaused checks that an instance is not called paused any more when
// its program is about to be thawed for a client: the client may have its answer
// before anything is recorded.
func TestAnsweredIsNotPaused(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.asleep("a", power.Paused)
		var states []string
		r.at = func(point string, _ *inst) {
			if point == "thaw" {
				o := errtest.Get(r.Get("a"))(t)
				states = append(states, o.State)
			}
		}
		client := r.k.Connect(id)
		synctest.Wait()
		if want := []string{string(power.Resuming)}; !slices.Equal(states, want) || client.Outcome() != "answered" {
			t.Errorf("it is %v when it is thawed, want %v; the client is %s", states, want, client.Outcome())
		}
		r.is("a", power.Running)
	})
}

// TestThawFails checks that a thaw that fails is repeated until it succeeds,
// whatever caused it, and that every waiting client is served.
func TestThawFails(t *testing.T) {
	for name, ask := range map[string]func(r *rig, id string){
		"client": func(r *rig, id string) {},
		"resume": func(r *rig, id string) {
			if err := r.Resume(context.Background(), id, ByManual); err == nil {
				r.t.Error("resumed, it says")
			}
		},
		"start": func(r *rig, id string) {
			if err := r.Start(context.Background(), id, ByManual); err == nil {
				r.t.Error("started, it says")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				id := r.asleep("a", power.Paused)
				r.k.Fail(hosttest.Thawing, errWorld)
				ask(r, id)
				c := r.k.Connect(id)
				time.Sleep(10 * time.Second)
				o := r.is("a", power.Resuming)
				if !strings.Contains(o.StatusReason, errWorld.Error()) {
					t.Errorf("its reason is %q", o.StatusReason)
				}
				r.k.Fail(hosttest.Thawing, nil)
				time.Sleep(2 * time.Second)
				o = r.is("a", power.Running)
				if c.Outcome() != "answered" || o.WakeCount != 1 || o.LastResumedBy == "" {
					t.Errorf("the client is %s; %d wakes, the last by %q", c.Outcome(), o.WakeCount, o.LastResumedBy)
				}
				seen, _, _ := r.events.Since(0)
				if n := len(seen); seen[n-1].Type != "resumed" {
					t.Errorf("the last event is %+v", seen[n-1])
				}
			})
		})
	}
}

// TestStopCalledOffThawFails checks that a client that cancels an automatic stop is
// served even if the program could not be thawed at first.
func TestStopCalledOffThawFails(t *testing.T) {
	inBubble(t, func(r *rig) {
		came := make(chan *hosttest.Client, 1)
		var once sync.Once
		r.at = func(point string, i *inst) {
			if point == "stop-look" {
				once.Do(func() {
					r.k.Fail(hosttest.Thawing, errWorld)
					came <- r.k.Connect(i.id)
				})
			}
		}
		r.asleep("a", power.Paused)
		c := <-came
		time.Sleep(10 * time.Second)
		r.k.Fail(hosttest.Thawing, nil)
		time.Sleep(30 * time.Second)
		r.is("a", power.Running)
		if n := r.k.Starts(); n != 1 || c.Outcome() != "answered" {
			t.Errorf("%d starts, and the client is %s", n, c.Outcome())
		}
	})
}

// TestAskedAfterFailure checks that the next request completes a transition that
// failed halfway. A stop succeeds even if the program can be neither thawed nor
// asked to exit. A pause or resume succeeds if it is possible.
func TestAskedAfterFailure(t *testing.T) {
	halfway := map[power.Instance]func(r *rig) (id string){
		power.Resuming: func(r *rig) string {
			id := r.asleep("a", power.Paused)
			r.k.Fail(hosttest.Thawing, errWorld)
			r.k.Connect(id)
			return id
		},
		power.Pausing: func(r *rig) string {
			id := r.run("a", nil)
			r.k.Connect(id)
			r.k.Fail(hosttest.Thawing, errWorld)
			if err := r.Pause(context.Background(), "a", ByManual, false); err == nil {
				r.t.Error("it was paused under a client")
			}
			return id
		},
	}
	for state, begin := range halfway {
		for _, heals := range []bool{false, true} {
			t.Run(string(state)+map[bool]string{true: " that heals"}[heals], func(t *testing.T) {
				inBubble(t, func(r *rig) {
					begin(r)
					r.is("a", state)
					if heals {
						r.k.Fail(hosttest.Thawing, nil)
					}
					if err := r.Stop(context.Background(), "a", ByManual, false); err != nil {
						t.Errorf("stop: %v", err)
					}
					o := r.is("a", power.Stopped)
					want := map[bool]int{false: 137, true: 143}[heals]
					if o.ExitCode == nil || *o.ExitCode != want {
						t.Errorf("it ended with %v (%s), want %d", o.ExitCode, o.StatusReason, want)
					}
				})
			})
			if !heals {
				continue
			}
			for _, verb := range []string{"pause", "resume", "start"} {
				t.Run(string(state)+" that heals, then "+verb, func(t *testing.T) {
					inBubble(t, func(r *rig) {
						begin(r)
						r.is("a", state)
						r.k.Fail(hosttest.Thawing, nil)
						var err error
						want := power.Running
						switch verb {
						case "pause":
							err, want = r.Pause(context.Background(), "a", ByManual, true), power.Paused
						case "resume":
							err = r.Resume(context.Background(), "a", ByManual)
						case "start":
							err = r.Start(context.Background(), "a", ByManual)
						}
						if err != nil {
							t.Errorf("%s: %v", verb, err)
						}
						r.is("a", want)
					})
				})
			}
		}
	}
}

// TestStopCannotAsk checks that a program that cannot be asked to exit is
// killed.
func TestStopCannotAsk(t *testing.T) {
	for _, state := range []power.Instance{power.Running, power.Paused} {
		for _, fault := range []hosttest.Fault{hosttest.Signals, hosttest.Thawing} {
			t.Run(string(state)+"/"+string(fault), func(t *testing.T) {
				inBubble(t, func(r *rig) {
					if state == power.Running {
						r.run("a", nil)
					} else {
						r.asleep("a", state)
					}
					r.k.Fail(fault, errWorld)
					if err := r.Stop(context.Background(), "a", ByManual, false); err != nil {
						t.Errorf("stop: %v", err)
					}
					o := r.is("a", power.Stopped)
					if fault == hosttest.Signals && !strings.Contains(o.StatusReason, errWorld.Error()) {
						t.Errorf("its reason is %q", o.StatusReason)
					}
				})
			})
		}
	}
}

// TestStopWithoutRoom checks that a user can stop a hibernated guest that needs
// more memory than the host's whole budget.
func TestStopWithoutRoom(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		r.run("a", func(s *instance.Spec) { deep(s); s.Memory = 4 * instance.MinMemory })
		time.Sleep(8 * time.Minute)
		r.is("a", power.Hibernated)
		r.shut()
		r.tune = func(c *Config) { c.Memory = instance.MinMemory }
		r.boot()
		r.is("a", power.Hibernated)
		if err := r.Stop(context.Background(), "a", ByManual, false); err != nil {
			t.Errorf("stop: %v", err)
		}
		r.is("a", power.Stopped)
	})
}

// TestAdoptAgain checks that every failure during adoption is retried, and that no
// client waits longer than the failure lasts.
func TestAdoptAgain(t *testing.T) {
	before := map[string]func(r *rig) string{
		"running": func(r *rig) string { return r.run("a", nil) },
		"paused":  func(r *rig) string { return r.asleep("a", power.Paused) },
		"pausing": func(r *rig) string {
			id := r.run("a", nil)
			r.at = func(point string, _ *inst) {
				if point == "commit" {
					r.daemon.Dead.Store(true)
				}
			}
			_ = r.Pause(context.Background(), "a", ByManual, true)
			return id
		},
	}
	for state, begin := range before {
		for _, fault := range []hosttest.Fault{hosttest.Thawing, hosttest.Stillness, hosttest.Listening, hosttest.Freezing, hosttest.Signals} {
			t.Run(state+"/"+string(fault), func(t *testing.T) {
				inBubble(t, func(r *rig) {
					id := begin(r)
					r.crash()
					if err := r.k.Proc(id).Freeze(context.Background()); err != nil && state != "running" {
						t.Fatal(err)
					}
					r.k.Fail(fault, errWorld)
					r.bootFaulty()
					c := r.k.Connect(id)
					time.Sleep(5 * time.Second)
					r.k.Fail(fault, nil)
					time.Sleep(3 * time.Second)
					synctest.Wait()
					if got := c.Outcome(); got != "answered" {
						o, err := r.Get("a")
						t.Errorf("the client is %s; it is %s (%s), %v", got, o.State, o.StatusReason, err)
					}
					r.is("a", power.Running)
					c.Close()
					time.Sleep(70 * time.Second)
					r.is("a", power.Paused)
				})
			})
		}
	}
}

// TestStoppingAdopted checks that the next daemon completes a stop during which a
// daemon died, even if the program cannot be asked to exit or thawed at first.
func TestStoppingAdopted(t *testing.T) {
	for _, fault := range []hosttest.Fault{"", hosttest.Signals, hosttest.Thawing} {
		t.Run(string(fault), func(t *testing.T) {
			inBubble(t, func(r *rig) {
				id := r.asleep("a", power.Paused)
				r.at = func(point string, _ *inst) {
					if point == "stop-signal" {
						r.daemon.Dead.Store(true)
					}
				}
				_ = r.Stop(context.Background(), "a", ByManual, false)
				rec := r.disk.All()[0]
				if rec.State != power.Stopping {
					t.Fatalf("its record says %s", rec.State)
				}
				_ = id
				r.crash()
				r.k.Fail(fault, errWorld)
				r.bootFaulty()
				time.Sleep(30 * time.Second)
				r.is("a", power.Stopped)
			})
		})
	}
}

// TestLeaseOverCrash checks that an acknowledged lease survives a restart of
// the exited program, and is dropped if nothing restarts it.
func TestLeaseOverCrash(t *testing.T) {
	for _, rule := range []instance.Restart{instance.RestartNo, instance.RestartOnFailure} {
		for _, away := range []bool{false, true} {
			t.Run(string(rule)+map[bool]string{true: " while the daemon was away"}[away], func(t *testing.T) {
				inBubble(t, func(r *rig) {
					id := r.run("a", func(s *instance.Spec) { s.Restart = rule })
					time.Sleep(20 * time.Second) // long enough not to be a crash loop
					errtest.None(t, r.Hold(context.Background(), "a", idle.Lease{Holder: "build"}, time.Hour))
					p := r.k.Proc(id)
					if away {
						r.crash()
						p.Exit(1)
						r.boot()
					} else {
						p.Exit(1)
					}
					time.Sleep(5 * time.Second)
					synctest.Wait()
					o, err := r.Get("a")
					errtest.None(t, err)
					if want := rule != instance.RestartNo; o.LeaseHeld != want || (o.State == "running") != want {
						t.Errorf("it is %s, lease held: %t, want %t", o.State, o.LeaseHeld, want)
					}
					if o.LeaseHeld && !slices.ContainsFunc(o.Leases, func(l idle.Lease) bool { return l.Holder == "build" }) {
						t.Errorf("leases %+v", o.Leases)
					}
				})
			})
		}
	}
}

// TestDetached checks that a request continues after its caller has stopped
// waiting.
func TestDetached(t *testing.T) {
	t.Run("start", func(t *testing.T) {
		inBubble(t, func(r *rig) {
			id, err := r.Create(context.Background(), instance.Spec{Name: "a", Command: []string{"x"},
				Expose: []instance.Endpoint{{Listen: "127.0.0.1:80", Target: "127.0.0.1:80"}}})
			if err != nil {
				t.Fatal(err)
			}
			r.k.Fail(hosttest.Listening, errWorld) // so that the program is not ready yet
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(time.Second, cancel)
			if err := r.Complete(ctx, func(ctx context.Context) error { return r.Start(ctx, id, ByManual) }); !errors.Is(err, context.Canceled) {
				t.Errorf("who did not wait was told: %v", err)
			}
			r.is("a", power.Starting)
			r.k.Fail(hosttest.Listening, nil)
			time.Sleep(time.Second)
			r.is("a", power.Running)
			if n := r.k.Starts(); n != 1 {
				t.Errorf("%d starts", n)
			}
		})
	})
	t.Run("stop", func(t *testing.T) {
		inBubble(t, func(r *rig) {
			r.k.Stubborn = true
			r.run("a", nil)
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(time.Second, cancel)
			if err := r.Complete(ctx, func(ctx context.Context) error { return r.Stop(ctx, "a", ByManual, false) }); !errors.Is(err, context.Canceled) {
				t.Errorf("who did not wait was told: %v", err)
			}
			time.Sleep(20 * time.Second)
			r.is("a", power.Stopped)
		})
	})
	t.Run("pause", func(t *testing.T) {
		inBubble(t, func(r *rig) {
			r.disk.On = func(rec *instance.Record) {
				if rec.State == power.Pausing {
					time.Sleep(time.Minute)
				}
			}
			id := r.run("a", nil)
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(time.Second, cancel)
			if err := r.Complete(ctx, func(ctx context.Context) error { return r.Pause(ctx, "a", ByManual, true) }); !errors.Is(err, context.Canceled) {
				t.Errorf("who did not wait was told: %v", err)
			}
			c := r.k.Connect(id)
			time.Sleep(2 * time.Minute)
			r.is("a", power.Paused)
			c.Send()
			r.is("a", power.Running)
		})
	})
	t.Run("stop in the queue", func(t *testing.T) {
		inBubble(t, func(r *rig) {
			r.k.Deep, r.k.Restore = true, 10*time.Second
			id := r.asleep("a", power.Hibernated)
			r.k.Connect(id)
			synctest.Wait()
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(time.Second, cancel)
			if err := r.Complete(ctx, func(ctx context.Context) error { return r.Stop(ctx, "a", ByManual, false) }); !errors.Is(err, context.Canceled) {
				t.Errorf("who did not wait was told: %v", err)
			}
			time.Sleep(20 * time.Second)
			r.is("a", power.Stopped)
		})
	})
}

// TestReleaseLetsSink checks that releasing a paused instance's lease resumes
// the ladder at once, not when the lease would have expired.
func TestReleaseLetsSink(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.run("a", nil)
		time.Sleep(62 * time.Second)
		r.is("a", power.Paused)
		errtest.None(t, r.Hold(context.Background(), "a", idle.Lease{Holder: "x"}, 20*time.Hour))
		time.Sleep(10 * time.Minute)
		r.is("a", power.Paused)
		errtest.None(t, r.ReleaseLease(context.Background(), "a", "x"))
		time.Sleep(time.Minute)
		r.is("a", power.Stopped)
	})
}

// TestEndThawsHalfway checks that a host leaves nothing frozen when it ends,
// including instances whose pause failed.
func TestEndThawsHalfway(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", nil)
		c := r.k.Connect(id)
		r.k.Fail(hosttest.Thawing, errWorld)
		if err := r.Pause(context.Background(), "a", ByManual, false); err == nil {
			t.Error("it was paused under a client")
		}
		r.is("a", power.Pausing)
		r.k.Fail(hosttest.Thawing, nil)
		r.shut()
		if r.k.Proc(id).Frozen() {
			t.Error("it is frozen, and no daemon is there")
		}
		c.Close()
	})
}

// TestNotFoundYet starts a daemon that can neither find a run nor confirm its end.
// It checks that the instance does not count as stopped, that no second run is
// started, that requests are refused with that reason, and that clients are served
// once the run is found.
func TestNotFoundYet(t *testing.T) {
	for _, state := range []power.Instance{power.Running, power.Paused, power.Hibernated} {
		for name, ask := range map[string]func(r *rig) error{
			"stop":   func(r *rig) error { return r.Stop(context.Background(), "a", ByManual, false) },
			"resume": func(r *rig) error { return r.Resume(context.Background(), "a", ByManual) },
			"start":  func(r *rig) error { return r.Start(context.Background(), "a", ByManual) },
			"pause":  func(r *rig) error { return r.Pause(context.Background(), "a", ByManual, true) },
			"remove": func(r *rig) error { return r.Delete(context.Background(), "a", ByManual) },
			"client": func(r *rig) error {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				_, err := r.gates["a"].Arrive(ctx)
				return err
			},
		} {
			t.Run(string(state)+"/"+name, func(t *testing.T) {
				inBubble(t, func(r *rig) {
					r.k.Deep = true
					id := ""
					if state == power.Running {
						id = r.run("a", nil)
					} else {
						id = r.asleep("a", state)
					}
					r.crash()
					r.k.Fail(hosttest.Adopting, errWorld)
					if r.bootFaulty() == nil {
						t.Error("everything was taken over, it says")
					}
					if err := ask(r); err == nil {
						t.Error("it was done, it says")
					}
					synctest.Wait()
					if o, err := r.Get("a"); err != nil || o.State != string(state) || r.k.Proc(id) == nil || r.k.Starts() != 1 {
						t.Errorf("it is %s (%s), %v; its program lives: %t; %d starts", o.State, o.StatusReason, err, r.k.Proc(id) != nil, r.k.Starts())
					}
					r.k.Fail(hosttest.Adopting, nil)
					if err := ask(r); err != nil {
						t.Errorf("found again: %v", err)
					}
					synctest.Wait()
				})
			})
		}
	}
}

// TestNoRuntime checks that an instance whose runtime is missing keeps its
// name, and that requests for it get the reason.
func TestNoRuntime(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", nil)
		r.crash()
		r.tune = func(c *Config) {
			c.Runtimes, c.Missing = map[string]Runtime{"other": r.k}, map[string]error{"process": errWorld}
		}
		if r.bootFaulty() == nil {
			t.Error("everything was taken over, it says")
		}
		for _, ref := range []string{"a", id} {
			y, err := r.Why(context.Background(), ref, time.Time{})
			if err != nil || y.Fact(why.NoRuntime.Code) == nil || !strings.Contains(y.Answer, errWorld.Error()) {
				t.Errorf("why: %s, %v", y.Answer, err)
			}
			if o, err := r.Get(ref); err != nil || !strings.Contains(o.Unavailable, errWorld.Error()) {
				t.Errorf("get: %+v, %v", o, err)
			}
			if err := r.Stop(context.Background(), ref, ByManual, false); err == nil || !strings.Contains(err.Error(), errWorld.Error()) {
				t.Errorf("stop: %v", err)
			}
		}
		l := r.List(true)
		if len(l) != 1 || l[0].Name != "a" || l[0].State != "running" || !strings.Contains(l[0].Unavailable, errWorld.Error()) {
			t.Errorf("listed: %+v", l)
		}
		s := instance.Spec{Name: "a", Command: []string{"x"}, Runtime: "other"}
		if _, err := r.Create(context.Background(), s); err == nil {
			t.Error("its name was given away")
		}
		r.crash()
		r.tune = nil
		r.boot()
		r.is("a", power.Running)
	})
}
