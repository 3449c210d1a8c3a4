package host

import (
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/host/hosttest"
	"lull/internal/protocol/hostctl"
)

// TestForcedPauseKeepsConnections checks that an instance that was paused by force
// despite a client takes the steps that keep the connection, and takes the step
// that closes it only after the connection has carried data or closed. It checks
// the same for the next daemon.
func TestForcedPauseKeepsConnections(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		id := r.run("a", func(s *instance.Spec) { s.HibernateAfter = idle.Duration(2 * time.Minute) })
		c := r.k.Connect(id)
		r.pauseUnder("a")
		time.Sleep(time.Minute)
		o := r.is("a", power.Paused)
		if o.StopAt != nil || o.NextStep != string(power.Hibernated) {
			t.Errorf("it is stopped at %v, next %s", o.StopAt, o.NextStep)
		}
		time.Sleep(time.Hour)
		o = r.is("a", power.Hibernated)
		if o.Connections != 1 || o.NextStepAt != nil {
			t.Errorf("%d connections, next %s at %v", o.Connections, o.NextStep, o.NextStepAt)
		}
		if y, err := r.Why(r.ctx, "a", time.Time{}); err != nil || y.Fact(why.KeptOpen.Code) == nil {
			t.Errorf("why: %s, %v", y.Answer, err)
		}
		c.Send()
		r.is("a", power.Running)
		if c.Outcome() != "answered" {
			t.Errorf("the client is %s", c.Outcome())
		}

		r.pauseUnder("a")
		r.crash()
		r.boot()
		time.Sleep(time.Hour)
		if o := r.is("a", power.Hibernated); o.Connections != 1 {
			t.Errorf("the next daemon knows of %d connections", o.Connections)
		}
		c.Close()
		r.is("a", power.Running)
		time.Sleep(7 * time.Minute)
		r.is("a", power.Stopped) // as any other instance is
	})
}

// TestForcedPauseAndQuietConnections checks that connections that may be ignored
// after a quiet time delay the stop until then, whichever setting allows that.
func TestForcedPauseAndQuietConnections(t *testing.T) {
	inBubble(t, func(r *rig) {
		ids := map[string]string{}
		clients := map[string]*hosttest.Client{}
		for name, quiet := range map[string]time.Duration{"long": time.Hour, "short": 2 * time.Minute, "none": 0} {
			ids[name] = r.run(name, func(s *instance.Spec) { s.QuietConnectionAfter = idle.Duration(quiet) })
			clients[name] = r.k.Connect(ids[name])
			r.pauseUnder(name)
		}
		paused := *r.is("long", power.Paused).LastPausedAt
		if o := r.is("long", power.Paused); o.StopAt == nil || !o.StopAt.Equal(paused.Add(time.Hour)) {
			t.Errorf("long is stopped at %v, it was paused at %s", o.StopAt, paused)
		}
		if y, err := r.Why(r.ctx, "long", time.Time{}); err != nil || y.Fact(why.StopsOpen.Code) == nil || !y.Fact(why.StopsOpen.Code).At.Equal(*y.Instance.StopAt) {
			t.Errorf("why: %s, %v", y.Answer, err)
		}
		time.Sleep(5*time.Minute + time.Second)
		r.is("short", power.Stopped)
		r.is("long", power.Paused)
		r.is("none", power.Paused)
		if err := r.Change(r.ctx, "none", hostctl.Change{QuietConnectionAfter: span(10 * time.Minute)}, ByManual); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		r.is("none", power.Stopped)
		r.is("long", power.Paused)
		time.Sleep(51 * time.Minute)
		r.is("long", power.Stopped)
	})
}

// pauseUnder pauses an instance by force although it has clients.
func (r *rig) pauseUnder(name string) {
	r.t.Helper()
	synctest.Wait()
	if err := r.Pause(r.ctx, name, ByManual, false); err == nil {
		r.t.Errorf("%s was paused under a client without force", name)
	}
	if err := r.Pause(r.ctx, name, ByManual, true); err != nil {
		r.t.Fatal(err)
	}
}
