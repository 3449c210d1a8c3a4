package controller

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"lull/internal/power"
)

// lines is a log in memory.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// of are the lines that say all of some words.
func (l *lines) of(words ...string) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
next:
	for line := range strings.Lines(l.b.String()) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		out = append(out, line)
	}
	return out
}

// TestTracesAndLines: a check, the pause that it decided on and the resume
// after it are traces that hang together, and each decision that says
// something new is one line.
func TestTracesAndLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spans := tracetest.NewSpanRecorder()
		log := &lines{}
		r := newRig(t, options{settings: map[string]any{"worker_warn_before_minutes": 0}, log: slog.New(slog.NewTextHandler(log, nil)),
			tracer: sdk.NewTracerProvider(sdk.WithSpanProcessor(spans)).Tracer("test")})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(30 * time.Minute)
		if l := log.of("msg=decision", "worker="+id); len(l) != 1 || !strings.Contains(l[0], "outcome=hold code=not_idle_yet") || !strings.Contains(l[0], "target_pause_at=") || !strings.Contains(l[0], "name=") {
			t.Errorf("half an hour of the same: %q", l)
		}
		r.await(id, power.WorkerStopped, 2*time.Hour)
		if _, err := r.fleet.StartWorker(t.Context(), person, id); err != nil {
			t.Fatal(err)
		}
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(2 * time.Minute)
		if l := log.of("msg=decision", "outcome=pause code=idle_timeout_exceeded"); len(l) != 1 {
			t.Errorf("the pause: %q", l)
		}
		if l := log.of(`msg="final look"`, "outcome=pause"); len(l) != 1 {
			t.Errorf("the final look: %q", l)
		}

		byName := map[string][]sdk.ReadOnlySpan{}
		for _, s := range spans.Ended() {
			byName[s.Name()] = append(byName[s.Name()], s)
		}
		last := func(name string) sdk.ReadOnlySpan {
			l := byName[name]
			if len(l) == 0 {
				t.Fatalf("there is no span %s", name)
			}
			return l[len(l)-1]
		}
		under := func(child, parent sdk.ReadOnlySpan) {
			t.Helper()
			if child.Parent().SpanID() != parent.SpanContext().SpanID() || child.SpanContext().TraceID() != parent.SpanContext().TraceID() {
				t.Errorf("%s is not under %s", child.Name(), parent.Name())
			}
		}
		has := func(s sdk.ReadOnlySpan, want ...attribute.KeyValue) {
			t.Helper()
			got := attribute.NewSet(s.Attributes()...)
			for _, kv := range want {
				if v, ok := got.Value(kv.Key); !ok || v != kv.Value {
					t.Errorf("%s: %s is %v, want %v", s.Name(), kv.Key, v.Emit(), kv.Value.Emit())
				}
			}
		}
		pause := last("worker.pause")
		var check sdk.ReadOnlySpan
		for _, s := range byName["worker.detect"] {
			if s.SpanContext().SpanID() == pause.Parent().SpanID() {
				check = s
			}
		}
		if check == nil || check.Parent().IsValid() {
			t.Fatal("the pause is not under a check")
		}
		under(pause, check)
		has(check, attribute.String("lull.worker.id", id), attribute.Bool("lull.eligible", true), attribute.String("lull.action", "pause"))
		has(pause, attribute.String("lull.reason", "idle_timeout"), attribute.String("lull.outcome", "stopped"))
		under(last("final_look"), pause)
		under(last("ec2.stop"), pause)
		under(last("settle"), check)
		if d := pause.EndTime().Sub(pause.StartTime()); d < 30*time.Second {
			t.Errorf("the pause took %s, and the cloud takes 30 s for it", d)
		}
		fetched := false
		for _, s := range byName["telemetry.fetch"] {
			fetched = fetched || s.Parent().SpanID() == last("final_look").SpanContext().SpanID()
		}
		if !fetched {
			t.Error("the final look fetched nothing")
		}
		resume := last("worker.resume")
		if resume.Parent().IsValid() {
			t.Error("the resume is under something")
		}
		has(resume, attribute.String("lull.worker.id", id), attribute.String("lull.by", person.Name))
		under(last("ec2.start"), resume)
		under(last("cml.ready"), resume)
	})
}
