package host

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"lull/internal/core/idle"
)

// span begins a span for the instance. Without a tracer it does nothing.
func (i *inst) span(ctx context.Context, name string) (context.Context, trace.Span) {
	if i.h.cfg.Tracer == nil {
		return ctx, noop.Span{}
	}
	ctx, s := i.h.cfg.Tracer.Start(ctx, name)
	s.SetAttributes(attribute.String("lull.instance.id", i.id), attribute.String("lull.instance.name", i.name()))
	return ctx, s
}

func traceVerdict(s trace.Span, v *idle.Verdict) {
	if !s.IsRecording() {
		return
	}
	blocks := make([]string, len(v.Blocks))
	for n, b := range v.Blocks {
		blocks[n] = string(b.Code)
	}
	s.SetAttributes(attribute.Bool("lull.idle", v.IsIdle), attribute.Bool("lull.eligible", v.Eligible), attribute.StringSlice("lull.blocks", blocks))
}

func traceCause(s trace.Span, by, reason string) {
	if s.IsRecording() {
		s.SetAttributes(attribute.String("lull.by", by), attribute.String("lull.reason", reason))
	}
}

// fault marks a span as failed.
func fault(s trace.Span, err error) {
	if err != nil {
		s.SetStatus(codes.Error, err.Error())
	}
}
