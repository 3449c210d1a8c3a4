package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"lull/internal/host"
	"lull/internal/lib/errtest"
)

// metricNames matches the names of lull's metrics in an expression.
var metricNames = regexp.MustCompile(`\blull_[a-z_]+`)

// TestRulesAndDashboard checks that every metric that the alert rules and the
// dashboard use is exported by a server or a host, with the labels that they use.
func TestRulesAndDashboard(t *testing.T) {
	l, err := newCLI(nil, nil, nil, func(string) string { return "" }).serverMetrics()
	if err != nil {
		t.Fatal(err)
	}
	local, err := catalogue(hostMetrics(host.New(host.Config{Runtimes: map[string]host.Runtime{"process": nil}})))
	if err != nil {
		t.Fatal(err)
	}
	l = append(l, local...)
	known := map[string]metricInfo{}
	for _, m := range l {
		known[m.Name] = m
		if m.Help == "" || m.Kind == "" {
			t.Errorf("%s says nothing of itself: %+v", m.Name, m)
		}
		if m.Kind == "histogram" {
			for _, s := range []string{"_bucket", "_sum", "_count"} {
				known[m.Name+s] = m
			}
		}
	}
	for _, want := range []string{"lull_resume_seconds", "lull_would_be_false_pause_total", "lull_idle_hours_not_avoided_total", "lull_unknown_signal_count", "lull_notify_pending", "lull_instance_wake_seconds"} {
		if _, ok := known[want]; !ok {
			t.Errorf("the catalogue has no %s", want)
		}
	}
	exprs := append(ruleExprs(t), panelExprs(t)...)
	if len(exprs) < 20 {
		t.Errorf("%d expressions only", len(exprs))
	}
	by := regexp.MustCompile(`by \(([a-z_, ]+)\)|\{([a-z_]+)=`)
	for _, e := range exprs {
		names := metricNames.FindAllString(e, -1)
		if len(names) == 0 && !strings.HasPrefix(e, "up{") {
			t.Errorf("%s names no metric of lull's", e)
		}
		for _, n := range names {
			m, ok := known[n]
			if !ok {
				t.Errorf("%s: there is no metric %s", e, n)
			}
			for _, b := range by.FindAllStringSubmatch(e, -1) {
				for label := range strings.SplitSeq(b[1]+b[2], ",") {
					label = strings.TrimSpace(label)
					if label != "le" && label != "instance" && label != "outcome" && !slices.Contains(m.Labels, label) {
						t.Errorf("%s: %s has no label %s", e, n, label)
					}
				}
			}
		}
	}
}

func ruleExprs(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, r := range alerts(t) {
		if r.Alert == "" || r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("a rule lacks a part: %+v", r)
		}
		out = append(out, r.Expr)
	}
	return out
}

// alerts returns the rules of etc/prometheus-rules.yaml.
func alerts(t *testing.T) (out []rule) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	errtest.None(t, yaml.Unmarshal([]byte(contents(t, "../../etc/prometheus-rules.yaml")), &file))
	for _, g := range file.Groups {
		out = append(out, g.Rules...)
	}
	return out
}

func panelExprs(t *testing.T) []string {
	t.Helper()
	var board struct {
		Title  string
		Panels []struct {
			ID      int
			Title   string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr string }
		}
	}
	errtest.None(t, json.Unmarshal([]byte(contents(t, "../../etc/grafana-dashboard.json")), &board))
	var out []string
	for _, p := range board.Panels {
		if p.Title == "" || len(p.Targets) == 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("a panel lacks a part: %+v", p)
		}
		for _, target := range p.Targets {
			out = append(out, target.Expr)
		}
	}
	return out
}

// TestRulesParse checks with promtool that the alert rules, and the expressions in
// the dashboard, parse.
func TestRulesParse(t *testing.T) {
	tool := need(t, "promtool")
	sh(t, tool, "check", "rules", "../../etc/prometheus-rules.yaml")
	var b strings.Builder
	b.WriteString("groups:\n- name: panels\n  rules:\n")
	for i, e := range panelExprs(t) {
		quoted, err := json.Marshal(e)
		errtest.None(t, err)
		fmt.Fprintf(&b, "  - {record: panel_%d, expr: %s}\n", i, quoted)
	}
	name := t.TempDir() + "/panels.yaml"
	errtest.None(t, os.WriteFile(name, []byte(b.String()), 0o600))
	sh(t, tool, "check", "rules", name)
	broken := t.TempDir() + "/broken.yaml"
	errtest.None(t, os.WriteFile(broken, []byte("groups:\n- name: broken\n  rules:\n  - {record: broken, expr: \"sum(up\"}\n"), 0o600))
	if out, err := exec.Command(tool, "check", "rules", broken).CombinedOutput(); err == nil {
		t.Errorf("it would not notice: %s", out)
	}
}
