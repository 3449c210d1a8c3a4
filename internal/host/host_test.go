package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/hostctl"
)

// TestLetRunMeanwhile checks that an instance that was thawed while no daemon ran
// is recorded as resumed, once, at the time at which that was found, and that why
// says so. An instance that ran all the time is not recorded as resumed.
func TestLetRunMeanwhile(t *testing.T) {
	inBubble(t, func(r *rig) {
		id, other := r.run("a", nil), r.run("b", nil)
		errtest.None(t, r.Pause(context.Background(), id, ByManual, false))
		ran := r.is("b", power.Running).LastResumedAt
		r.crash()
		w, err := r.k.Adopt(context.Background(), id, r.k.Proc(id).Identity()) // as the supervisor does
		if err == nil {
			err = w.Thaw()
		}
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		r.boot()
		found := r.Now()
		o := r.is("a", power.Running)
		if o.LastResumedAt == nil || !o.LastResumedAt.Equal(found) || o.LastResumedBy != "supervisor" {
			t.Errorf("resumed at %v by %s, found at %s", o.LastResumedAt, o.LastResumedBy, found)
		}
		if y, err := r.Why(context.Background(), id, time.Time{}); err != nil || !strings.Contains(y.Answer, letRunSaying) {
			t.Errorf("why: %q, %v", y.Answer, err)
		}
		if o := r.is("b", power.Running); !o.LastResumedAt.Equal(*ran) || o.LastResumedBy != ByManual {
			t.Errorf("%s was resumed at %s by %s", other, o.LastResumedAt, o.LastResumedBy)
		}
		if got := slices.Concat(r.happenings("a", "resumed"), r.happenings("b", "resumed")); !slices.Equal(got, []string{"supervisor: " + letRunSaying}) {
			t.Errorf("told: %s", got)
		}
	})
}

// TestLadder checks the states of an instance over time: idle, paused, woken by a
// connection, stopped.
func TestLadder(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", nil)
		time.Sleep(59 * time.Second)
		r.is("a", power.Running)
		time.Sleep(2 * time.Second)
		o := r.is("a", power.Paused)
		if o.LastPausedBy != byIdle || o.PauseCount != 1 {
			t.Errorf("paused by %s, %d times", o.LastPausedBy, o.PauseCount)
		}
		c := r.k.Connect(id)
		r.is("a", power.Running)
		if c.Outcome() != "answered" {
			t.Errorf("the client that woke it is %s", c.Outcome())
		}
		time.Sleep(2 * time.Minute)
		if o := r.is("a", power.Running); o.Connections != 1 {
			t.Errorf("an open connection does not hold: %+v", o)
		}
		c.Close()
		time.Sleep(66 * time.Second)
		r.is("a", power.Paused)
		time.Sleep(5 * time.Minute)
		o = r.is("a", power.Stopped)
		if o.ExitCode == nil || *o.ExitCode != 143 {
			t.Errorf("stopped without being asked: exit %v", o.ExitCode)
		}
		if c := r.k.Connect(id); c.Outcome() != "refused" {
			t.Errorf("a stopped instance answered: %s", c.Outcome())
		}
		if _, err := r.gates["a"].Arrive(r.ctx); err != nil {
			t.Errorf("a connection does not start what lull stopped: %v", err)
		}
		r.is("a", power.Running)
		errtest.None(t, r.Stop(r.ctx, "a", ByManual, false))
		if _, err := r.gates["a"].Arrive(r.ctx); err == nil {
			t.Errorf("the relay of an instance that a user stopped: %v", err)
		}
	})
}

// TestInteractionMatrix checks which combinations of signals keep an instance
// awake, one per row.
func TestInteractionMatrix(t *testing.T) {
	for _, row := range []struct {
		name   string
		policy string
		act    func(r *rig, id string)
		want   power.Instance
	}{
		{"HTTP server with active requests", "", func(r *rig, id string) { r.k.Connect(id) }, power.Running},
		{"HTTP server, no requests", "", func(*rig, string) {}, power.Paused},
		{"Telegram bot polling", "", func(r *rig, id string) { r.k.Proc(id).SetOutbound(1) }, power.Running},
		{"npm install", "", func(r *rig, id string) { r.k.Proc(id).SetBusy(true) }, power.Running},
		{"sleep 300", "", func(*rig, string) {}, power.Paused},
		{"build with explicit lease", "", func(r *rig, id string) { r.lease(id, "build", time.Hour) }, power.Running},
		{"bot with leases_only, polling", instance.PolicyLeasesOnly, func(r *rig, id string) {
			r.k.Proc(id).SetOutbound(1)
			r.k.Proc(id).SetBusy(true)
		}, power.Paused},
		{"bot with leases_only, lease held", instance.PolicyLeasesOnly, func(r *rig, id string) { r.lease(id, "job", time.Hour) }, power.Running},
	} {
		t.Run(row.name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				id := r.run("a", func(s *instance.Spec) { s.IdlePolicy = row.policy })
				row.act(r, id)
				time.Sleep(62 * time.Second)
				r.is("a", row.want)
			})
		})
	}
}

