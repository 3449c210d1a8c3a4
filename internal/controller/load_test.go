package controller

import (
	"errors"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
)

// TestLoadHoldsForTheTimeout checks that a worker judged by its load alone is
// idle only a complete timeout after the load fell, not at once.
func TestLoadHoldsForTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(1)
		w.cpu = new(90.0)
		r := newRig(t, options{world: w, settings: map[string]any{"worker_auto_pause_snooze_minutes": 0}})
		defer r.stop()
		id := r.create().ID
		errtest.Get(r.fleet.UpdateWorker(t.Context(), operator, id, 0, worker.Profile{ActivitySources: []string{worker.SourceCloudWatch}}))(t)
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(5 * time.Hour)
		w.mu.Lock()
		*w.cpu = 1
		w.mu.Unlock()
		fell := time.Now()
		r.await(id, power.WorkerStopped, 2*time.Hour)
		is, err := r.fleet.Worker(t.Context(), id)
		errtest.None(t, err)
		if after := is.LastPausedAt.Sub(fell); after < 50*time.Minute || after > 80*time.Minute {
			t.Errorf("paused %s after its load fell, with a timeout of an hour", after)
		}
	})
}

// rare are settings with which lull itself does nothing at intervals, so that only
// CloudWatch's windows determine when something happens.
var rare = map[string]any{"worker_auto_pause_snooze_minutes": 0, "worker_metrics_interval": 86400, "idle_detection_interval": 3600,
	"worker_activity_detection_interval": 86400}

// createLoaded creates n workers judged by their load alone, and waits until
// they run.
func (r *rig) createLoaded(n int, timeout time.Duration) []string {
	r.t.Helper()
	var ids []string
	for i := range n {
		w, err := r.fleet.CreateWorker(r.t.Context(), operator, fleet.NewWorker{Name: "n" + strconv.Itoa(i), AWSRegion: region0, TemplateName: "small"})
		if err == nil {
			_, err = r.fleet.UpdateWorker(r.t.Context(), operator, w.ID, 0, worker.Profile{IdleTimeoutMinutes: new(int(timeout.Minutes())), ActivitySources: []string{worker.SourceCloudWatch}})
		}
		if err != nil {
			r.t.Fatal(err)
		}
		ids = append(ids, w.ID)
	}
	for _, id := range ids {
		r.await(id, power.WorkerRunning, 5*time.Minute)
	}
	return ids
}

// loadReading returns the last reading of a worker's load; its state is unknown
// if there is none.
func (r *rig) loadReading(id string) idle.Reading {
	if l, ok := r.c.Live(id); ok && l.Idle != nil {
		for _, is := range l.Idle.Readings {
			if is.Signal == worker.SourceCloudWatch {
				return is
			}
		}
	}
	return idle.NotKnown(worker.SourceCloudWatch, time.Time{}, "")
}

