package server

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/core/power"
)

// Collector returns metrics of the machines that reported to this server last and
// have fallen silent.
func (s *Server) Collector() prometheus.Collector { return silence{s} }

type silence struct{ s *Server }

var (
	silentAgents = prometheus.NewDesc("lull_silent_agents",
		"Agents that last reported to this server and then missed reports, although their machines were not stopped.", nil, nil)
	silentHosts = prometheus.NewDesc("lull_silent_hosts", "Hosts that reported to this server last and then missed reports.", nil, nil)
)

// Describe implements prometheus.Collector.
func (silence) Describe(ch chan<- *prometheus.Desc) { ch <- silentAgents; ch <- silentHosts }

// Collect implements prometheus.Collector. A count that is unknown because the
// store does not answer is omitted, not zero.
func (c silence) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for desc, count := range map[*prometheus.Desc]func(context.Context) (int, error){silentAgents: c.s.agentsSilent, silentHosts: c.s.hostsSilent} {
		if n, err := count(ctx); err == nil {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(n))
		}
	}
}

func (s *Server) agentsSilent(ctx context.Context) (n int, err error) {
	here := s.machines.list("agent", time.Now())
	silent := here[:0]
	for _, m := range here {
		if a := m.Agent().Action; m.Stale && (a == nil || a.Phase != "calling" && a.Phase != "accepted") {
			silent = append(silent, m)
		}
	}
	if len(silent) == 0 {
		return 0, nil
	}
	present, err := s.present(ctx, "agent")
	if err != nil {
		return 0, err
	}
	lines, _, err := s.roster.All(ctx)
	if err != nil {
		return 0, err
	}
	down := map[string]bool{}
	for _, l := range lines {
		down[l.Worker.ID] = l.Worker.Status != power.WorkerRunning
	}
	for _, m := range silent {
		if p, known := present[m.Name]; !down[m.WorkerID] && (!known || p.Server == s.name) {
			n++
		}
	}
	return n, nil
}

func (s *Server) hostsSilent(ctx context.Context) (n int, err error) {
	var present map[string]presence
	for _, h := range s.HostsHere() {
		if h.Heard {
			continue
		}
		if present == nil {
			if present, err = s.present(ctx, "host"); err != nil {
				return 0, err
			}
		}
		if p, known := present[h.Name]; !known || p.Server == s.name {
			n++
		}
	}
	return n, nil
}
