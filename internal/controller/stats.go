package controller

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Stats are counters since the start of this process, and the number of RUNNING
// workers that it knows.
type Stats struct {
	Provisioned         int64 `json:"provisioned_count"`
	Started             int64 `json:"started_count"`
	Stopped             int64 `json:"stopped_count"`
	Terminated          int64 `json:"terminated_count"`
	MetricsCollected    int64 `json:"metrics_collected_count"`
	IdleDetection       int64 `json:"idle_detection_count"`
	AutoPause           int64 `json:"auto_pause_count"`
	LicenseRegistered   int64 `json:"license_registered_count"`
	LicenseDeregistered int64 `json:"license_deregistered_count"`
	ScaleDownDrain      int64 `json:"scale_down_drain_count"`
	RunningWorkers      int64 `json:"running_worker_count"`
	UnknownSignal       int64 `json:"unknown_signal_count"`

	// Additional counters.
	LateActivity   int64            `json:"late_activity_count"`
	LateActions    int64            `json:"late_action_count"`
	PauseCancelled int64            `json:"pause_cancelled_count"`
	WouldPause     int64            `json:"would_pause_count"` // in dry run
	FutureEvents   int64            `json:"future_event_count"`
	Malformed      int64            `json:"malformed_event_count"`
	Skipped        map[string]int64 `json:"skipped"` // by the arbiter's guard
	Results        map[string]int64 `json:"results"` // by result of a reconciliation
	CloudCalls     map[string]int64 `json:"cloud_calls"`
	StaleRecords   int64            `json:"unreadable_record_count"`
}

// counters holds the values behind Stats.
type counters struct {
	provisioned, started, stopped, terminated, metrics, detections, autoPause,
	registered, deregistered, drains, unknown, lateActivity, lateActions, cancelled,
	wouldPause, future, malformed, unreadable atomic.Int64

	skipped, results, calls tally
}

// tally counts by name. It has room for 32 names.
type tally struct {
	m [32]struct {
		name atomic.Pointer[string]
		n    atomic.Int64
	}
}

func (t *tally) add(name string) {
	for i := range t.m {
		p := t.m[i].name.Load()
		if p == nil {
			n := name
			if t.m[i].name.CompareAndSwap(nil, &n) {
				p = &n
			} else {
				p = t.m[i].name.Load()
			}
		}
		if *p == name {
			t.m[i].n.Add(1)
			return
		}
	}
}

func (t *tally) snapshot() map[string]int64 {
	out := map[string]int64{}
	for i := range t.m {
		if p := t.m[i].name.Load(); p != nil {
			out[*p] = t.m[i].n.Load()
		}
	}
	return out
}

// Stats returns the current values.
func (c *Controller) Stats() Stats {
	n := &c.count
	return Stats{
		Provisioned: n.provisioned.Load(), Started: n.started.Load(), Stopped: n.stopped.Load(), Terminated: n.terminated.Load(),
		MetricsCollected: n.metrics.Load(), IdleDetection: n.detections.Load(), AutoPause: n.autoPause.Load(),
		LicenseRegistered: n.registered.Load(), LicenseDeregistered: n.deregistered.Load(), ScaleDownDrain: n.drains.Load(),
		RunningWorkers: c.running(), UnknownSignal: n.unknown.Load(), LateActivity: n.lateActivity.Load(),
		LateActions: n.lateActions.Load(), PauseCancelled: n.cancelled.Load(), WouldPause: n.wouldPause.Load(),
		FutureEvents: n.future.Load(), Malformed: n.malformed.Load(), StaleRecords: n.unreadable.Load(),
		Skipped: n.skipped.snapshot(), Results: n.results.snapshot(), CloudCalls: n.calls.snapshot(),
	}
}

// Collector returns Stats as Prometheus metrics, with the prefix lull_.
func (c *Controller) Collector() prometheus.Collector { return collector{c} }

type collector struct{ c *Controller }

var labelled = map[string]*prometheus.Desc{
	"skipped":     prometheus.NewDesc("lull_skipped_count", "Automatic actions that a guard kept from happening.", []string{"guard"}, nil),
	"results":     prometheus.NewDesc("lull_reconcile_count", "Reconciliations by result.", []string{"result"}, nil),
	"cloud_calls": prometheus.NewDesc("lull_cloud_call_count", "Calls to the cloud by kind.", []string{"call"}, nil),
}