// TestFinalCheckReadsLoad checks that the final check before a stop reads CloudWatch
// again, once for all workers that wait for it, and that it accepts only a reading of
// at most two windows' age, whatever the settings. The load falls at the end of a
// window, so the pause is decided just as another window ends, half a minute before
// that window would be read anyway.
func TestFinalCheckReadsLoad(t *testing.T) {
	const workers = 5
	for _, c := range []struct {
		name    string
		timeout time.Duration
		load    func(end time.Duration) (cpu float64, there bool) // the window that ends at this time after the beginning
		fails   bool                                              // CloudWatch fails from the last regular read to the final check
		stopped bool
		block   idle.Code // the block that calls the pause off
	}{
		{name: "stays quiet", timeout: 15 * time.Minute, stopped: true,
			load: func(end time.Duration) (float64, bool) {
				return map[bool]float64{true: 90, false: 1}[end <= time.Hour], true
			}},
		{name: "turned active", timeout: 15 * time.Minute, block: idle.SignalActive,
			load: func(end time.Duration) (float64, bool) {
				return map[bool]float64{true: 90, false: 1}[end <= time.Hour || end >= 75*time.Minute], true
			}},
		{name: "cannot be read", timeout: 15 * time.Minute, fails: true, block: idle.SignalUnknown,
			load: func(end time.Duration) (float64, bool) {
				return map[bool]float64{true: 90, false: 1}[end <= time.Hour], true
			}},
		{name: "has no new window", timeout: 20 * time.Minute, // unknown before a pause is decided
			load: func(end time.Duration) (float64, bool) {
				return map[bool]float64{true: 90, false: 1}[end <= 55*time.Minute], end <= time.Hour
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				var read time.Time // when CloudWatch was last read, under the world's lock
				var reads []time.Time
				w := newWorld(1)
				w.cpu = new(0.0)
				w.load = func(_ string, end time.Time) (float64, bool) {
					if now := time.Now(); !now.Equal(read) {
						read, reads = now, append(reads, now)
					}
					return c.load(end.Sub(begun))
				}
				stops := 0
				w.onStop = func(id string, sent time.Time) {
					w.mu.Lock()
					defer w.mu.Unlock()
					stops++
					if age := sent.Sub(read); age > loadFresh {
						t.Errorf("the stop of %s was sent %s after CloudWatch was read", id, age)
					}
				}
				r := newRig(t, options{world: w, settings: rare})
				defer r.stop()
				ids := r.createLoaded(workers, c.timeout)
				const decided = 75 * time.Minute
				time.Sleep(decided - 2*time.Minute - time.Since(begun))
				for _, id := range ids {
					if is := r.loadReading(id); is.State == idle.Active || time.Duration(is.MaxAge) != 2*loadPeriod {
						t.Errorf("before the pause is due, %s reads %s with a maximum age of %s", id, is.State, time.Duration(is.MaxAge))
					}
				}
				w.mu.Lock()
				if c.fails {
					w.loadErr = errors.New("CloudWatch is down")
				}
				w.mu.Unlock()
				time.Sleep(2*time.Minute + 20*time.Second) // ends before the next regular read
				w.mu.Lock()
				n := len(slices.DeleteFunc(slices.Clone(reads), func(at time.Time) bool { return at.Sub(begun) < decided }))
				w.mu.Unlock()
				if most := 2; n > most || c.stopped && n == 0 {
					t.Errorf("the final checks of %d workers read CloudWatch %d times, want at most %d", workers, n, most)
				}
				time.Sleep(4 * time.Minute)
				for _, id := range ids {
					if c.stopped {
						r.await(id, power.WorkerStopped, 0)
						continue
					}
					r.await(id, power.WorkerRunning, 0)
					if c.block == "" {
						continue
					}
					page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "pause_cancelled"})
					if err != nil || len(page.Entries) == 0 || page.Entries[0].Decision == nil {
						t.Errorf("no pause of %s was called off by a decision: %v", id, err)
						continue
					}
					if v := page.Entries[0].Decision.Verdict; !slices.ContainsFunc(v.Blocks, func(b idle.Block) bool { return b.Code == c.block && b.Signal == worker.SourceCloudWatch }) {
						t.Errorf("the pause of %s was called off by %v, want %s", id, v.Blocks, c.block)
					}
				}
				if want := map[bool]int{true: workers}[c.stopped]; stops != want {
					t.Errorf("%d stops were sent, want %d", stops, want)
				}
			})
		})
	}
}

// TestNewWindowsWakeTheWorker checks that a worker judges each CloudWatch window as
// soon as the window can be read, however rare the worker's checks are, and that a
// restarted controller reads its workers' load at once.
func TestNewWindowsWakeTheWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(1)
		w.cpu, w.cpuLag = new(0.0), 40*time.Second
		w.load = func(_ string, end time.Time) (float64, bool) { return float64(end.Minute()), true }
		r := newRig(t, options{world: w, settings: rare})
		defer func() { r.stop() }()
		id := r.createLoaded(1, 10*time.Hour)[0]
		time.Sleep(10 * time.Minute)
		worst := time.Duration(0)
		for range 3600 {
			time.Sleep(time.Second)
			// The oldest window that is readable and not judged yet ended one period
			// after the last reading.
			if late := time.Since(r.loadReading(id).At.Add(loadPeriod + w.cpuLag)); late > worst {
				worst = late
			}
		}
		t.Logf("a window is judged at most %s after it can be read", worst)
		if most := loadPoll + 3*loadTick; worst > most {
			t.Errorf("a window was judged %s after it could be read, want at most %s", worst, most)
		}
		for range 5 {
			r.stop()
			time.Sleep(time.Minute)
			r.run(r.db.Client(), options{settings: rare, server: "server-1"})
			began := time.Now()
			for r.loadReading(id).State == idle.Unknown && time.Since(began) < 10*time.Minute {
				time.Sleep(time.Second)
			}
			// The controller takes the workers over, lists the region and reads the
			// load. A worker whose load was read before it was listed waits for the
			// next poll.
			if took, most := time.Since(began), loadPoll+3*loadTick; took > most {
				t.Errorf("%s after the restart its load is judged, want at most %s", took, most)
			}
		}
	})
}