func TestLeases(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := context.Background()
		r.run("a", nil)
		for _, ttl := range []time.Duration{0, -1, 24*time.Hour + 1} {
			var bad *InvalidError
			if err := r.Hold(ctx, "a", idle.Lease{}, ttl); !errors.As(err, &bad) {
				t.Errorf("ttl %s: %v", ttl, err)
			}
		}
		r.lease("a", "one", 3*time.Minute)
		r.lease("a", "two", 10*time.Minute)
		errtest.None(t, r.ReleaseLease(ctx, "a", "two"))
		var missing *NotFoundError
		if err := r.ReleaseLease(ctx, "a", "two"); !errors.As(err, &missing) {
			t.Errorf("released twice: %v", err)
		}
		time.Sleep(2 * time.Minute)
		o := r.is("a", power.Running)
		if !o.LeaseHeld || len(o.Leases) != 1 || o.Leases[0].Holder != "one" {
			t.Errorf("another's lease was dropped: %+v", o.Leases)
		}
		r.lease("a", "one", 3*time.Minute) // renewed
		time.Sleep(2*time.Minute + 59*time.Second)
		r.is("a", power.Running)
		time.Sleep(2 * time.Second)
		r.is("a", power.Paused)
		// A lease on a paused instance is kept, and blocks deeper steps, but does
		// not wake it.
		r.lease("a", "late", 20*time.Minute)
		time.Sleep(19 * time.Minute)
		r.is("a", power.Paused)
		time.Sleep(2 * time.Minute)
		r.is("a", power.Stopped)
		var refused *RefusedError
		if err := r.Hold(ctx, "a", idle.Lease{}, time.Minute); !errors.As(err, &refused) {
			t.Errorf("lease on a stopped instance: %v", err)
		}
	})
}

// TestSnoozeOfSleeping checks that a snooze keeps a paused instance from being
// stopped, and that the next step happens as announced.
func TestSnoozeOfSleeping(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.run("a", nil)
		time.Sleep(62 * time.Second)
		stopAt := *r.is("a", power.Paused).StopAt
		until := time.Now().Add(time.Hour)
		errtest.None(t, r.Snooze(r.ctx, "a", until))
		o := r.is("a", power.Paused)
		if !o.StopAt.Equal(until) || !o.NextStepAt.Equal(until) || o.NextStep != string(power.Stopped) {
			t.Errorf("snoozed until %s, and it says: %s at %s, stopped at %s", until, o.NextStep, o.NextStepAt, o.StopAt)
		}
		time.Sleep(59 * time.Minute)
		r.is("a", power.Paused)
		if err := r.Snooze(r.ctx, "a", time.Now().Add(10*time.Second)); err != nil { // soon over
			t.Fatal(err)
		}
		errtest.None(t, r.Snooze(r.ctx, "a", time.Now().Add(time.Hour)))
		if err := r.Snooze(r.ctx, "a", time.Time{}); err != nil { // ended
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		r.is("a", power.Stopped)
		if !stopAt.Before(until) {
			t.Errorf("stopped at %s without a snooze: this tests nothing", stopAt)
		}
	})
}

// TestHaltedSaysNoNextStep checks that no next step is announced during a halt.
func TestHaltedSaysNoNextStep(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.run("a", nil)
		time.Sleep(62 * time.Second)
		errtest.None(t, r.Halt(&idle.HaltedBy{}, ByManual))
		if o := r.is("a", power.Paused); o.StopAt != nil || o.NextStep != "" || o.NextStepAt != nil {
			t.Errorf("halted, and it says: %s at %v, stopped at %v", o.NextStep, o.NextStepAt, o.StopAt)
		}
		errtest.None(t, r.Halt(nil, ByManual))
		if o := r.is("a", power.Paused); o.StopAt == nil || o.NextStep != string(power.Stopped) {
			t.Errorf("no longer halted, and it says: %s, stopped at %v", o.NextStep, o.StopAt)
		}
	})
}

