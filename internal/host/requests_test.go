package host

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/errtest"
)

// TestPendingRequestHolds checks that an unanswered request keeps an instance
// awake, however long its connection has been quiet, and that the quiet connection
// is ignored again once the request is answered.
func TestPendingRequestHolds(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", func(s *instance.Spec) {
			s.PauseAfter, s.QuietConnectionAfter = new(idle.Duration(time.Second)), idle.Duration(time.Second)
		})
		p := r.k.Proc(id)
		p.SetSlow(true)
		c := r.k.Connect(id)
		time.Sleep(time.Hour)
		synctest.Wait()
		if o := r.is("a", power.Running); o.PauseCount != 0 || o.PauseAt != nil {
			t.Errorf("paused %d times, to be paused at %v, while a client waits", o.PauseCount, o.PauseAt)
		}
		p.SetSlow(false)
		if c.Outcome() != "answered" {
			t.Errorf("the client is %s", c.Outcome())
		}
		time.Sleep(5 * time.Second)
		r.is("a", power.Paused)
	})
}

// TestOutboundConnections checks that an idle outbound connection keeps the
// instance awake without quiet-connection-after, and not with it. An unanswered
// request always does, and then no time for a pause is announced.
func TestOutboundConnections(t *testing.T) {
	for name, row := range map[string]struct {
		quiet     time.Duration
		out, asks int
		want      power.Instance
	}{
		"idle pool":                   {time.Second, 3, 0, power.Paused},
		"idle pool, no quiet":         {0, 3, 0, power.Running},
		"request":                     {time.Second, 3, 1, power.Running},
		"request to this machine":     {time.Second, 0, 1, power.Running},
		"request, no quiet":           {0, 3, 1, power.Running},
		"request here, without quiet": {0, 0, 1, power.Running},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				id := r.run("a", func(s *instance.Spec) {
					s.PauseAfter, s.QuietConnectionAfter = new(idle.Duration(time.Second)), idle.Duration(row.quiet)
				})
				p := r.k.Proc(id)
				p.SetOutbound(row.out)
				p.SetAsking(row.asks)
				time.Sleep(time.Minute)
				synctest.Wait()
				if o := r.is("a", row.want); row.want == power.Running && (o.PauseCount != 0 || o.PauseAt != nil) {
					t.Errorf("paused %d times, to be paused at %v", o.PauseCount, o.PauseAt)
				}
			})
		})
	}
}

// TestWakesOnConnection checks that a connection wakes a sleeping instance if it
// exposes a port or has a listening socket of its own, as containers and servers on
// unix sockets do.
func TestWakesOnConnection(t *testing.T) {
	for name, row := range map[string]struct {
		deaf, exposes, want bool
	}{"a port": {true, true, true}, "a socket of its own": {false, false, true}, "nothing": {true, false, false}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				r.k.Deaf = row.deaf && !row.exposes
				r.run("a", func(s *instance.Spec) {
					if !row.exposes {
						s.Expose = nil
					}
				})
				errtest.None(t, r.Pause(r.ctx, "a", ByManual, false))
				if o := r.is("a", power.Paused); o.WakesOnConnection != row.want {
					t.Errorf("wakes on a connection: %t", o.WakesOnConnection)
				}
			})
		})
	}
}

// TestWhyNoConnectionStarts checks that an instance that connections wake from a
// pause but do not start after a stop says so: in its status, and in why both while
// it is paused and once it is stopped.
func TestWhyNoConnectionStarts(t *testing.T) {
	for name, row := range map[string]struct {
		silent, forbidden, stays bool
		want                     bool
	}{
		"a socket of its own":     {want: true},
		"that listens on nothing": {silent: true},
		"that is never stopped":   {stays: true},
		"that is not to be woken": {forbidden: true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				r.k.Deaf = row.silent
				r.run("a", func(s *instance.Spec) {
					s.Expose, s.StopAfter = nil, new(idle.Duration(time.Hour))
					if row.stays {
						s.StopAfter = new(idle.Duration)
					}
					if row.forbidden {
						s.WakeFromStopped = new(bool)
					}
				})
				errtest.None(t, r.Pause(r.ctx, "a", ByManual, false))
				check := func(want power.Instance) {
					t.Helper()
					o := r.is("a", want)
					w, err := r.Why(r.ctx, "a", time.Time{})
					if err != nil {
						t.Fatal(err)
					}
					if (o.Deaf != "") != row.want || o.StartsOnConnection || row.want && !strings.Contains(w.Answer, o.Deaf) {
						t.Errorf("%s: starts on a connection %v, %q; why: %s", want, o.StartsOnConnection, o.Deaf, w.Answer)
					}
				}
				check(power.Paused)
				time.Sleep(2 * time.Hour)
				synctest.Wait()
				if row.stays {
					check(power.Paused)
				} else {
					check(power.Stopped)
				}
			})
		})
	}
}

// TestNamesWithCapitals checks that a name is found whatever its case, because
// names of containers may have capitals.
func TestNamesWithCapitals(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("web_1", nil)
		if o, err := r.Get("Web_1"); err != nil || o.ID != id {
			t.Errorf("found %s: %v", o.ID, err)
		}
	})
}
