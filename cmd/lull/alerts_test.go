package main

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"testing"

	"go.yaml.in/yaml/v3"
)

// rule is one alert in etc/prometheus-rules.yaml.
type rule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

// firing is a case in which an alert must fire. series are in promtool's notation,
// one sample per minute. The alert fires by at, and does not fire at the times in
// not.
type firing struct {
	series map[string]string
	at     string
	not    []string
	labels map[string]string // labels of the alert, except for the severity
}

// Labels that Prometheus and lull add to a series.
var (
	ofServer  = map[string]string{"instance": "a", "job": "lull"}
	ofChannel = map[string]string{"instance": "a", "job": "lull", "channel": "ops"}
	ofRegion  = with(ofServer, "region", "eu-west-9")
	ofRuntime = map[string]string{"instance": "a", "runtime": "microvm"}
)

// grew returns the case of a counter that grows once, after half an hour.
func grew(name string, labels map[string]string) firing {
	return firing{series: map[string]string{seriesOf(name, labels): "0x30 1x120"}, at: "35m", not: []string{"29m", "100m"}, labels: labels}
}

func seriesOf(name string, labels map[string]string) string {
	s := name + "{"
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		s += k + `="` + labels[k] + `",`
	}
	return s + "}"
}

func with(m map[string]string, k, v string) map[string]string {
	out := map[string]string{k: v}
	maps.Copy(out, m)
	out[k] = v
	return out
}

// firings has the cases in which each alert must fire.
var firings = map[string][]firing{
	"LullServerDown": {{series: map[string]string{seriesOf("up", ofServer): "1x10 0x20"}, at: "14m", not: []string{"10m"}, labels: ofServer}},
	"LullHaltedLong": {{series: map[string]string{seriesOf("lull_halted", ofServer): "1x1500"}, at: "1441m", not: []string{"23h"}}},
	"LullSignalsUnknown": {{series: map[string]string{seriesOf("lull_unknown_signal_count", ofServer): "0x30 0+1x90 90x60"}, at: "70m", not: []string{"30m", "50m", "150m"},
		labels: ofServer}},
	"LullAgentsSilent": {{series: map[string]string{seriesOf("lull_silent_agents", ofServer): "0x10 2x60 0x60"}, at: "25m", not: []string{"10m", "19m", "80m"}, labels: ofServer}},
	"LullRegionUnread": {{series: map[string]string{seriesOf("lull_region_unread", ofRegion): "0x10 1x60 0x60"}, at: "25m", not: []string{"10m", "19m", "80m"}, labels: ofRegion}},
	"LullHostsSilent":  {{series: map[string]string{seriesOf("lull_silent_hosts", ofServer): "0x10 2x60 0x60"}, at: "25m", not: []string{"10m", "19m", "80m"}, labels: ofServer}},
	"LullFalsePause":   {grew("lull_late_activity_count", ofServer)},
	"LullLateAction":   {grew("lull_late_action_count", ofServer)},
	"LullResumesSlowly": {{series: map[string]string{
		seriesOf("lull_resume_seconds_bucket", map[string]string{"stage": "running", "le": "300"}):  "0x120",
		seriesOf("lull_resume_seconds_bucket", map[string]string{"stage": "running", "le": "600"}):  "0+1x120",
		seriesOf("lull_resume_seconds_bucket", map[string]string{"stage": "running", "le": "+Inf"}): "0+1x120",
	}, at: "30m", not: []string{"5m"}}},
	"LullRecordsUnreadable": {grew("lull_unreadable_record_count", ofServer), grew("lull_notify_unreadable_total", ofServer)},
	"LullReconcilesFail": {{series: map[string]string{
		seriesOf("lull_reconcile_count", with(ofServer, "result", "RETRY")):   "0+10x60",
		seriesOf("lull_reconcile_count", with(ofServer, "result", "SUCCESS")): "0+8x60",
	}, at: "30m", not: []string{"10m"}}},
	"LullNotificationsWait": {{series: map[string]string{
		seriesOf("lull_notify_pending", ofChannel):                               "0x10 3x90 0x30",
		seriesOf("lull_notify_messages_total", with(ofChannel, "outcome", "ok")): "5x130",
	}, at: "50m", not: []string{"30m", "110m"}, labels: ofChannel}},
	"LullNotificationsDead": {grew("lull_notify_dead_total", ofChannel)},
	"LullInstancesFail":     {grew("lull_instance_events_total", with(ofServer, "type", "wake_failed")), grew("lull_instance_events_total", with(ofServer, "type", "start_failed"))},
	"LullWakesSlowly": {{series: map[string]string{
		seriesOf("lull_instance_wake_seconds_bucket", with(with(ofRuntime, "from", "hibernated"), "le", "10")):   "0x120",
		seriesOf("lull_instance_wake_seconds_bucket", with(with(ofRuntime, "from", "hibernated"), "le", "30")):   "0+1x120",
		seriesOf("lull_instance_wake_seconds_bucket", with(with(ofRuntime, "from", "hibernated"), "le", "+Inf")): "0+1x120",
	}, at: "30m", not: []string{"5m"}, labels: ofRuntime}},
	"LullHostHaltedLong": {{series: map[string]string{seriesOf("lull_host_halted", ofServer): "1x1500"}, at: "1441m", not: []string{"23h"}, labels: ofServer}},
}

