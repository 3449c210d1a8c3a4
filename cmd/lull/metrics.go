package main

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/fleet"
	"lull/internal/server"
)

// metricInfo is one row of the metrics catalogue.
type metricInfo struct {
	Name, Kind, Help string
	Labels           []string
}

// describedMetric parses the text of a prometheus.Desc, which is the only form in
// which a Desc shows its content.
var describedMetric = regexp.MustCompile(`fqName: "([^"]+)", help: ("(?:[^"\\]|\\.)*"), (?:unit: "[^"]*", )?constLabels: \{[^}]*\}, variableLabels: \{([^}]*)\}`)

// catalogue lists lull's own metrics in a registry, by name.
func catalogue(reg *prometheus.Registry) ([]metricInfo, error) {
	kinds := map[string]string{}
	families, err := reg.Gather()
	if err != nil {
		return nil, fmt.Errorf("cannot read the metrics: %w", err)
	}
	for _, f := range families {
		kinds[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	descs := make(chan *prometheus.Desc)
	go func() { reg.Describe(descs); close(descs) }()
	found := map[string]metricInfo{}
	var texts []string
	for d := range descs { // drain it: Describe blocks otherwise
		texts = append(texts, d.String())
	}
	for _, text := range texts {
		m := describedMetric.FindStringSubmatch(text)
		if m == nil || !strings.HasPrefix(m[1], "lull_") {
			continue
		}
		help, err := strconv.Unquote(m[2])
		if err != nil {
			return nil, fmt.Errorf("cannot read the description of %s: %w", m[1], err)
		}
		row := metricInfo{Name: m[1], Help: help, Kind: kinds[m[1]]}
		if m[3] != "" {
			row.Labels = strings.Split(m[3], ",")
		}
		if row.Kind == "" { // a metric without a value yet
			row.Kind = "gauge"
			if strings.HasSuffix(row.Name, "_total") || strings.HasSuffix(row.Name, "_count") {
				row.Kind = "counter"
			}
		}
		found[row.Name] = row
	}
	out := make([]metricInfo, 0, len(found))
	for _, name := range slices.Sorted(maps.Keys(found)) {
		out = append(out, found[name])
	}
	return out, nil
}

// serverMetrics returns the metrics of lull server.
func (c *cli) serverMetrics() ([]metricInfo, error) {
	f, err := fleet.New(fleet.Options{ID: "reference"}) // with no store, because none is read
	if err != nil {
		return nil, err
	}
	log := slog.New(slog.DiscardHandler)
	dir, err := os.MkdirTemp("", "lull-metrics") // a journal needs a directory; nothing is written to it
	if err != nil {
		return nil, fmt.Errorf("cannot list the metrics: %w", err)
	}
	defer os.RemoveAll(dir)
	cfg := defaultServerConfig(c.Getenv)
	cfg.Data = dir
	plane, err := c.newControl(cfg, f, nil, log)
	if err != nil {
		return nil, err
	}
	note, err := c.newNotifier(cfg, f, nil, log)
	if err != nil {
		return nil, err
	}
	api, err := server.New(server.Options{Fleet: f, Version: "1"})
	if err != nil {
		return nil, err
	}
	plane.metrics.MustRegister(note, api.Collector())
	return catalogue(plane.metrics)
}

// metricsPage returns the generated reference of the metrics of a server and of a
// host.
func metricsPage(server, host []metricInfo) []byte {
	var b strings.Builder
	b.WriteString("# Metrics\n\nGenerated from what the daemons register. Both serve them in Prometheus' format at `/metrics`, with those of the Go runtime and the\nprocess (`go_*`, `process_*`). Counters start at zero with the process. Alert rules and a dashboard:\netc/prometheus-rules.yaml, etc/grafana-dashboard.json.\n\n## lull server\n\nNeeds a viewer's token. Each server counts its own actions.\n\n")
	writeMetrics(&b, server)
	b.WriteString("\n## lull host\n\nServed on the API's socket, and at the address of `lull host --metrics`, which serves nothing else and needs no token.\n\n")
	writeMetrics(&b, host)
	return []byte(b.String())
}

func writeMetrics(b *strings.Builder, l []metricInfo) {
	b.WriteString("| metric | kind | labels | meaning |\n|---|---|---|---|\n")
	for _, m := range l {
		labels := ""
		if len(m.Labels) > 0 {
			labels = "`" + strings.Join(m.Labels, "`, `") + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", m.Name, m.Kind, labels, m.Help)
	}
}