func TestExplicitPause(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := context.Background()
		id := r.run("a", nil)
		c := r.k.Connect(id)
		var refused *RefusedError
		if err := r.Pause(ctx, "a", ByManual, false); !errors.As(err, &refused) || !strings.Contains(refused.Reason, "connection") {
			t.Fatalf("paused against a connection: %v", err)
		}
		r.is("a", power.Running)
		errtest.None(t, r.Pause(ctx, "a", ByManual, true))
		r.is("a", power.Paused)
		c.Send()
		r.is("a", power.Running)
		errtest.None(t, r.Stop(ctx, "a", ByManual, true))
		if o := r.is("a", power.Stopped); o.Enabled {
			t.Error("stopped with disable, and still enabled")
		}
		if err := r.Pause(ctx, "a", ByManual, true); !errors.As(err, &refused) {
			t.Errorf("paused a stopped one: %v", err)
		}
	})
}

func TestQuietConnection(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", func(s *instance.Spec) { s.QuietConnectionAfter = 1 })
		c := r.k.Connect(id)
		time.Sleep(70 * time.Second)
		r.is("a", power.Paused)
		c.Close() // the close wakes it too
		r.is("a", power.Running)
	})
}

// TestQuietConnectionOfAStarvedServer checks that an instance is not paused while
// its server gets no CPU time, even if its connections are quiet, because a client
// may be waiting for an answer.
func TestQuietConnectionOfAStarvedServer(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", func(s *instance.Spec) { s.QuietConnectionAfter = 1 })
		r.k.Connect(id)
		r.k.Proc(id).Starve(true)
		time.Sleep(time.Hour)
		r.is("a", power.Running)
		r.k.Proc(id).Starve(false)
		time.Sleep(70 * time.Second)
		r.is("a", power.Paused)
	})
}

func TestHaltStopsEverythingAutomatic(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.run("a", nil)
		r.run("b", nil)
		time.Sleep(62 * time.Second)
		r.is("b", power.Paused)
		errtest.None(t, r.Resume(context.Background(), "a", ByManual))
		errtest.None(t, r.Halt(&idle.HaltedBy{By: "ada", Since: time.Now(), Reason: "a demo"}, "ada"))
		time.Sleep(time.Hour)
		o := r.is("a", power.Running)
		if o.Blocks[0].Code != idle.Halted || !strings.Contains(o.Blocks[0].Sentence, "ada") || !strings.Contains(o.Blocks[0].Sentence, "a demo") {
			t.Errorf("blocks %v", o.Blocks)
		}
		r.is("b", power.Paused) // not stopped either
		errtest.None(t, r.Halt(nil, "ada"))
		time.Sleep(10 * time.Second)
		r.is("a", power.Paused)
		r.is("b", power.Stopped)
	})
}

// TestLooksOfOneNeverPaused checks that an instance that is never paused is
// probed no more often than others.
func TestLooksOfOneNeverPaused(t *testing.T) {
	inBubble(t, func(r *rig) {
		never := idle.Duration(0)
		var looks atomic.Int64
		r.k.At = func(point string, _ func([]byte, time.Time) []byte) {
			if point == "sample" {
				looks.Add(1)
			}
		}
		r.run("a", func(s *instance.Spec) { s.PauseAfter = &never })
		time.Sleep(time.Hour)
		if n := looks.Load(); n < 600 || n > 800 {
			t.Errorf("checked %d times in an hour, want one every 5 s", n)
		}
	})
}

