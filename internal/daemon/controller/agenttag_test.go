package controller

import (
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/link/tags"
	"lull/internal/power"
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

// TestTagDeadlineIsReadAgain checks that lull does not act on a deadline in a
// tag that was moved a moment before, although the instance was described
// earlier.
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
