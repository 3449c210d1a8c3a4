package activity

import (
	"context"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"pgregory.net/rapid"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/lib/waittest"
)

// serve starts a web server for the length of the test and returns its URL.
func serve(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s.URL
}

func is(t *testing.T, r Reading, want idle.State, contains string) {
	t.Helper()
	if r.State != want || !strings.Contains(r.Detail, contains) {
		t.Errorf("it is %v (%s), want %v with %q", r.State, r.Detail, want, contains)
	}
}

func TestHTTPStatus(t *testing.T) {
	for status, want := range map[int]idle.State{200: idle.Active, 204: idle.Quiet, 201: idle.Unknown, 206: idle.Unknown, 301: idle.Unknown, 404: idle.Unknown, 503: idle.Unknown} {
		u := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(status)
		})
		is(t, Read(t.Context(), &instance.Probe{Kind: "http", URL: u}, nil), want, strconv.Itoa(status))
	}
}

func TestJSONField(t *testing.T) {
	for _, c := range []struct {
		body, field string
		want        idle.State
	}{
		{`{"active":true}`, "active", idle.Active}, {`{"active":false}`, "active", idle.Quiet}, {`{"active":null}`, "active", idle.Quiet},
		{`{"n":0}`, "n", idle.Quiet}, {`{"n":-0.0e5}`, "n", idle.Quiet}, {`{"n":-1}`, "n", idle.Active}, {`{"n":1e-999}`, "n", idle.Active}, {`{"n":1e999}`, "n", idle.Active},
		{`{"s":""}`, "s", idle.Quiet}, {`{"s":"x"}`, "s", idle.Active}, {`{"l":[]}`, "l", idle.Quiet}, {`{"l":[0]}`, "l", idle.Active}, {`{"o":{}}`, "o", idle.Quiet},
		{`{"jobs":[{"run":1},{"run":0}]}`, "jobs.1.run", idle.Quiet}, {`{"jobs":[{"run":1}]}`, "jobs.0.run", idle.Active},
		{`{"jobs":[]}`, "jobs.0.run", idle.Unknown}, {`[]`, ".", idle.Quiet}, {`[{}]`, ".", idle.Active}, {`[`, ".", idle.Unknown}, {`{"a":1}`, "b", idle.Unknown}, {`{"a":1}`, "a.b", idle.Unknown}, {`{"a":[1]}`, "a.-1", idle.Unknown},
		{`{"a":0} {"a":0}`, "a", idle.Unknown}, {`{"a":0`, "a", idle.Unknown}, {``, "a", idle.Unknown}, {`<html>`, "a", idle.Unknown},
		{strings.Repeat("[", 100_000), "0", idle.Unknown}, {`{"a":0}` + strings.Repeat(" ", maxJSON), "a", idle.Unknown},
	} {
		u := serve(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, c.body) })
		if r := Read(t.Context(), &instance.Probe{Kind: "http", URL: u, Field: c.field}, nil); r.State != c.want {
			t.Errorf("%s of %.60s is %v (%s), want %v", c.field, c.body, r.State, r.Detail, c.want)
		}
	}
}

// TestJSONQuiet checks that a number in a JSON answer is quiet only if it is
// zero.
func TestJSONQuiet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.Float64().Draw(t, "number")
		text := strconv.FormatFloat(f, 'g', -1, 64)
		if math.IsNaN(f) || math.IsInf(f, 0) {
			t.Skip()
		}
		want := idle.Active
		if f == 0 {
			want = idle.Quiet
		}
		if r := jsonField([]byte(`{"v": `+text+`}`), "v"); r.State != want {
			t.Fatalf("%s is %v", text, r.State)
		}
	})
}