// quietNight has the metrics of a healthy fleet at night: nothing changes, except
// that a digest is sent each hour.
var quietNight = map[string]string{
	seriesOf("up", ofServer):                                                                          "1x600",
	seriesOf("lull_halted", ofServer):                                                                 "0x600",
	seriesOf("lull_unknown_signal_count", ofServer):                                                   "7x600",
	seriesOf("lull_silent_agents", ofServer):                                                          "0x300 1x4 0x300",
	seriesOf("lull_region_unread", with(ofServer, "region", "eu-west-9")):                             "0x300 1x4 0x300",
	seriesOf("lull_silent_hosts", ofServer):                                                           "0x600",
	seriesOf("lull_late_activity_count", ofServer):                                                    "1x600",
	seriesOf("lull_late_action_count", ofServer):                                                      "2x600",
	seriesOf("lull_resume_seconds_bucket", map[string]string{"stage": "running", "le": "300"}):        "9x600",
	seriesOf("lull_resume_seconds_bucket", map[string]string{"stage": "running", "le": "+Inf"}):       "10x600",
	seriesOf("lull_unreadable_record_count", ofServer):                                                "0x600",
	seriesOf("lull_notify_unreadable_total", ofServer):                                                "0x600",
	seriesOf("lull_reconcile_count", with(ofServer, "result", "RETRY")):                               "3x600",
	seriesOf("lull_reconcile_count", with(ofServer, "result", "SUCCESS")):                             "0+60x600",
	seriesOf("lull_notify_pending", ofChannel):                                                        "0x60 1 0x59 2 0x59 1 0x400",
	seriesOf("lull_notify_messages_total", with(ofChannel, "outcome", "ok")):                          "5x60 6x60 7x60 8x430",
	seriesOf("lull_notify_messages_total", with(with(ofChannel, "channel", "rare"), "outcome", "ok")): "0x600",
	seriesOf("lull_notify_pending", with(ofChannel, "channel", "rare")):                               "0x600",
	seriesOf("lull_notify_dead_total", ofChannel):                                                     "4x600",
	seriesOf("lull_instance_events_total", with(ofServer, "type", "wake_failed")):                     "2x600",
	seriesOf("lull_instance_events_total", with(ofServer, "type", "start_failed")):                    "0x600",
	seriesOf("lull_instance_events_total", with(ofServer, "type", "pause_cancelled")):                 "0+1x600",
	seriesOf("lull_host_halted", ofServer):                                                            "0x600",
	// Slow starts do not count as slow wakes.
	seriesOf("lull_instance_wake_seconds_bucket", with(with(ofRuntime, "from", "stopped"), "le", "10")):      "0x600",
	seriesOf("lull_instance_wake_seconds_bucket", with(with(ofRuntime, "from", "stopped"), "le", "+Inf")):    "0+1x600",
	seriesOf("lull_instance_wake_seconds_bucket", with(with(ofRuntime, "from", "hibernated"), "le", "10")):   "0+1x600",
	seriesOf("lull_instance_wake_seconds_bucket", with(with(ofRuntime, "from", "hibernated"), "le", "+Inf")): "0+1x600",
}

// TestAlertsFire runs the alert rules with promtool. It checks that each alert fires
// when it should and not before, and that none fires in a quiet night.
func TestAlertsFire(t *testing.T) {
	t.Parallel()
	tool := need(t, "promtool")
	rules := alerts(t)
	type series struct {
		Series string `yaml:"series"`
		Values string `yaml:"values"`
	}
	type alert struct {
		Labels      map[string]string `yaml:"exp_labels"`
		Annotations map[string]string `yaml:"exp_annotations"`
	}
	type check struct {
		At   string  `yaml:"eval_time"`
		Name string  `yaml:"alertname"`
		Want []alert `yaml:"exp_alerts"`
	}
	type run struct {
		Interval string   `yaml:"interval"`
		Input    []series `yaml:"input_series"`
		Checks   []check  `yaml:"alert_rule_test"`
	}
	input := func(m map[string]string) (out []series) {
		for _, name := range slices.Sorted(maps.Keys(m)) {
			out = append(out, series{name, m[name]})
		}
		return out
	}
	night := run{Interval: "1m", Input: input(quietNight)}
	var runs []run
	for _, r := range rules {
		if len(firings[r.Alert]) == 0 {
			t.Errorf("nothing says when %s fires", r.Alert)
		}
		for _, at := range []string{"45m", "61m", "95m", "3h", "9h"} {
			night.Checks = append(night.Checks, check{At: at, Name: r.Alert})
		}
		for _, f := range firings[r.Alert] {
			one := run{Interval: "1m", Input: input(f.series)}
			want := alert{Labels: with(f.labels, "severity", r.Labels["severity"]), Annotations: map[string]string{}}
			for k, v := range r.Annotations {
				want.Annotations[k] = placeholder.ReplaceAllStringFunc(v, func(s string) string { return f.labels[placeholder.FindStringSubmatch(s)[1]] })
			}
			one.Checks = append(one.Checks, check{f.at, r.Alert, []alert{want}})
			for _, at := range f.not {
				one.Checks = append(one.Checks, check{At: at, Name: r.Alert})
			}
			runs = append(runs, one)
		}
	}
	dir := t.TempDir()
	body, err := yaml.Marshal(map[string]any{"rule_files": []string{"rules.yaml"}, "evaluation_interval": "1m", "tests": append(runs, night)})
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"rules.yaml": []byte(contents(t, "../../etc/prometheus-rules.yaml")), "test.yaml": body} {
		if err := os.WriteFile(dir+"/"+name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	sh(t, tool, "test", "rules", dir+"/test.yaml")
}

var placeholder = regexp.MustCompile(`\{\{ \$labels\.([a-z]+) \}\}`)