// TestHaltEnds checks that a halt with an end ends by itself with an event, and
// that a halt that cannot be recorded changes nothing.
func TestHaltEnds(t *testing.T) {
	var kept *idle.HaltedBy
	var broken error
	keep := func(c *Config) {
		c.KeepHalt = func(x *idle.HaltedBy) error {
			if broken == nil {
				kept = x
			}
			return broken
		}
	}
	inTuned(t, keep, func(r *rig) {
		r.run("a", nil)
		end := time.Now().Add(time.Hour)
		if err := r.Halt(&idle.HaltedBy{By: "ada", Since: time.Now(), Until: &end}, "ada"); err != nil || kept == nil {
			t.Fatal(err, kept)
		}
		broken = errors.New("the disk is full")
		if err := r.Halt(nil, "bob"); err == nil || r.Halted() == nil {
			t.Errorf("an end that was not recorded: %v", err)
		}
		broken = nil
		time.Sleep(59 * time.Minute)
		if o := r.is("a", power.Running); o.PauseAt == nil || !o.PauseAt.Equal(end) {
			t.Errorf("it is paused at %v, the halt ends at %v", o.PauseAt, end)
		}
		time.Sleep(time.Minute + 10*time.Second)
		r.is("a", power.Paused)
		if kept != nil || r.Halted() != nil {
			t.Errorf("the halt is kept: %v", kept)
		}
		if past := r.happenings("a", "halt_off"); !slices.Equal(past, []string{"lull: the halt by ada has ended"}) {
			t.Errorf("nothing says that it ended: %q", past)
		}
	})
}

// TestCrashLoop checks that a crash loop is recognized by the time that the program
// ran: failures after an hour are not one, however recent the last activity is.
func TestCrashLoop(t *testing.T) {
	inBubble(t, func(r *rig) {
		noPause := idle.Duration(0)
		id := r.run("a", func(s *instance.Spec) { s.Restart, s.PauseAfter = instance.RestartOnFailure, &noPause })
		for range 7 {
			time.Sleep(time.Hour)
			r.k.Proc(id).Exit(1)
			time.Sleep(time.Second)
			if o := r.is("a", power.Running); o.CrashLooping {
				t.Fatal("a late failure was taken for a crash")
			}
		}
		starts := r.k.Starts()
		const crashLimit = 5 // within two minutes
		for n := range crashLimit {
			for r.k.Proc(id) == nil {
				time.Sleep(time.Second)
			}
			time.Sleep(time.Second)
			if n < crashLimit-1 {
				r.is("a", power.Running)
			}
			r.k.Proc(id).Exit(1)
			synctest.Wait()
		}
		time.Sleep(time.Hour)
		o := r.is("a", power.Stopped)
		if !o.CrashLooping || r.k.Starts() != starts+crashLimit-1 {
			t.Errorf("crash looping %v after %d starts", o.CrashLooping, r.k.Starts()-starts)
		}
		errtest.None(t, r.Start(context.Background(), "a", ByManual))
		if o := r.is("a", power.Running); o.CrashLooping {
			t.Error("a user's start does not clear the crash loop")
		}
	})
}

func TestCleanExitEndsStopped(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", func(s *instance.Spec) { s.Restart = instance.RestartOnFailure })
		r.k.Proc(id).Exit(0)
		time.Sleep(time.Hour)
		if o := r.is("a", power.Stopped); *o.ExitCode != 0 || o.RestartCount != 0 {
			t.Errorf("exit %d, %d restarts", *o.ExitCode, o.RestartCount)
		}
	})
}

// TestWakeFromStopped checks which stopped instances a connection starts: by
// default those that lull stopped, with true also those that exited by themselves,
// with false none. An instance that a user stopped is never started, even if lull
// had stopped it before. A crash of the daemon does not change that.
func TestWakeFromStopped(t *testing.T) {
	ladder := func(r *rig, _ string) { time.Sleep(7 * time.Minute) }
	user := func(r *rig, _ string) { _ = r.Stop(r.ctx, "a", ByManual, false) }
	exits := func(r *rig, id string) { r.k.Proc(id).Exit(0); time.Sleep(time.Second) }
	both := func(r *rig, id string) { ladder(r, id); user(r, id) }
	for _, row := range []struct {
		name  string
		set   *bool
		end   func(r *rig, id string)
		wakes bool
	}{
		{"default, by lull", nil, ladder, true}, {"default, by a user", nil, user, false}, {"default, by itself", nil, exits, false},
		{"default, by lull and then by a user", nil, both, false},
		{"true, by lull", new(true), ladder, true}, {"true, by a user", new(true), user, false}, {"true, by itself", new(true), exits, true},
		{"false, by lull", new(false), ladder, false}, {"false, by itself", new(false), exits, false},
	} {
		for _, killed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, daemon killed %v", row.name, killed), func(t *testing.T) {
				inBubble(t, func(r *rig) {
					id := r.run("a", func(s *instance.Spec) { s.WakeFromStopped = row.set })
					row.end(r, id)
					if killed {
						r.crash()
						r.boot()
					}
					if o := r.is("a", power.Stopped); o.StartsOnConnection != row.wakes {
						t.Errorf("starts_on_connection is %v", o.StartsOnConnection)
					}
					c, err := r.gates["a"].Arrive(r.ctx)
					if row.wakes {
						if err != nil || c.Outcome() != "answered" {
							t.Fatalf("%v", err)
						}
						r.is("a", power.Running)
						return
					}
					if err == nil {
						t.Error("a connection started it")
					}
					r.is("a", power.Stopped)
				})
			})
		}
	}
}