func FuzzAnswers(f *testing.F) {
	f.Add([]byte(`{"a":{"b":[1,true]}}`), "a.b.0")
	f.Add([]byte("# TYPE x gauge\nx{l=\"1\"} 3\n"), `x{l="1"}`)
	f.Add([]byte(`{"status":"success","data":{"resultType":"vector","result":[{"value":[1,"0"]}]}}`), "x")
	f.Fuzz(func(t *testing.T, body []byte, path string) {
		for _, r := range []Reading{jsonField(body, path)} {
			if r.Detail == "" || math.IsInf(r.Value, 0) || math.IsNaN(r.Value) {
				t.Errorf("%+v", r)
			}
		}
		if v, err := exposed(body, path); err != nil && len(v) > 0 {
			t.Error(v, err)
		}
		if v, err := answer(body); err != nil && len(v) > 0 {
			t.Error(v, err)
		}
	})
}

// hostile are web servers with bad answers. A probe of any of them must be
// unknown within its timeout.
var hostile = map[string]http.HandlerFunc{
	"hang": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	"drip": func(w http.ResponseWriter, r *http.Request) {
		for every := time.NewTicker(10 * time.Millisecond); r.Context().Err() == nil; <-every.C {
			if _, err := fmt.Fprint(w, " "); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		}
	},
	"1 GiB": func(w http.ResponseWriter, r *http.Request) {
		b := []byte(strings.Repeat("x 0\n", 1<<18))
		for range 1 << 10 {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	},
	"redirect loop": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) },
	"huge header": func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X", strings.Repeat("x", 1<<20))
		w.WriteHeader(http.StatusNoContent)
	},
	"cut off": func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100")
		fmt.Fprint(w, `{"a":0}`)
	},
	"no HTTP": func(w http.ResponseWriter, r *http.Request) {
		c, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			fmt.Fprint(c, "hello\r\n")
			c.Close()
		}
	},
}

func TestHostileServers(t *testing.T) {
	for name, h := range hostile {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u := serve(t, h)
			for _, p := range []instance.Probe{{Kind: "http", URL: u}, {Kind: "http", URL: u, Field: "a"}, {Kind: "prometheus", URL: u, Metric: "x"}, {Kind: "prometheus", URL: u, Query: "x"}, {Kind: "jupyter", URL: u}} {
				p.Timeout = idle.Duration(time.Second)
				if name == "1 GiB" {
					p.Timeout = idle.Duration(time.Minute) // the size limit ends it, not the timeout
				}
				is(t, Read(t.Context(), &p, nil), idle.Unknown, "")
			}
		})
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u := "http://" + l.Addr().String()
	l.Close()
	is(t, Read(t.Context(), &instance.Probe{Kind: "http", URL: u}, nil), idle.Unknown, "refused")
}

