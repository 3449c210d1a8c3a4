package controller

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"lull/internal/core/evidence"
	"lull/internal/fleet/worker"
)

// traced holds the spans of one pause or resume, which takes many turns of the
// worker. It is in memory only: if another server takes a pause over, each server
// sends its own part.
type traced struct {
	check  trace.SpanContext // the check that decided on the pause
	pause  trace.Span        // from the intent until the worker is stopped or the pause is called off
	resume trace.Span        // from the request until RUNNING
	up     trace.SpanContext // the same resume, while its CML is not ready
	upAt   time.Time
}

// span begins a span about the worker. Without a tracer it costs next to
// nothing and records nothing.
func (j *job) span(ctx context.Context, name string, o ...trace.SpanStartOption) (context.Context, trace.Span) {
	ctx, s := j.c.tracer.Start(ctx, name, o...)
	if s.IsRecording() {
		s.SetAttributes(attribute.String("lull.worker.id", j.w.ID), attribute.String("lull.worker.name", j.w.Name),
			attribute.String("cloud.region", j.w.AWSRegion), attribute.String("host.id", j.w.EC2InstanceID))
	}
	return ctx, s
}

// traceVerdict sets a verdict as attributes of a span.
func traceVerdict(s trace.Span, d evidence.Decision) {
	if !s.IsRecording() {
		return
	}
	v := &d.Verdict
	var blocks []string
	for _, b := range v.Blocks {
		blocks = append(blocks, string(b.Code))
	}
	s.SetAttributes(attribute.String("lull.policy", d.Policy.Name), attribute.Bool("lull.idle", v.IsIdle), attribute.Bool("lull.eligible", v.Eligible),
		attribute.Float64("lull.idle_minutes", v.IdleMinutes), attribute.StringSlice("lull.blocks", blocks))
	if t := v.TargetPauseAt; t != nil {
		s.SetAttributes(attribute.String("lull.target_pause_at", t.Format(time.RFC3339)))
	}
}

// traceCheck adds the result of a check to its span. If the check decided on a pause,
// the pause's span will be its child.
func (j *job) traceCheck(s trace.Span, d evidence.Decision, r *worker.DetectResult) {
	if !s.IsRecording() {
		return
	}
	traceVerdict(s, d)
	s.SetAttributes(attribute.String("lull.action", string(r.Action)), attribute.String("lull.guard", r.Guard))
	if r.Error != "" {
		s.SetStatus(codes.Error, r.Error)
	}
	if r.AutoPauseTriggered {
		j.live.traced.check = s.SpanContext()
	}
}

// pausing returns ctx with the span of the worker's pause as parent. It starts that
// span if necessary.
func (j *job) pausing(ctx context.Context) context.Context {
	t := &j.live.traced
	if t.pause == nil && j.w.Intent != nil {
		_, t.pause = j.span(trace.ContextWithSpanContext(ctx, t.check), "worker.pause", trace.WithTimestamp(j.w.Intent.At))
		t.pause.SetAttributes(attribute.String("lull.reason", string(j.w.Intent.Reason)), attribute.String("lull.by", j.w.Intent.By))
	}
	if t.pause == nil {
		return ctx
	}
	return trace.ContextWithSpan(ctx, t.pause)
}

// endPause ends the span of the worker's pause, if this server has one.
func (j *job) endPause(_ context.Context, outcome, why string) {
	if s := j.live.traced.pause; s != nil {
		s.SetAttributes(attribute.String("lull.outcome", outcome))
		if why != "" {
			s.SetAttributes(attribute.String("lull.why", why))
		}
		s.End()
	}
	j.live.traced = traced{}
}

// resuming returns ctx with the span of the worker's resume as parent. It starts that
// span if necessary.
func (j *job) resuming(ctx context.Context, asked *time.Time) context.Context {
	t := &j.live.traced
	if t.resume == nil && asked != nil {
		_, t.resume = j.span(trace.ContextWithSpanContext(ctx, trace.SpanContext{}), "worker.resume", trace.WithTimestamp(*asked))
		t.resume.SetAttributes(attribute.String("lull.by", j.w.StartBy), attribute.String("lull.origin", string(j.w.StartOrigin)))
	}
	if t.resume == nil {
		return ctx
	}
	return trace.ContextWithSpan(ctx, t.resume)
}

// endResume ends the span of the worker's resume at RUNNING. It returns the parent
// for the span of CML's boot, which traceReady sends.
func (j *job) endResume(ctx context.Context, asked *time.Time) traced {
	j.resuming(ctx, asked)
	s := j.live.traced.resume
	if s == nil {
		return traced{}
	}
	s.End()
	return traced{up: s.SpanContext(), upAt: time.Now()}
}

// traceReady sends the span of a resume's last part, from RUNNING until CML is ready.
// It must be called when CML has become ready.
func (j *job) traceReady(ctx context.Context) {
	if t := j.live.traced; t.up.IsValid() {
		_, s := j.span(trace.ContextWithSpanContext(ctx, t.up), "cml.ready", trace.WithTimestamp(t.upAt))
		s.End()
		j.live.traced = traced{}
	}
}

// fault marks a span as failed if err is not nil.
func fault(s trace.Span, err error) {
	if err != nil {
		s.SetStatus(codes.Error, err.Error())
	}
}

// say logs a decision unless the previous line of l said the same.
func (j *job) say(l *evidence.Line, what string, d evidence.Decision, guard string, next time.Time) {
	d.Verdict.NextIdleCheckAt = next.UTC().Round(0)
	who := []slog.Attr{slog.String("worker", j.w.ID), slog.String("name", j.w.Name)}
	if attrs := l.Take(d, strings.TrimSpace(guard), who...); attrs != nil {
		j.c.log.LogAttrs(context.Background(), slog.LevelInfo, what, attrs...)
	}
}
