package controller

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
)

// measures are the metrics other than plain counts.
type measures struct {
	// resume is the duration of a resume from its request: until RUNNING, and
	// until CML is ready.
	resume *prometheus.HistogramVec
	// notAvoided are the hours that workers ran idle, by what kept them up.
	notAvoided *prometheus.CounterVec
	// falsePause counts would-be pauses in dry run that were followed by use
	// within evidence.FalseStop.
	falsePause prometheus.Counter
	// lateness is the delay of reports of activity that would have prevented a
	// pause.
	lateness prometheus.Histogram
}

// Stages of a resume, as named in the histogram.
const (
	stageRunning = "running"
	stageReady   = "cml_ready"
)

// After a resume, CML is asked every readyEvery whether it is ready, for at most
// readyWithin.
const (
	readyEvery  = 10 * time.Second
	readyWithin = time.Hour
)

func newMeasures() measures {
	m := measures{
		resume: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "lull_resume_seconds",
			Help:    "Seconds from when a resume was asked for until the worker was RUNNING (stage running) and until its CML said that it is ready (stage cml_ready).",
			Buckets: []float64{5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200}}, []string{"stage"}),
		notAvoided: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lull_idle_hours_not_avoided_total",
			Help: "Hours that workers ran idle, by what kept them running, as in the savings: the code of a block, or about_to_be_paused."}, []string{"cause"}),
		falsePause: prometheus.NewCounter(prometheus.CounterOpts{Name: "lull_would_be_false_pause_total",
			Help: "Pauses prevented by dry-run mode that were followed by activity within 15 minutes, the default window of a simulation."}),
		lateness: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "lull_late_activity_delay_seconds",
			Help:    "Seconds from an activity until it was reported, for activity that would have prevented a pause but was reported after it.",
			Buckets: []float64{60, 300, 900, 1800, 3600, 2 * 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600}}),
	}
	for _, s := range []string{stageRunning, stageReady} {
		m.resume.WithLabelValues(s)
	}
	return m
}

func (m measures) all() []prometheus.Collector {
	return []prometheus.Collector{m.resume, m.notAvoided, m.falsePause, m.lateness}
}

// resumed observes the duration of a resume that has just been confirmed. asked is
// when it was requested; nil means that this was no resume. awaitReady measures the
// part until CML is ready.
func (j *job) resumed(asked *time.Time) {
	if asked == nil {
		return
	}
	j.c.measure.resume.WithLabelValues(stageRunning).Observe(time.Since(*asked).Seconds())
	j.live.resumeAsked = *asked
}

// awaitReady asks CML whether it is ready, if a resume is still waiting for that.
func (j *job) awaitReady(ctx context.Context) {
	asked := j.live.resumeAsked
	switch {
	case asked.IsZero() || j.now.Before(j.live.readyAt):
		return
	case j.now.Sub(asked) > readyWithin:
		j.live.resumeAsked = time.Time{} // give up; the worker is shown as not ready
		return
	}
	j.live.readyAt = j.now.Add(readyEvery)
	console, err := j.c.cfg.Consoles(j.w)
	if err != nil {
		return
	}
	call, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	s, err := console.System(call)
	if err != nil || !s.Ready {
		return
	}
	j.live.system, j.live.systemAt, j.live.systemErr = s, time.Now(), ""
	j.c.measure.resume.WithLabelValues(stageReady).Observe(time.Since(asked).Seconds())
	j.traceReady(ctx)
	j.live.resumeAsked = time.Time{}
}

// idled adds the time since the last check to the idle hours that were not avoided,
// under the cause that the last check found.
func (j *job) idled(v idle.Verdict) {
	last := j.live.verdict
	if last == nil {
		return
	}
	cause := evidence.KeptUp(last, time.Duration(j.rules().CheckInterval), last.At)
	if d := v.At.Sub(last.At); cause != "" && d > 0 && d < 24*time.Hour {
		j.c.measure.notAvoided.WithLabelValues(cause).Add(d.Hours())
	}
}

// wouldBeFalse counts the last would-be pause as false if activity at newest followed
// it within evidence.FalseStop.
func (j *job) wouldBeFalse(newest time.Time) {
	at := j.live.wouldAt
	if at.IsZero() || !newest.After(at) {
		return
	}
	if newest.Sub(at) < evidence.FalseStop {
		j.c.measure.falsePause.Inc()
	}
	j.live.wouldAt = time.Time{}
}