// TestPrometheusExposition reads an exposition that the official client library
// wrote.
func TestPrometheusExposition(t *testing.T) {
	reg := prometheus.NewRegistry()
	running := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "requests_running"}, []string{"model"})
	total := prometheus.NewCounter(prometheus.CounterOpts{Name: "requests_total"})
	took := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "took"})
	reg.MustRegister(running, total, took)
	running.WithLabelValues("a").Set(3)
	running.WithLabelValues(`b"\`).Set(0)
	running.WithLabelValues("nan").Set(math.NaN())
	running.WithLabelValues("inf").Set(math.Inf(1))
	u := serve(t, promhttp.HandlerFor(reg, promhttp.HandlerOpts{}).ServeHTTP)
	for _, c := range []struct {
		metric    string
		threshold float64
		want      idle.State
	}{
		{`requests_running{model="a"}`, 0, idle.Active}, {`requests_running{model="a"}`, 3, idle.Quiet}, {`requests_running{model="a"}`, 2.9, idle.Active},
		{`requests_running{model="b\"\\"}`, 0, idle.Quiet}, {`requests_running{model="b\"\\"}`, -1, idle.Active}, {`requests_running{model="c"}`, 0, idle.Unknown},
		{`requests_running`, 0, idle.Unknown}, {`requests_running{model="nan"}`, 0, idle.Unknown}, {`requests_running{model="inf"}`, 9, idle.Active},
		{`requests_total`, 0, idle.Quiet}, {`requests_total{model=""}`, 0, idle.Quiet}, {`took`, 0, idle.Unknown}, {`missing`, 0, idle.Unknown},
	} {
		r := Read(t.Context(), &instance.Probe{Kind: "prometheus", URL: u, Metric: c.metric, Threshold: c.threshold}, nil)
		if r.State != c.want {
			t.Errorf("%s above %v is %v (%s), want %v", c.metric, c.threshold, r.State, r.Detail, c.want)
		}
	}
}

func TestPrometheusQuery(t *testing.T) {
	for body, want := range map[string]idle.State{
		`{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"0"]},{"metric":{},"value":[1,"2"]}]}}`: idle.Active,
		`{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"0"]}]}}`:                               idle.Quiet,
		`{"status":"success","data":{"resultType":"scalar","result":[1,"0"]}}`:                                                       idle.Quiet,
		`{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"NaN"]}]}}`:                             idle.Unknown,
		`{"status":"success","data":{"resultType":"vector","result":[]}}`:                                                            idle.Unknown,
		`{"status":"success","data":{"resultType":"matrix","result":[]}}`:                                                            idle.Unknown,
		`{"status":"success","data":{"resultType":"vector","result":[{"value":[1,0]}]}}`:                                             idle.Unknown,
		`{"status":"success","data":{"resultType":"vector","result":[{}]}}`:                                                          idle.Unknown,
		`{"status":"error","error":"bad query"}`:                                                                                     idle.Unknown,
		`{}`:                                                                                                                         idle.Unknown, `[]`: idle.Unknown, ``: idle.Unknown,
	} {
		u := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/api/v1/query" || r.URL.Query().Get("query") != `sum(x{a="b"}) > 0` {
				t.Errorf("asked for %s", r.URL)
			}
			fmt.Fprint(w, body)
		})
		is(t, Read(t.Context(), &instance.Probe{Kind: "prometheus", URL: u, Query: `sum(x{a="b"}) > 0`}, nil), want, "")
	}
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "busy")
	p := &instance.Probe{Kind: "file", Path: path, Window: idle.Duration(time.Minute)}
	is(t, Read(t.Context(), p, nil), idle.Unknown, "does not exist")
	p.MissingIsQuiet = true
	is(t, Read(t.Context(), p, nil), idle.Quiet, "does not exist")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	is(t, Read(t.Context(), p, nil), idle.Active, path)
	now := time.Now()
	for age, want := range map[time.Duration]idle.State{59 * time.Second: idle.Active, time.Minute: idle.Active, 61 * time.Second: idle.Quiet, -time.Hour: idle.Active} {
		if err := os.Chtimes(path, now, now.Add(-age)); err != nil {
			t.Fatal(err)
		}
		is(t, file(p, now), want, "active within 1m")
	}
	p.Path = filepath.Join(path, "below")
	is(t, Read(t.Context(), p, nil), idle.Unknown, "not a directory")
}

func TestExec(t *testing.T) {
	if testing.Short() {
		t.Skip("starts programs")
	}
	for script, want := range map[string]idle.State{
		"exit 0": idle.Active, "exit 1": idle.Quiet, "exit 2": idle.Unknown, "exit 126": idle.Unknown, "no-such-program-of-this-test": idle.Unknown,
		"kill -9 $$": idle.Unknown, "kill -TERM $$": idle.Unknown, "yes": idle.Unknown, "yes >&2": idle.Unknown, `[ "$LULL_INSTANCE" = web ]`: idle.Active,
		"sleep 1000 & exit 1": idle.Quiet, "read x; exit 1": idle.Quiet,
	} {
		p := &instance.Probe{Kind: "exec", Command: []string{"/bin/sh", "-c", script}, Interval: idle.Duration(time.Hour), Timeout: idle.Duration(time.Minute)}
		if r := Read(t.Context(), p, []string{"LULL_INSTANCE=web"}); r.State != want {
			t.Errorf("%s is %v (%s), want %v", script, r.State, r.Detail, want)
		}
	}
	p := &instance.Probe{Kind: "exec", Command: []string{"/no/such/program"}}
	is(t, Read(t.Context(), p, nil), idle.Unknown, "no such file")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p.Command = []string{"/bin/sh", "-c", "exit 1"}
	is(t, Read(ctx, p, nil), idle.Unknown, "cancel")
}

// TestExecTreeIsKilled runs probes whose children ignore SIGTERM, leave the
// process group, keep the output open, or fork without end. It checks that no
// child is left, both after a timeout and after the probe exits by itself.
func TestExecTreeIsKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("starts programs")
	}
	for name, script := range map[string]string{
		"ignores SIGTERM": `trap '' TERM HUP; (trap '' TERM HUP; while :; do sleep 0.05; done) & `,
		"leaves":          `setsid sh -c 'trap "" TERM; while :; do sleep 0.05; done' & setsid setsid sleep 1000 >/dev/null 2>&1 & `,
		"forks":           `f() { sleep 0.01; f & f; }; (ulimit -u 200 2>/dev/null; f) & `,
		"forks and leaves": `cat >"$T" <<'X'
