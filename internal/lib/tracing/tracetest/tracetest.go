// Package tracetest records the spans and log lines of a daemon under test, and
// checks relations between them.
package tracetest

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
)

// Recorder collects exported spans. It is safe for concurrent use.
type Recorder struct {
	spans *tracetest.SpanRecorder
	mu    sync.Mutex
	log   bytes.Buffer
}

// New returns an empty Recorder.
func New() *Recorder { return &Recorder{spans: tracetest.NewSpanRecorder()} }

// Tracer returns a tracer whose spans are recorded.
func (r *Recorder) Tracer() trace.Tracer {
	return sdk.NewTracerProvider(sdk.WithSpanProcessor(r.spans)).Tracer("test")
}

// Logger returns a logger whose lines are recorded.
func (r *Recorder) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(r, nil)) }

// Write implements io.Writer for the logger.
func (r *Recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.Write(p)
}

// Lines returns the recorded lines that contain all of the words, in order.
func (r *Recorder) Lines(words ...string) (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
next:
	for line := range strings.Lines(r.log.String()) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		out = append(out, line)
	}
	return out
}

// Named returns the ended spans of that name, in order.
func (r *Recorder) Named(name string) (out []sdk.ReadOnlySpan) {
	for _, s := range r.spans.Ended() {
		if s.Name() == name {
			out = append(out, s)
		}
	}
	return out
}

// Last returns the newest span of that name, which must exist.
func (r *Recorder) Last(t testing.TB, name string) sdk.ReadOnlySpan {
	t.Helper()
	l := r.Named(name)
	if len(l) == 0 {
		t.Fatalf("there is no span %s", name)
	}
	return l[len(l)-1]
}

// Parent returns the ancestor of child with that name; nil if there is none.
func (r *Recorder) Parent(child sdk.ReadOnlySpan, name string) sdk.ReadOnlySpan {
	for _, s := range r.Named(name) {
		if s.SpanContext().SpanID() == child.Parent().SpanID() && s.SpanContext().TraceID() == child.SpanContext().TraceID() {
			return s
		}
	}
	return nil
}

// Under fails the test unless the newest span named child has an ancestor named
// parent.
func (r *Recorder) Under(t testing.TB, child, parent string) {
	t.Helper()
	if r.Parent(r.Last(t, child), parent) == nil {
		t.Errorf("%s is not under %s", child, parent)
	}
}

// Has fails the test unless a span has these attributes.
func Has(t testing.TB, s sdk.ReadOnlySpan, want ...attribute.KeyValue) {
	t.Helper()
	got := attribute.NewSet(s.Attributes()...)
	for _, kv := range want {
		if v, ok := got.Value(kv.Key); !ok || v != kv.Value {
			t.Errorf("%s: %s is %v, want %v", s.Name(), kv.Key, v.String(), kv.Value.String())
		}
	}
}
