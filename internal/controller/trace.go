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

// traced connects the spans of one pause or resume, which takes many turns of
// the worker. It is in memory only: for a pause taken over by another server,
// each server sends its own part.
type traced struct {
	check  trace.SpanContext // the check that decided on the pause
	pause  trace.Span        // from the intent until it is stopped or called off
	resume trace.Span        // from when it was asked for until RUNNING
	up     trace.SpanContext // that resume, while its CML is not ready
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

// traceVerdict writes a verdict into a span.
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

// traceCheck ends a check's own part, and remembers it where it decided on a
// pause.
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

// pausing puts a step under the worker's pause.
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

// endPause ends the worker's pause, if this server took part in it.
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

// resuming puts a step under the worker's resume.
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

// endResume ends the worker's resume at RUNNING and returns what CML's part
// hangs on.
func (j *job) endResume(ctx context.Context, asked *time.Time) traced {
	j.resuming(ctx, asked)
	s := j.live.traced.resume
	if s == nil {
		return traced{}
	}
	s.End()
	return traced{up: s.SpanContext(), upAt: time.Now()}
}

// traceReady is the part of a resume that CML took, which has just ended.
func (j *job) traceReady(ctx context.Context) {
	if t := j.live.traced; t.up.IsValid() {
		_, s := j.span(trace.ContextWithSpanContext(ctx, t.up), "cml.ready", trace.WithTimestamp(t.upAt))
		s.End()
		j.live.traced = traced{}
	}
}

// fault marks a span as failed.
func fault(s trace.Span, err error) {
	if err != nil {
		s.SetStatus(codes.Error, err.Error())
	}
}

// say writes a line about a decision, if it says something new.
func (j *job) say(l *evidence.Line, what string, d evidence.Decision, guard string, next time.Time) {
	d.Verdict.NextIdleCheckAt = next.UTC().Round(0)
	who := []slog.Attr{slog.String("worker", j.w.ID), slog.String("name", j.w.Name)}
	if attrs := l.Take(d, strings.TrimSpace(guard), who...); attrs != nil {
		j.c.log.LogAttrs(context.Background(), slog.LevelInfo, what, attrs...)
	}
}
