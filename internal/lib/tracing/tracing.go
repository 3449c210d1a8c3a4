// Package tracing sends traces to a collector by OTLP over HTTP. The standard
// OpenTelemetry variables control it: OTEL_EXPORTER_OTLP_ENDPOINT or
// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT enables it; OTEL_EXPORTER_OTLP_HEADERS,
// _TIMEOUT, _CERTIFICATE, _COMPRESSION, OTEL_SERVICE_NAME,
// OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and OTEL_BSP_* configure it.
//
// It guarantees that nothing waits for a collector: spans that the collector does
// not accept are dropped, and that is logged at most once a minute. It does not
// send metrics or logs.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// endWithin limits how long End sends the last spans.
const endWithin = 3 * time.Second

// Traces sends spans. A nil Traces sends none.
type Traces struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
}

// FromEnv returns Traces as configured by the environment; nil if tracing is not
// enabled. service is the name of this process unless OTEL_SERVICE_NAME is set.
// Some variables are read by OpenTelemetry itself, not through getenv. Spans are
// sent through t, for a process that counts its own traffic; nil means a new
// transport.
func FromEnv(ctx context.Context, getenv func(string) string, service, version string, t *http.Transport, log *slog.Logger) (*Traces, error) {
	endpoint := getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
	if endpoint == "" {
		endpoint = getenv("OTEL_EXPORTER_OTLP_ENDPOINT")
	}
	if endpoint == "" || getenv("OTEL_SDK_DISABLED") == "true" || getenv("OTEL_TRACES_EXPORTER") == "none" {
		return nil, nil
	}
	if t == nil {
		t = http.DefaultTransport.(*http.Transport).Clone()
	}
	exporter, err := newExporter(getenv, version, t)
	if err != nil {
		return nil, fmt.Errorf("cannot send traces to %s: %w", endpoint, err)
	}
	// The environment comes last, so it takes precedence.
	res, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", service), attribute.String("service.version", version)),
		resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("cannot send traces: %w", err)
	}
	otel.SetErrorHandler(&faults{log: log})
	p := sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(res))
	return &Traces{provider: p, tracer: p.Tracer("lull", trace.WithInstrumentationVersion(version))}, nil
}

// Tracer returns the tracer to use. It returns nil if t is nil.
func (t *Traces) Tracer() trace.Tracer {
	if t == nil {
		return nil
	}
	return t.tracer
}

// End sends the remaining spans, for at most three seconds.
func (t *Traces) End() error {
	if t == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), endWithin)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("cannot send the last traces: %w", err)
	}
	return nil
}

// faults logs send errors, at most once a minute.
type faults struct {
	log *slog.Logger

	mu   sync.Mutex
	last time.Time
}

// Handle implements otel.ErrorHandler.
func (f *faults) Handle(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := time.Now(); now.Sub(f.last) >= time.Minute {
		f.last = now
		f.log.Warn("cannot send traces", "err", err)
	}
}