// TestRestart checks that a restart makes exactly one new run in every state, keeps
// the leases, and is completed by the next daemon if necessary.
func TestRestart(t *testing.T) {
	for _, from := range []string{"running", "paused", "stopped", "killed in between"} {
		t.Run(from, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				id := r.run("a", nil)
				switch from {
				case "paused":
					time.Sleep(2 * time.Minute)
				case "stopped":
					_ = r.Stop(r.ctx, "a", ByManual, false)
				case "running":
					errtest.None(t, r.Hold(r.ctx, "a", idle.Lease{Holder: "h"}, time.Hour))
				}
				starts := r.k.Starts()
				if from == "killed in between" {
					i, _ := r.find(id)
					i.acquire()
					errtest.None(t, i.endForRestart(r.ctx, ByManual))
					i.release()
					r.crash()
					r.boot()
					time.Sleep(time.Second)
				} else if err := r.Restart(r.ctx, "a", ByManual); err != nil {
					t.Fatal(err)
				}
				o := r.is("a", power.Running)
				if n := r.k.Starts() - starts; n != 1 {
					t.Errorf("%d starts, want 1", n)
				}
				if o.LeaseHeld != (from == "running") || o.RestartAt != nil {
					t.Errorf("lease held %v, restart at %v", o.LeaseHeld, o.RestartAt)
				}
			})
		})
	}
}

func TestWorkloadSpeaks(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", nil)
		i, _ := r.find(id)
		i.setBusy(+1)
		time.Sleep(10 * time.Minute)
		r.is("a", power.Running)
		i.setBusy(-1)
		time.Sleep(66 * time.Second)
		r.is("a", power.Paused)
		errtest.None(t, r.fromGuest(context.Background(), i, guest.Message{Method: guest.NextDue, Params: guest.Params{In: 2 * time.Minute}}))
		time.Sleep(2*time.Minute - Lead - time.Second)
		r.is("a", power.Paused)
		time.Sleep(time.Second)
		if o := r.is("a", power.Running); o.LastResumedBy != byTimer {
			t.Errorf("resumed by %s", o.LastResumedBy)
		}
	})
}

func TestReclaim(t *testing.T) {
	inBubble(t, func(r *rig) {
		soon := func(s *instance.Spec) { s.ReclaimAfter = idle.Duration(30 * time.Second) }
		id := r.run("a", soon)
		r.run("b", soon)
		time.Sleep(95 * time.Second)
		if o := r.is("a", power.Reclaimed); o.ReclaimedBytes == 0 {
			t.Error("no freed amount")
		}
		if c := r.k.Connect(id); c.Outcome() != "answered" {
			t.Errorf("client is %s", c.Outcome())
		}
		r.is("a", power.Running)
		r.is("b", power.Reclaimed)
		errtest.None(t, r.Stop(context.Background(), "b", ByManual, false))
		if o := r.is("b", power.Stopped); o.ReclaimedBytes != 0 {
			t.Errorf("it is stopped and has freed %d bytes", o.ReclaimedBytes)
		}
	})
}

// TestSilentPort checks that, for an instance with its own network, an exposed port
// without a listener is reported.
func TestSilentPort(t *testing.T) {
	for deep, want := range map[bool]string{false: "nothing listens on 127.0.0.1:99 after ", true: "nothing listens on 127.0.0.1:99 in the guest after "} {
		inBubble(t, func(r *rig) {
			r.k.Deep = deep
			id, err := r.Create(context.Background(), instance.Spec{Name: "a", Command: []string{"x"}, Restart: instance.RestartNo,
				Expose: []instance.Endpoint{{Listen: "127.0.0.1:98", Target: "127.0.0.1:99"}}})
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Start(context.Background(), id, ByManual); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v; want %q in it", err, want)
			}
		})
	}
}

