package controller

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"lull/internal/core/power"
	"lull/internal/lib/errtest"
)

// measured returns a metric of r's controller: the count and sum of a histogram, or
// the value of a counter in sum. label is the value of its only label.
func (r *rig) measured(name, label string) (n uint64, sum float64) {
	r.t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(r.c.Collector())
	families, err := reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() != name || label != "" && (len(m.GetLabel()) == 0 || m.GetLabel()[0].GetValue() != label) {
				continue
			}
			if f.GetType() == dto.MetricType_HISTOGRAM {
				return m.GetHistogram().GetSampleCount(), m.GetHistogram().GetSampleSum()
			}
			return 0, m.GetCounter().GetValue()
		}
	}
	return 0, 0
}

// TestResumeIsMeasured checks that a resume is measured once from its request
// to RUNNING and once to CML ready, that a launch is no resume, and that idle
// hours during a snooze are counted with that cause.
func TestResumeIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"worker_warn_before_minutes": 0, "worker_auto_pause_snooze_minutes": 0}})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(time.Minute)
		if n, _ := r.measured("lull_resume_seconds", stageRunning); n != 0 {
			t.Errorf("a launch is %d resumes", n)
		}
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerStopped, 5*time.Minute)
		asked := time.Now()
		errtest.Get(r.fleet.ResumeWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerRunning, 5*time.Minute)
		most := time.Since(asked).Seconds()
		time.Sleep(5 * time.Minute)
		n, running := r.measured("lull_resume_seconds", stageRunning)
		if n != 1 || running < 20 || running > most { // the world takes 20 s to start
			t.Errorf("%d resumes to RUNNING of %g s, want one of 20 to %g s", n, running, most)
		}
		if n, ready := r.measured("lull_resume_seconds", stageReady); n != 1 || ready < running || ready > running+60 {
			t.Errorf("%d resumes to CML of %g s, want one of a little more than %g", n, ready, running)
		}
		errtest.Get(r.fleet.SnoozeWorker(t.Context(), operator, id, time.Now().Add(5*time.Hour)))(t)
		time.Sleep(4 * time.Hour)
		if _, hours := r.measured("lull_idle_hours_not_avoided_total", "in_snooze_period"); hours < 3 || hours > 4.01 { // the last check is up to half an hour old
			t.Errorf("%g idle hours were not avoided for a snooze, want nearly the four that it was not in use", hours)
		}
	})
}

// TestFalsePauseInShadow checks that use soon after a would-be pause is counted, and
// only once.
func TestFalsePauseInShadow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{shadow: true})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(65 * time.Minute)
		if r.c.Stats().WouldPause == 0 {
			t.Fatal("nothing would have been paused")
		}
		m := r.machine(id)
		r.world.mu.Lock()
		m.events = append(m.events, cmlEvent{at: time.Now(), arrives: time.Now()})
		r.world.mu.Unlock()
		time.Sleep(20 * time.Minute)
		if _, n := r.measured("lull_would_be_false_pause_total", ""); n != 1 {
			t.Errorf("%g would-be false pauses, want one", n)
		}
	})
}
