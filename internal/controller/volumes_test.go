package controller

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/fleet/worker"
)

// TestVolumes checks that a worker's record has the volumes that EC2 reports. They
// are read in one call for many workers, again when the set of attached volumes
// changes, and once a day.
func TestVolumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer r.stop()
		ids := r.many(3)
		attach := func(id string, volumes ...string) {
			m := r.machine(id)
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			m.Volumes = volumes
		}
		kind := func(name string) {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			r.world.volumeType = name
		}
		calls := func() int {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			return r.world.calls["volumes"]
		}
		expect := func(id, kind string, sizes ...int) {
			t.Helper()
			got := r.worker(id).Volumes
			if !slices.EqualFunc(got, sizes, func(v worker.Volume, gb int) bool { return v.GB == gb && v.Type == kind }) {
				t.Errorf("the volumes of %s are %+v, want %v of %s", id, got, sizes, kind)
			}
		}
		kind("gp3")
		attach(ids[0], "vol-30")
		attach(ids[1], "vol-50", "vol-70")
		time.Sleep(25 * time.Minute) // the full pass describes all
		expect(ids[0], "gp3", 30)
		expect(ids[1], "gp3", 50, 70)
		expect(ids[2], "")
		if n := calls(); n > 2 {
			t.Errorf("%d calls for two workers", n)
		}
		kind("gp2")
		attach(ids[0], "vol-30", "vol-40")
		time.Sleep(90 * time.Minute)
		expect(ids[0], "gp2", 30, 40)
		expect(ids[1], "gp3", 50, 70) // unchanged: no new read before a day is over
		time.Sleep(25 * time.Hour)
		expect(ids[1], "gp2", 50, 70)
		if n := calls(); n > 6 {
			t.Errorf("%d calls in a day", n)
		}

		// If EC2 does not answer requests for volumes, states are still read.
		listed := func() int {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			return r.world.calls["states"]
		}
		r.world.mu.Lock()
		r.world.mute = true
		r.world.mu.Unlock()
		attach(ids[0], "vol-30", "vol-40", "vol-60")
		before, asked := listed(), calls()
		time.Sleep(2 * time.Hour)
		if n := listed() - before; n < 200 || calls() == asked {
			t.Errorf("states were listed %d times in two hours, volumes asked for %d times", n, calls()-asked)
		}
	})
}
