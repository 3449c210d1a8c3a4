package tracing_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"encoding/pem"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"lull/internal/lib/errtest"
	"lull/internal/lib/tracing"
)

// receiver is a collector that stores the requests that it gets.
type receiver struct {
	mu      sync.Mutex
	spans   map[string]*otlp.Span
	service string
	headers http.Header
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	var body io.Reader = q.Body
	if q.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(q.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = z
	}
	b, err := io.ReadAll(body)
	var m collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(b, &m)
	}
	if err != nil || q.URL.Path != "/v1/traces" {
		http.Error(w, "no traces", http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.headers = q.Header.Clone()
	for _, rs := range m.ResourceSpans {
		for _, a := range rs.Resource.Attributes {
			if a.Key == "service.name" {
				r.service = a.Value.GetStringValue()
			}
		}
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				r.spans[s.Name] = s
			}
		}
	}
}

func env(pairs ...string) func(string) string {
	return func(name string) string {
		for i := 0; i+1 < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1]
			}
		}
		return ""
	}
}

// set sets environment variables for OpenTelemetry itself, and returns a getenv
// function for FromEnv.
func set(t *testing.T, pairs ...string) func(string) string {
	for i := 0; i+1 < len(pairs); i += 2 {
		t.Setenv(pairs[i], pairs[i+1])
	}
	return env(pairs...)
}

var discard = slog.New(slog.DiscardHandler)

// TestSent checks that a collector gets each span with its parent, its
// attributes and the name of the process.
func TestSent(t *testing.T) {
	r := &receiver{spans: map[string]*otlp.Span{}}
	web := httptest.NewServer(r)
	defer web.Close()
	traces, err := tracing.FromEnv(t.Context(), set(t, "OTEL_EXPORTER_OTLP_ENDPOINT", web.URL, "OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc, x-more=a%2Cb"), "lull-server", "1.2", nil, discard)
	errtest.None(t, err)
	ctx, parent := traces.Tracer().Start(t.Context(), "worker.detect")
	_, child := traces.Tracer().Start(ctx, "telemetry.fetch")
	child.SetAttributes(attribute.String("lull.worker.id", "w-1"))
	child.End()
	parent.End()
	errtest.None(t, traces.End())
	r.mu.Lock()
	defer r.mu.Unlock()
	up, down := r.spans["worker.detect"], r.spans["telemetry.fetch"]
	if up == nil || down == nil || len(up.ParentSpanId) != 0 || !bytes.Equal(down.ParentSpanId, up.SpanId) || !bytes.Equal(down.TraceId, up.TraceId) {
		t.Fatalf("got %v and %v", up, down)
	}
	if want := child.SpanContext().SpanID().String(); hex.EncodeToString(down.SpanId) != want {
		t.Errorf("the child is %x, want %s", down.SpanId, want)
	}
	if len(down.Attributes) != 1 || down.Attributes[0].Key != "lull.worker.id" || down.Attributes[0].Value.GetStringValue() != "w-1" {
		t.Errorf("attributes: %v", down.Attributes)
	}
	if r.service != "lull-server" || r.headers.Get("X-Key") != "abc" || r.headers.Get("X-More") != "a,b" {
		t.Errorf("service %q, headers %v", r.service, r.headers)
	}
}

// TestOff checks that tracing does nothing without an endpoint or when switched
// off, and that an unsupported setting is an error.
func TestOff(t *testing.T) {
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
	for _, bad := range []string{"collector:4318", "ftp://collector", "http://"} {
		if _, err := tracing.FromEnv(context.Background(), env(endpoint, bad), "lull-server", "1.2", nil, discard); err == nil || !strings.Contains(err.Error(), endpoint) {
			t.Errorf("endpoint %s: %v", bad, err)
		}
	}
	for _, e := range [][]string{nil, {endpoint, "http://127.0.0.1:9", "OTEL_SDK_DISABLED", "true"}, {endpoint, "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER", "none"}} {
		traces, err := tracing.FromEnv(context.Background(), env(e...), "lull-server", "1.2", nil, discard)
		if err != nil || traces != nil || traces.Tracer() != nil || traces.End() != nil {
			t.Errorf("%v: %v, %v", e, traces, err)
		}
	}
	_, err := tracing.FromEnv(context.Background(), env(endpoint, "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), "lull-server", "1.2", nil, discard)
	if err == nil || !strings.Contains(err.Error(), "OTEL_EXPORTER_OTLP_PROTOCOL") {
		t.Errorf("grpc: %v", err)
	}
}

// TestRefused checks that a collector's refusals cause no delay, and are logged
// once a minute.
func TestRefused(t *testing.T) {
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	var said bytes.Buffer
	traces, err := tracing.FromEnv(t.Context(), set(t, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", web.URL+"/v1/traces"), "lull-host", "1.2", nil, slog.New(slog.NewTextHandler(&said, nil)))
	errtest.None(t, err)
	for range 5000 { // more than the queue holds
		_, s := traces.Tracer().Start(t.Context(), "instance.wake")
		s.End()
	}
	if err := traces.End(); err != nil {
		t.Error(err)
	}
	if n := strings.Count(said.String(), "cannot send traces"); n != 1 {
		t.Errorf("it is told %d times that spans are lost: %s", n, &said)
	}
}

// TestOwnTransport checks that spans are sent through the given transport, with
// the certificate and the timeout from the environment.
func TestOwnTransport(t *testing.T) {
	r := &receiver{spans: map[string]*otlp.Span{}}
	web := httptest.NewTLSServer(r)
	defer web.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	errtest.None(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw}), 0o600))
	dialled := 0
	own := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		dialled++
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}}
	defer own.CloseIdleConnections()
	get := set(t, "OTEL_EXPORTER_OTLP_ENDPOINT", web.URL, "OTEL_EXPORTER_OTLP_CERTIFICATE", ca, "OTEL_EXPORTER_OTLP_TIMEOUT", "30000")
	traces, err := tracing.FromEnv(t.Context(), get, "lull-agent", "1.2", own, discard)
	errtest.None(t, err)
	_, s := traces.Tracer().Start(t.Context(), "agent.tick")
	s.End()
	errtest.None(t, traces.End())
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.spans["agent.tick"] == nil || dialled == 0 {
		t.Errorf("%d spans arrived over %d connections", len(r.spans), dialled)
	}
	for _, bad := range [][2]string{{"TIMEOUT", "soon"}, {"CERTIFICATE", "/nowhere"}, {"CERTIFICATE", os.DevNull}, {"COMPRESSION", "zip"}, {"HEADERS", "key"}, {"HEADERS", "key=%zz"}} {
		get := env("OTEL_EXPORTER_OTLP_ENDPOINT", web.URL, "OTEL_EXPORTER_OTLP_"+bad[0], bad[1])
		if _, err := tracing.FromEnv(t.Context(), get, "lull-agent", "1.2", &http.Transport{}, discard); err == nil || !strings.Contains(err.Error(), bad[0]) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}