sleep 0.02
setsid sh "$T" >/dev/null 2>&1 &
exit
X
sh "$T" & sh "$T" & `,
	} {
		for end, last := range map[string]string{"timeout": "sleep 1000", "exit": "sleep 0.2; exit 1"} {
			t.Run(name+"/"+end, func(t *testing.T) {
				mine := "LULL_TEST_TREE=" + t.Name() + strconv.Itoa(os.Getpid())
				p := &instance.Probe{Kind: "exec", Command: []string{"/bin/sh", "-c", script + last}, Interval: idle.Duration(time.Minute), Timeout: idle.Duration(time.Second)}
				if end == "exit" {
					p.Timeout = idle.Duration(time.Minute)
				}
				r := Read(t.Context(), p, []string{mine, "T=" + filepath.Join(t.TempDir(), "again")})
				if end == "timeout" {
					is(t, r, idle.Unknown, "no answer within")
				} else {
					is(t, r, idle.Quiet, "exit code 1")
				}
				waittest.Until(t, "nothing of the probe is left", func() bool { return len(marked(mine)) == 0 })
			})
		}
	}
}

// TestPrometheusServer queries a real Prometheus server.
func TestPrometheusServer(t *testing.T) {
	if testing.Short() {
		t.Skip("starts programs")
	}
	server, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("Prometheus is not installed")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.yml"), []byte("global: {scrape_interval: 1s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	cmd := exec.Command(server, "--config.file", filepath.Join(dir, "config.yml"), "--storage.tsdb.path", dir, "--web.listen-address", addr)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	read := func(p instance.Probe) Reading {
		p.Kind, p.URL = "prometheus", "http://"+addr+p.URL
		return Read(t.Context(), &p, nil)
	}
	waittest.Until(t, "Prometheus answers", func() bool { return read(instance.Probe{Query: "vector(1)"}).State == idle.Active })
	for query, want := range map[string]idle.State{"vector(0)": idle.Quiet, "1 - 1": idle.Quiet, "2": idle.Active, `vector(1) > 5`: idle.Unknown, "up{": idle.Unknown,
		"0 / 0": idle.Unknown, "1 / 0": idle.Active, `"text"`: idle.Unknown, "missing": idle.Unknown, "vector(0)[1m:10s]": idle.Unknown} {
		is(t, read(instance.Probe{Query: query}), want, "")
	}
	is(t, read(instance.Probe{URL: "/metrics", Metric: "prometheus_build_info"}), idle.Active, "prometheus_build_info is 1")
	is(t, read(instance.Probe{URL: "/metrics", Metric: `prometheus_ready{x="y"}`}), idle.Unknown, "no value")
}
