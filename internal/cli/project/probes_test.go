package project

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
)

const withProbes = `services:
  web:
    command: web
    probes:
      - exec,name=build:pgrep -x make
      - postgres:port=5433
      - kind: http
        url: http://127.0.0.1:8080/busy
        field: jobs.0.running
        interval: 30s
      - http:http://127.0.0.1:8080/
      - {kind: prometheus, url: "http://127.0.0.1:9/metrics", metric: 'running{model="a"}', threshold: 2.5}
      - {kind: file, path: /p, window: 5m, missing_is_quiet: true, timeout: 1s}
  api:
    command: api
    labels: {lull.probes: "redis:127.0.0.1:6380"}
`

// TestProbes checks that both forms of probes are read, and that the output of lull
// config is read as the same probes.
func TestProbes(t *testing.T) {
	p, _, err := parse(t, withProbes)
	errtest.None(t, err)
	specs := map[string]instance.Spec{}
	for _, s := range p.services {
		specs[s.name] = s.spec
	}
	got := specs["web"].Probes
	if len(got) != 6 || got[1].Name != "postgres" || !strings.Contains(strings.Join(got[1].Command, " "), "-d 'port=5433'") {
		t.Fatalf("%+v", got)
	}
	got[1] = instance.Probe{}
	if want := []instance.Probe{{Name: "build", Kind: "exec", Command: []string{"/bin/sh", "-c", "pgrep -x make"}}, {},
		{Name: "http", Kind: "http", URL: "http://127.0.0.1:8080/busy", Field: "jobs.0.running", Interval: idle.Duration(30 * time.Second)},
		{Name: "http-2", Kind: "http", URL: "http://127.0.0.1:8080/"},
		{Name: "prometheus", Kind: "prometheus", URL: "http://127.0.0.1:9/metrics", Metric: `running{model="a"}`, Threshold: 2.5},
		{Name: "file", Kind: "file", Path: "/p", Window: idle.Duration(5 * time.Minute), MissingIsQuiet: true, Timeout: idle.Duration(time.Second)},
	}; !reflect.DeepEqual(got, want) {
		t.Errorf("they are\n%+v, want\n%+v", got, want)
	}
	if r := specs["api"].Probes; len(r) != 1 || r[0].Name != "redis" {
		t.Errorf("%+v", r)
	}
	if p, _, err = parse(t, withProbes); err != nil {
		t.Fatal(err)
	}
	var shown strings.Builder
	errtest.None(t, p.show().write(&shown))
	again, _, err := parse(t, shown.String())
	if err != nil {
		t.Fatalf("%v in\n%s", err, shown.String())
	}
	for n := range p.services {
		if a, b := p.services[n].spec.Probes, again.services[n].spec.Probes; !reflect.DeepEqual(a, b) {
			t.Errorf("read again they are\n%+v, want\n%+v", b, a)
		}
	}
}

func TestProbeFaults(t *testing.T) {
	for probe, want := range map[string]string{
		"3": "probes", "{}": "kind", "{kind: exec}": "probes[0].command", "{kind: file, path: x}": "probes[0].path", "{kind: x}": "probes[0].kind",
		"{kind: file, path: /p, every: 3s}": "every", "{kind: file, path: /p, interval: soon}": "interval", "{kind: file, path: [1]}": "path", "ftp:x": "probe",
		"{kind: file, path: /p, url: x}": "probes[0].url", "{kind: file, path: /p, interval: 1ms}": "probes[0].interval",
	} {
		_, _, err := parse(t, "services:\n  web:\n    command: x\n    probes:\n      - "+probe+"\n")
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "lull.yaml:") {
			t.Errorf("%s: %v, want %q and the line", probe, err, want)
		}
	}
}
