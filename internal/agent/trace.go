package agent

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"lull/internal/core/idle"
)

// span starts a span about this machine, as a child of the one in ctx. Without a
// tracer it does nothing.
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

// within runs a step of an action in a span of its own.
func (a *Agent) within(ctx context.Context, name string, step func(context.Context) error) error {
	ctx, s := a.span(ctx, name)
	defer s.End()
	err := step(ctx)
	failedWith(s, err)
	return err
}

// traceVerdict sets a verdict as attributes of a check's span.
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

// traceReading sets a reading as attributes of its probe's span.
func traceReading(s trace.Span, r idle.Reading) {
	if s.IsRecording() {
		s.SetAttributes(attribute.String("lull.state", r.State.String()))
	}
	if r.State == idle.Unknown {
		s.SetStatus(codes.Error, r.Detail)
	}
}

// failedWith marks a span as failed if err is not nil.
func failedWith(s trace.Span, err error) {
	if err != nil {
		s.SetStatus(codes.Error, err.Error())
	}
}

// linked returns the option that links a span to one in another trace.
func linked(to trace.SpanContext) []trace.SpanStartOption {
	if !to.IsValid() {
		return nil
	}
	return []trace.SpanStartOption{trace.WithLinks(trace.Link{SpanContext: to})}
}
