package controller

import (
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/tags"
)

// TestFinalStateTag checks that the server gives the tag of the agent's action
// its final form, under the configured prefix.
func TestFinalStateTag(t *testing.T) {
	for _, prefix := range []string{tags.DefaultPrefix, tags.PrismPrefix, "team:"} {
		for ing, final := range map[string]string{tags.ActionStopping: tags.ActionStopped, tags.ActionHibernating: tags.ActionHibernated} {
			t.Run(prefix+ing, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t, options{settings: map[string]any{"tag_prefix": prefix}})
					defer func() { r.stop() }()
					id := r.create().ID
					r.await(id, power.WorkerRunning, 5*time.Minute)
					m := r.machine(id)
					_, _, key := tags.StateKeys(prefix)
					r.world.mu.Lock()
					m.Tags[key] = ing
					r.world.mu.Unlock()
					r.await(id, power.WorkerStopped, 4*time.Hour)
					time.Sleep(time.Minute)
					synctest.Wait()
					if got := r.tags(id)[key]; got != final {
						t.Errorf("the tag %s says %q, want %q", key, got, final)
					}
				})
			})
		}
	}
}

// TestTagDeadlineIsReadAgain checks that lull rereads a deadline tag before acting on
// it: one that was moved a moment ago is not acted on, although the last description
// still shows the old one.
func TestTagDeadlineIsReadAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"worker_auto_pause_enabled": false}})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		m := r.machine(id)
		end := time.Now().Add(40 * time.Minute).UTC().Truncate(time.Second)
		set := func(at time.Time) {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			m.Tags["lull:ttl-deadline"] = at.Format(time.RFC3339)
		}
		set(end)
		for r.worker(id).TTLDeadline == nil {
			time.Sleep(time.Minute)
		}
		time.Sleep(time.Until(end) - 5*time.Second)
		set(end.Add(2 * time.Hour))
		time.Sleep(30 * time.Minute)
		synctest.Wait()
		if w := r.worker(id); w.Status != power.WorkerRunning || w.DesiredStatus != power.WorkerRunning || !w.TTLDeadline.Equal(end.Add(2*time.Hour)) {
			t.Fatalf("%s, wanted %s, deadline %s", w.Status, w.DesiredStatus, w.TTLDeadline)
		}
		r.await(id, power.WorkerStopped, 2*time.Hour)
	})
}

// TestTagDeadlineOfAStoppedWorker checks that a stopped worker follows its tag
// too: a deadline that is added, moved or removed is in its record after the
// rolling pass, so that a worker can be started again once its tag is removed.
// An action that an operator chose for the deadline is kept when the tag moves,
// and ends the worker.
func TestTagDeadlineOfAStoppedWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerStopped, 5*time.Minute)
		m := r.machine(id)
		follow := func(what string, at *time.Time) {
			t.Helper()
			r.world.mu.Lock()
			if delete(m.Tags, "lull:ttl-deadline"); at != nil {
				m.Tags["lull:ttl-deadline"] = at.Format(time.RFC3339)
			}
			r.world.mu.Unlock()
			time.Sleep(2*FullPass + time.Minute)
			if d := r.worker(id).TTLDeadline; (d == nil) != (at == nil) || d != nil && !d.Equal(*at) {
				t.Fatalf("%s: the deadline of its record is %v, of its tag %v", what, d, at)
			}
		}
		start := time.Now().UTC().Truncate(time.Second)
		near, far := start.Add(time.Hour), start.Add(24*time.Hour)
		follow("added", &near)
		time.Sleep(2 * time.Hour) // the deadline has passed
		if _, err := r.fleet.StartWorker(t.Context(), operator, id); err == nil {
			t.Fatal("a worker whose deadline is over is started")
		}
		follow("taken away", nil)
		if _, err := r.fleet.StartWorker(t.Context(), operator, id); err != nil {
			t.Fatalf("after its tag was taken away: %v", err)
		}
		r.await(id, power.WorkerRunning, 10*time.Minute)
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerStopped, 5*time.Minute)
		follow("added again", &far)
		r.profile(id, worker.Profile{TTLAction: new("terminate")})
		far = far.Add(time.Hour)
		follow("moved", &far)
		time.Sleep(time.Until(far) - time.Minute)
		if s := r.worker(id).Status; s != power.WorkerStopped {
			t.Fatalf("before its end it is %s", s)
		}
		r.await(id, power.WorkerTerminated, 10*time.Minute)
	})
}