// TestPrivatePort checks that a program that listens only on its guest's loopback
// is reported as such, and not as not listening.
func TestPrivatePort(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep, r.k.Private = true, true
		id, err := r.Create(context.Background(), instance.Spec{Name: "a", Command: []string{"x"}, Restart: instance.RestartNo,
			Expose: []instance.Endpoint{{Listen: "127.0.0.1:98", Target: "127.0.0.1:80"}}})
		if err != nil {
			t.Fatal(err)
		}
		const want = "cannot start a: after 1m it listens on 127.0.0.1:80 of the guest only, which no client reaches: bind it to 0.0.0.0"
		if err := r.Start(context.Background(), id, ByManual); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q in it", err, want)
		}
	})
}

// TestListByName checks that the list is sorted by name; IDs are random.
func TestListByName(t *testing.T) {
	inBubble(t, func(r *rig) {
		names := []string{"f", "b", "e", "a", "d", "c", "h", "g"}
		for _, name := range names {
			r.run(name, nil)
		}
		slices.Sort(names)
		var got []string
		for _, o := range r.List(false) {
			got = append(got, o.Name)
		}
		if !slices.Equal(got, names) {
			t.Errorf("listed as %v", got)
		}
	})
}

func TestStubbornProgramIsKilled(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Stubborn = true
		r.run("a", nil)
		errtest.None(t, r.Stop(context.Background(), "a", ByManual, false))
		if o := r.is("a", power.Stopped); *o.ExitCode != 137 {
			t.Errorf("exit %d", *o.ExitCode)
		}
	})
}

// TestDaemonCrash kills the daemon at random instants of a busy day and starts
// another. It checks that no instance is lost, left frozen or started twice, and
// that no lease is lost.
func TestDaemonCrash(t *testing.T) {
	rounds := count(t, "LULL_SIM_CRASHES", 60)
	seed := rand.Uint64()
	t.Logf("seed %d, %d crashes", seed, rounds)
	rnd := rand.New(rand.NewPCG(seed, 0))
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, k: &hosttest.Kernel{}, disk: hosttest.NewDisk(), gates: map[string]*hosttest.Gate{}}
		t.Cleanup(r.shut)
		r.boot()
		const n = 8
		for i := range n {
			r.run(fmt.Sprint("i", i), func(s *instance.Spec) { s.WakeFromStopped = new(i%2 == 0) })
		}
		until := map[string]time.Time{}
		for range rounds {
			for range 1 + rnd.IntN(12) {
				name := fmt.Sprint("i", rnd.IntN(n))
				o, _ := r.Get(name)
				switch rnd.IntN(5) {
				case 0:
					if r.k.Proc(o.ID) != nil {
						r.k.Connect(o.ID).Close()
					}
				case 1:
					ttl := time.Duration(1+rnd.IntN(20)) * time.Minute
					if r.Hold(r.ctx, name, idle.Lease{Holder: "h"}, ttl) == nil {
						until[name] = r.Now().Add(ttl)
					}
				case 2:
					r.Start(r.ctx, name, ByManual)
				case 3:
					r.Pause(r.ctx, name, ByManual, true)
				case 4:
					if r.Stop(r.ctx, name, ByManual, false) == nil {
						delete(until, name)
					}
				}
				time.Sleep(time.Duration(rnd.IntN(60_000)) * time.Millisecond)
			}
			before := map[string]hostctl.Instance{}
			for _, o := range r.List(false) {
				before[o.Name] = o
			}
			r.crash()
			time.Sleep(time.Duration(rnd.IntN(1500)) * time.Millisecond)
			r.boot()
			for name, was := range before {
				o, err := r.Get(name)
				if err != nil {
					t.Fatalf("seed %d: %s was lost: %v", seed, name, err)
				}
				due := was.State == "paused" && o.State == "stopped" && was.StopAt != nil && !was.StopAt.After(r.Now())
				if was.State != o.State && !(was.State == "paused" && o.State == "running") && !due {
					t.Fatalf("seed %d: %s was %s and is %s: %s", seed, name, was.State, o.State, o.StatusReason)
				}
				if end, ok := until[name]; ok && end.After(r.Now()) && o.State != "stopped" && !o.LeaseHeld {
					t.Fatalf("seed %d: a lease of %s was forgotten", seed, name)
				}
			}
			if b := r.k.Broken(); len(b) > 0 {
				t.Fatalf("seed %d: %v", seed, b)
			}
		}
		r.shut()
	})
}
