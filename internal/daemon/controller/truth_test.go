package controller

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/fleet"
	"lull/internal/power"
	"lull/internal/sim/truth"
)

// TestTruthFleet: simulated users and loads, written down before the controller
// starts, define when a machine was in use. Whatever the sources, their delays
// and gaps are, and whatever settings change meanwhile, no automatic stop is
// sent within the timeout after use that the sources could show, nor earlier
// than the timeout after the machine started.
func TestTruthFleet(t *testing.T) {
	rounds := 4
	if n, err := strconv.Atoi(os.Getenv("LULL_TRUTH_ROUNDS")); err == nil {
		rounds = n
	}
	for range rounds {
		seed := uint64(time.Now().UnixNano())
		if n, err := strconv.ParseUint(os.Getenv("LULL_SEED"), 10, 64); err == nil {
			seed = n
		}
		t.Logf("LULL_SEED=%d", seed)
		stops := 0
		synctest.Test(t, func(t *testing.T) { stops = truthRound(t, seed) })
		t.Logf("%d automatic stops", stops)
	}
}

func truthRound(t *testing.T, seed uint64) (stops int) {
	rng := rand.New(rand.NewPCG(seed, 7))
	w := newWorld(seed)
	w.cpu = new(0.5)
	w.cpuLag = time.Duration(rng.IntN(240)) * time.Second
	lost := rng.Float64() / 20
	timeouts := []float64{2, 5, 15, 30, 60}
	minutes := timeouts[rng.IntN(len(timeouts))]
	timeout, changed := minutes, time.Now()
	const length = 12 * time.Hour
	var use truth.Use
	for _, s := range truth.Draw(rng, time.Now(), length, 2*time.Hour).Spans() {
		if s.To.Sub(s.From) < time.Minute { // shorter use can stay below the threshold of a window
			s.To = s.From.Add(time.Minute)
		}
		use = truth.Of(append(use.Spans(), s)...)
	}
	w.load = func(id string, end time.Time) (float64, bool) {
		r := rand.New(rand.NewPCG(seed, uint64(end.Unix())))
		return 1 + 60*use.Share(end.Add(-loadPeriod), end), r.Float64() >= lost
	}
	r := newRig(t, options{world: w, settings: map[string]any{"worker_auto_pause_snooze_minutes": 0, "worker_warn_before_minutes": 1, "worker_idle_timeout_minutes": int(minutes)}})
	defer r.stop()
	id := r.create().ID
	sources := [][]string{{fleet.SourceCloudWatch}, {fleet.SourceCML, fleet.SourceCloudWatch}}[rng.IntN(2)]
	r.profile(id, fleet.Profile{ActivitySources: sources})
	up := *r.await(id, power.WorkerRunning, 5*time.Minute).RunningSince
	w.onStop = func(_ string, sent time.Time) {
		is := r.worker(id)
		if !is.PauseReason.Automatic() {
			return
		}
		stops++
		after := timeout
		if sent.Sub(changed) < 2*time.Minute { // a change takes effect with the next check
			after = min(after, minutes)
		}
		// CloudWatch: the newest complete window may have ended two periods
		// ago, and use for 20 s of a window stays below the threshold.
		if err := use.Check(sent, time.Duration(after*float64(time.Minute))-20*time.Second, 3*loadPeriod); err != nil {
			t.Errorf("timeout %g min, sources %v, lag %s: %v", after, sources, w.cpuLag, err)
		}
		if ran := sent.Sub(*is.RunningSince); ran < time.Duration(after*float64(time.Minute)) {
			t.Errorf("stopped %s after it started, timeout %g min", ran, after)
		}
	}
	// Telemetry that came with the machine's image.
	m := r.machine(id)
	w.mu.Lock()
	m.events = append(m.events, cmlEvent{at: up.Add(-48 * time.Hour), arrives: up.Add(-time.Hour)})
	w.mu.Unlock()
	for end := time.Now().Add(length); time.Now().Before(end); time.Sleep(time.Minute) {
		is := r.worker(id)
		if is.Status == power.WorkerStopped && use.At(time.Now()) {
			if _, err := r.fleet.ResumeWorker(t.Context(), person, id); err != nil {
				t.Fatal(err)
			}
		}
		if use.At(time.Now()) && is.Status == power.WorkerRunning {
			r.use(id)
		}
		if rng.IntN(60) == 0 {
			minutes, changed = timeout, time.Now()
			timeout = timeouts[rng.IntN(len(timeouts))]
			r.profile(id, fleet.Profile{IdleTimeoutMinutes: new(int(timeout))})
		}
	}
	return stops
}
