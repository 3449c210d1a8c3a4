package agent

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"lull/internal/core/idle"
)

// span begins a span about this machine, below the one in ctx. Without a tracer
// the span records nothing and costs nothing.
func (a *Agent) span(ctx context.Context, name string, o ...trace.SpanStartOption) (context.Context, trace.Span) {
	if a.o.Tracer == nil {
		return ctx, noop.Span{}
	}
	ctx, s := a.o.Tracer.Start(ctx, name, o...)
	if self := a.self.Load(); self.instanceID != "" {
		s.SetAttributes(attribute.String("host.id", self.instanceID), attribute.String("cloud.region", self.region))
	}
	return ctx, s
}

// within runs one step of an action in its own span.
func (a *Agent) within(ctx context.Context, name string, step func(context.Context) error) error {
	ctx, s := a.span(ctx, name)
	defer s.End()
	err := step(ctx)
	failedWith(s, err)
	return err
}

// traceVerdict writes a check's verdict into its span.
func (a *Agent) traceVerdict(s trace.Span, v *idle.Verdict) {
	if !s.IsRecording() {
		return
	}
	blocks := make([]string, len(v.Blocks))
	for n, b := range v.Blocks {
		blocks[n] = string(b.Code)
	}
	s.SetAttributes(attribute.Bool("lull.idle", v.IsIdle), attribute.Bool("lull.eligible", v.Eligible), attribute.Float64("lull.idle_minutes", v.IdleMinutes),
		attribute.Int("lull.stage", a.machine.stage), attribute.StringSlice("lull.blocks", blocks))
}

// traceReading writes a signal's reading into the span of its probe.
func traceReading(s trace.Span, r idle.Reading) {
	if s.IsRecording() {
		s.SetAttributes(attribute.String("lull.state", r.State.String()))
	}
	if r.State == idle.Unknown {
		s.SetStatus(codes.Error, r.Detail)
	}
}

// failedWith marks a span as failed.
func failedWith(s trace.Span, err error) {
	if err != nil {
		s.SetStatus(codes.Error, err.Error())
	}
}

// linked links a span to one of another trace.
func linked(to trace.SpanContext) []trace.SpanStartOption {
	if !to.IsValid() {
		return nil
	}
	return []trace.SpanStartOption{trace.WithLinks(trace.Link{SpanContext: to})}
}
