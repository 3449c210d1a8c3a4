package instance

import (
	"errors"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/core/idle"
)

func TestParseProbe(t *testing.T) {
	sh := func(text string) []string { return []string{"/bin/sh", "-c", text} }
	for text, want := range map[string]Probe{
		"exec:pgrep -x make":                                    {Kind: "exec", Command: sh("pgrep -x make")},
		"exec,inside:a:b,c=d":                                   {Kind: "exec", Command: sh("a:b,c=d"), Inside: true},
		"exec,name=build,interval=30s,timeout=2s:x":             {Name: "build", Kind: "exec", Command: sh("x"), Interval: idle.Duration(30 * time.Second), Timeout: idle.Duration(2 * time.Second)},
		"http:http://127.0.0.1:8080/busy#active":                {Kind: "http", URL: "http://127.0.0.1:8080/busy", Field: "active"},
		"http:https://[::1]/":                                   {Kind: "http", URL: "https://[::1]/"},
		"prometheus,threshold=-1.5:http://h/metrics#x{a=\"#\"}": {Kind: "prometheus", URL: "http://h/metrics", Metric: `x{a="#"}`, Threshold: -1.5},
		"prometheus:http://h:9090#query=sum(x) > 0":             {Kind: "prometheus", URL: "http://h:9090", Query: "sum(x) > 0"},
		"file,window=5m,missing=quiet:/a:b":                     {Kind: "file", Path: "/a:b", Window: idle.Duration(5 * time.Minute), MissingIsQuiet: true},
	} {
		got, err := ParseProbe(text)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s is %+v, %v; want %+v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "x", "exec", "exec:", "exec: ", ":x", "ftp:x", "file,window=0s:/p", "file,window=x:/p", "exec,every=3s:x", "prometheus,threshold=x:http://h#m",
		"redis:h", "redis:h:x", "redis:h;rm:1", "redis:-h:1", "redis:$(x):1", "postgres:a' b", "postgres:a\nb",
		"redis:h:1#a b", "redis:h:1#", "vllm:http://h/#x", "actions-runner:x", "actions-runner:/x'y", "slurm:-x", "slurm:a b"} {
		if p, err := ParseProbe(text); err == nil {
			t.Errorf("%q is taken as %+v", text, p)
		}
	}
	for _, name := range ProbePresets() {
		p, err := ParseProbe(name)
		s := Spec{Name: "x", Command: []string{"x"}, Probes: []Probe{p}}
		if err = errors.Join(err, s.CheckNew()); err != nil || p.Name != name {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

func FuzzParseProbe(f *testing.F) {
	f.Add("exec,inside:x")
	f.Add("prometheus:http://h#x{a=\"b\"}")
	f.Add("redis:127.0.0.1:6379")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseProbe(text)
		if err != nil {
			return
		}
		probes := []Probe{p}
		NameProbes(probes)
		s := Spec{Name: "x", Command: []string{"x"}, Probes: probes}
		if s.Validate() == nil && (p.Every() <= 0 || p.Limit() <= 0 || p.Limit() > p.Every()) {
			t.Errorf("%q: interval %s, timeout %s", text, p.Every(), p.Limit())
		}
	})
}

func TestSelector(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-zA-Z_:][a-zA-Z0-9_:]{0,9}`).Draw(t, "name")
		labels := rapid.MapOf(rapid.StringMatching(`[a-zA-Z_][a-zA-Z0-9_]{0,5}`), rapid.String()).Draw(t, "labels")
		var parts []string
		for k, v := range labels {
			parts = append(parts, k+" = "+strconv.Quote(v))
		}
		got, err := ParseSelector(name + "{" + strings.Join(parts, " , ") + "}")
		if err != nil || got.Name != name || !reflect.DeepEqual(got.Labels, labels) {
			t.Fatalf("%s %q: %+v, %v", name, labels, got, err)
		}
	})
	for _, text := range []string{"", "1x", "x{", "x}", "x{a}", "x{a=b}", "x{a=\"b\"", "x{a=\"b\" c=\"d\"}", "x{a=\"1\",a=\"2\"}", "x{a=`b`}", "x y", "x{a!=\"b\"}", "{a=\"b\"}"} {
		if s, err := ParseSelector(text); err == nil {
			t.Errorf("%q is taken as %+v", text, s)
		}
	}
}

// TestProbeFields checks that every fault of a probe names its field.
func TestProbeFields(t *testing.T) {
	good := func() Spec {
		return Spec{Name: "x", Command: []string{"x"}, Probes: []Probe{{Name: "a", Kind: "exec", Command: []string{"x"}},
			{Name: "b", Kind: "prometheus", URL: "http://h", Metric: "m"}, {Name: "c", Kind: "file", Path: "/p"}, {Name: "d", Kind: "http", URL: "http://h"},
			{Name: "e", Kind: "beanstalkd", Address: "h:1", Field: "mail"}}}
	}
	s := good()
	if err := s.CheckNew(); err != nil {
		t.Fatal(err)
	}
	for field, edit := range map[string]func(p []Probe){
		"probes[0].name":       func(p []Probe) { p[0].Name = "" },
		"probes[1].name":       func(p []Probe) { p[1].Name = "a" },
		"probes[0].kind":       func(p []Probe) { p[0].Kind = "x" },
		"probes[0].command":    func(p []Probe) { p[0].Command = nil },
		"probes[0].url":        func(p []Probe) { p[0].URL = "http://h" },
		"probes[0].interval":   func(p []Probe) { p[0].Interval = -1 },
		"probes[0].timeout":    func(p []Probe) { p[0].Timeout = idle.Duration(16 * time.Second) },
		"probes[1].timeout":    func(p []Probe) { p[1].Interval, p[1].Timeout = idle.Duration(time.Hour), idle.Duration(2*time.Minute) },
		"probes[1].token_file": func(p []Probe) { p[1].TokenFile = "x" },
		"probes[4].address":    func(p []Probe) { p[4].Address = "h" },
		"probes[4].field":      func(p []Probe) { p[4].Field = "a b" },
		"probes[3].address":    func(p []Probe) { p[3].Address = "h:1" },
		"probes[1].metric":     func(p []Probe) { p[1].Metric = "" },
		"probes[1].query":      func(p []Probe) { p[1].Query = "x" },
		"probes[1].threshold":  func(p []Probe) { p[1].Threshold = math.NaN() },
		"probes[1].url":        func(p []Probe) { p[1].URL = "unix:/x" },
		"probes[2].path":       func(p []Probe) { p[2].Path = "x" },
		"probes[2].window":     func(p []Probe) { p[2].Window = -1 },
		"probes[2].inside":     func(p []Probe) { p[2].Inside = true },
		"probes[3].field":      func(p []Probe) { p[3].Field = "a\n" },
	} {
		s := good()
		edit(s.Probes)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), "cannot use "+field+":") || strings.Count(err.Error(), "\n") > 0 {
			t.Errorf("%s: %v", field, err)
		}
	}
	s.Probes = slices.Repeat(s.Probes, 4)
	if err := s.Validate(); err == nil || !strings.Contains(err.Error(), "20 probes") {
		t.Errorf("%v", err)
	}
}
