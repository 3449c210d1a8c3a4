// Package metrics provides Prometheus metrics about the instances of a host.
package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// Host provides the values of gauges when they are scraped.
type Host interface {
	List(memory bool) []hostctl.Instance
	Capacity() hostctl.Capacity
	Halted() *idle.HaltedBy
}

// Metrics holds the metrics of a host. It implements prometheus.Collector.
type Metrics struct {
	host     Host
	runtimes []string
	wakes    *prometheus.HistogramVec
	events   *prometheus.CounterVec
}

// failures are the event types that alerts use. Their counters exist from the
// start: a counter that appears only with the first event would show no increase.
var failures = []string{"start_failed", "pause_failed", "hibernate_failed", "wake_failed"}

// wakesFrom are the states from which an instance is woken or started.
var wakesFrom = []power.Instance{power.Paused, power.Reclaimed, power.Hibernated, power.Stopped}

// New returns the metrics of a host with these runtimes.
func New(h Host, runtimes []string) *Metrics {
	m := &Metrics{host: h, runtimes: runtimes,
		wakes: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "lull_instance_wake_seconds",
			Help:    "Seconds from the first request of a client or user for an instance that was not running until it ran, by the state it was woken from. Includes waiting for memory or a boot slot. An instance whose snapshot does not fit counts as woken from stopped.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 120}}, []string{"runtime", "from"}),
		events: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lull_instance_events_total",
			Help: "Events of instances, by type as in lull events."}, []string{"type"}),
	}
	for _, name := range runtimes {
		for _, s := range wakesFrom {
			m.wakes.WithLabelValues(name, string(s))
		}
	}
	for _, kind := range failures {
		m.events.WithLabelValues(kind)
	}
	return m
}

// Woken records that an instance of a runtime runs again, after the given time
// since the first request, from the given state.
func (m *Metrics) Woken(runtime string, from power.Instance, after time.Duration) {
	m.wakes.WithLabelValues(runtime, string(from)).Observe(after.Seconds())
}

// Event counts an event of the given type.
func (m *Metrics) Event(kind string) { m.events.WithLabelValues(kind).Inc() }

var (
	instancesDesc = prometheus.NewDesc("lull_instances", "Instances, by runtime and state.", []string{"runtime", "state"}, nil)
	memoryDesc    = prometheus.NewDesc("lull_instance_memory_bytes", "Memory that instances hold, by runtime and state.", []string{"runtime", "state"}, nil)
	budgetDesc    = prometheus.NewDesc("lull_host_memory_budget_bytes", "Memory that instances of a known size may hold together; 0 if unlimited.", nil, nil)
	freeDesc      = prometheus.NewDesc("lull_host_memory_free_bytes", "Free part of lull_host_memory_budget_bytes; 0 if unlimited.", nil, nil)
	waitingDesc   = prometheus.NewDesc("lull_host_waiting", "Starts and wakes queued for memory or for a slot.", nil, nil)
	pushedDesc    = prometheus.NewDesc("lull_host_pushed_total", "Instances put into a deeper sleep to free memory for others.", nil, nil)
	haltedDesc    = prometheus.NewDesc("lull_host_halted", "1 while all automatic actions of the host are halted.", nil, nil)
)

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(out chan<- *prometheus.Desc) {
	m.wakes.Describe(out)
	m.events.Describe(out)
	for _, d := range []*prometheus.Desc{instancesDesc, memoryDesc, budgetDesc, freeDesc, waitingDesc, pushedDesc, haltedDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(out chan<- prometheus.Metric) {
	m.wakes.Collect(out)
	m.events.Collect(out)
	type group struct{ runtime, state string }
	count, held := map[group]int{}, map[group]int64{}
	for _, name := range m.runtimes {
		count[group{name, string(power.Running)}] = 0
	}
	for _, o := range m.host.List(true) {
		g := group{o.Runtime, o.State}
		count[g]++
		held[g] += o.MemoryBytes
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for g, n := range count {
		gauge(instancesDesc, float64(n), g.runtime, g.state)
		gauge(memoryDesc, float64(held[g]), g.runtime, g.state)
	}
	room := m.host.Capacity()
	gauge(budgetDesc, float64(room.Memory))
	gauge(freeDesc, float64(room.Free))
	gauge(waitingDesc, float64(room.Waiting))
	out <- prometheus.MustNewConstMetric(pushedDesc, prometheus.CounterValue, float64(room.Pushed))
	gauge(haltedDesc, map[bool]float64{true: 1}[m.host.Halted() != nil])
}