// unread exists for each region of an account with workers.
var unread = prometheus.NewDesc("lull_region_unread", "1 while the EC2 API cannot be read in a region that has workers, by region and account.", []string{"region", "account"}, nil)

// plain are the counters without labels.
var plain = []struct {
	name, help string
	kind       prometheus.ValueType
	of         func(*Stats) int64
}{
	{"provisioned_count", "EC2 instances launched.", prometheus.CounterValue, func(s *Stats) int64 { return s.Provisioned }},
	{"started_count", "EC2 instances confirmed running.", prometheus.CounterValue, func(s *Stats) int64 { return s.Started }},
	{"stopped_count", "EC2 instances confirmed stopped.", prometheus.CounterValue, func(s *Stats) int64 { return s.Stopped }},
	{"terminated_count", "EC2 instances confirmed terminated.", prometheus.CounterValue, func(s *Stats) int64 { return s.Terminated }},
	{"metrics_collected_count", "Metrics collections completed.", prometheus.CounterValue, func(s *Stats) int64 { return s.MetricsCollected }},
	{"idle_detection_count", "Idle checks performed.", prometheus.CounterValue, func(s *Stats) int64 { return s.IdleDetection }},
	{"auto_pause_count", "Automatic pauses triggered.", prometheus.CounterValue, func(s *Stats) int64 { return s.AutoPause }},
	{"license_registered_count", "License registrations completed.", prometheus.CounterValue, func(s *Stats) int64 { return s.LicenseRegistered }},
	{"license_deregistered_count", "License deregistrations completed.", prometheus.CounterValue, func(s *Stats) int64 { return s.LicenseDeregistered }},
	{"scale_down_drain_count", "Drains begun by scale-down.", prometheus.CounterValue, func(s *Stats) int64 { return s.ScaleDownDrain }},
	{"running_worker_count", "Workers that are RUNNING.", prometheus.GaugeValue, func(s *Stats) int64 { return s.RunningWorkers }},
	{"unknown_signal_count", "Idle checks with an unknown signal.", prometheus.CounterValue, func(s *Stats) int64 { return s.UnknownSignal }},
	{"late_activity_count", "Activity that was reported only after the final check before a pause.", prometheus.CounterValue, func(s *Stats) int64 { return s.LateActivity }},
	{"late_action_count", "Calls that took effect after they were given up, and were repaired.", prometheus.CounterValue, func(s *Stats) int64 { return s.LateActions }},
	{"pause_cancelled_count", "Pauses canceled by the final check.", prometheus.CounterValue, func(s *Stats) int64 { return s.PauseCancelled }},
	{"would_pause_count", "Pauses prevented by dry-run mode.", prometheus.CounterValue, func(s *Stats) int64 { return s.WouldPause }},
	{"future_event_count", "Telemetry events dated in the future.", prometheus.CounterValue, func(s *Stats) int64 { return s.FutureEvents }},
	{"malformed_event_count", "Telemetry events that could not be read.", prometheus.CounterValue, func(s *Stats) int64 { return s.Malformed }},
	{"unreadable_record_count", "Records that could not be read.", prometheus.CounterValue, func(s *Stats) int64 { return s.StaleRecords }},
}

func descOf(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("lull_"+name, help, nil, nil)
}

// Describe implements prometheus.Collector.
func (k collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range plain {
		ch <- descOf(m.name, m.help)
	}
	for _, d := range labelled {
		ch <- d
	}
	ch <- unread
	for _, c := range k.c.measure.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (k collector) Collect(ch chan<- prometheus.Metric) {
	s := k.c.Stats()
	for _, m := range plain {
		ch <- prometheus.MustNewConstMetric(descOf(m.name, m.help), m.kind, float64(m.of(&s)))
	}
	for name, values := range map[string]map[string]int64{"skipped": s.Skipped, "results": s.Results, "cloud_calls": s.CloudCalls} {
		for label, v := range values {
			ch <- prometheus.MustNewConstMetric(labelled[name], prometheus.CounterValue, float64(v), label)
		}
	}
	for r, is := range k.c.unreadRegions() {
		v := 0.0
		if is {
			v = 1
		}
		ch <- prometheus.MustNewConstMetric(unread, prometheus.GaugeValue, v, r.name, r.account)
	}
	for _, c := range k.c.measure.all() {
		c.Collect(ch)
	}
}
