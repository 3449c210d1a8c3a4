package agent

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
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

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lines) decisions() (out []string) {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, "msg=decision") {
			out = append(out, line)
		}
	}
	return out
}

// spans are recorded spans, by name and by ID.
type spans struct {
	t      *testing.T
	byName map[string][]sdk.ReadOnlySpan
	byID   map[string]sdk.ReadOnlySpan
}

func spansOf(t *testing.T, r *tracetest.SpanRecorder) spans {
	out := spans{t, map[string][]sdk.ReadOnlySpan{}, map[string]sdk.ReadOnlySpan{}}
	for _, s := range r.Ended() {
		out.byName[s.Name()] = append(out.byName[s.Name()], s)
		out.byID[s.SpanContext().SpanID().String()] = s
	}
	return out
}

func (s spans) last(name string) sdk.ReadOnlySpan {
	s.t.Helper()
	l := s.byName[name]
	if len(l) == 0 {
		s.t.Fatalf("there is no span %s", name)
	}
	return l[len(l)-1]
}

func (s spans) under(child string, parent string) sdk.ReadOnlySpan {
	s.t.Helper()
	c := s.last(child)
	if p := s.byID[c.Parent().SpanID().String()]; p == nil || p.Name() != parent || p.SpanContext().TraceID() != c.SpanContext().TraceID() {
		s.t.Errorf("%s is under %v, want %s", child, p, parent)
	}
	return c
}

func (s spans) says(x sdk.ReadOnlySpan, want ...attribute.KeyValue) {
	s.t.Helper()
	got := attribute.NewSet(x.Attributes()...)
	for _, kv := range want {
		if v, ok := got.Value(kv.Key); !ok || v != kv.Value {
			s.t.Errorf("%s: %s is %v, want %v", x.Name(), kv.Key, v.String(), kv.Value.String())
		}
	}
}

func (w *world) traced() (*tracetest.SpanRecorder, *lines) {
	r, l := tracetest.NewSpanRecorder(), &lines{}
	w.tune = func(o *Options) {
		o.Region = "us-east-1"
		o.Log = slog.New(slog.NewTextHandler(l, nil))
		o.Tracer = sdk.NewTracerProvider(sdk.WithSpanProcessor(r)).Tracer("test")
	}
	return r, l
}

// TestTracesAndLines checks that the spans of the deciding check, the warning, the
// action with its steps, and the later resume are connected, and that they have the
// machine, verdict, reason and outcome. Equal checks in a row must be one log line.
func TestTracesAndLines(t *testing.T) {
	w := newWorld()
	recorder, log := w.traced()
	w.tags["lull:idle-timeout"] = "30m"
	w.tags["lull:hibernate-on-idle"] = "true"
	w.config = []byte("pre-stop: save\n")
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(24 * time.Minute)
		synctest.Wait()
		if l := log.decisions(); len(l) != 2 || !strings.Contains(l[0], "code=signal_unknown") && !strings.Contains(l[0], "signal_unknown(cpu)") || !strings.Contains(l[1], "outcome=hold code=not_idle_yet") || !strings.Contains(l[1], "target_pause_at=") {
			t.Errorf("24 minutes of the same: %q", l)
		}
		time.Sleep(9 * time.Minute)
		synctest.Wait()
		if l := log.decisions(); !strings.Contains(strings.Join(l, ""), "outcome=warn") || !strings.Contains(strings.Join(l, ""), "outcome=pause code=idle_timeout_exceeded") || len(l) > 6 {
			t.Errorf("the warning and the stop: %q", l)
		}
		w.with(func() { w.slept += 9 * time.Hour })
		time.Sleep(2 * time.Minute)
		synctest.Wait()

		s := spansOf(t, recorder)
		warning := s.under("agent.warning", "agent.tick")
		action := s.under("agent.action", "agent.tick")
		tick := s.byID[action.Parent().SpanID().String()]
		if tick.Parent().IsValid() {
			t.Error("the check's span has a parent")
		}
		s.says(tick, attribute.String("host.id", "i-1"), attribute.String("cloud.region", "us-east-1"), attribute.Bool("lull.eligible", true), attribute.Int("lull.stage", 3))
		s.says(action, attribute.String("lull.reason", "idle_timeout"), attribute.String("lull.action", "hibernate"), attribute.String("lull.outcome", "done"))
		if l := action.Links(); len(l) != 1 || l[0].SpanContext.SpanID() != warning.SpanContext().SpanID() {
			t.Errorf("the action points to %v, want its warning", l)
		}
		for child, parent := range map[string]string{"hook": "agent.action", "fence": "agent.action", "call": "agent.action", "observe": "agent.action",
			"read_tags": "fence", "last_look": "fence", "agent.resume": "agent.action"} {
			s.under(child, parent)
		}
		looked := map[string]bool{}
		for _, x := range s.byName["signal.users"] {
			if p := s.byID[x.Parent().SpanID().String()]; p != nil {
				looked[p.Name()] = true
			}
		}
		if !looked["agent.tick"] || !looked["last_look"] || !looked["hook"] {
			t.Errorf("signals were asked under %v", looked)
		}
		s.says(s.last("agent.resume"), attribute.Float64("lull.slept_seconds", (9*time.Hour).Seconds()))
	})
}

// TestTraceOfWhatFails checks that a refused stop, an unknown signal and a canceled
// action can be seen in their spans.
func TestTraceOfWhatFails(t *testing.T) {
	w := newWorld()
	recorder, _ := w.traced()
	w.tags["lull:idle-timeout"] = "30m"
	w.broken["gpu"] = true
	w.stopErr = []error{errBoom}
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(20 * time.Minute)
		w.with(func() { w.broken["gpu"] = false })
		time.Sleep(12 * time.Minute)
		synctest.Wait()
		s := spansOf(t, recorder)
		if x := s.byName["signal.gpu"][0]; x.Status().Code != codes.Error {
			t.Errorf("the unknown signal: %+v", x.Status())
		}
		if x := s.under("call", "agent.action"); x.Status().Code != codes.Error || !strings.Contains(x.Status().Description, "boom") {
			t.Errorf("the refused stop: %+v", x.Status())
		}
		s.says(s.last("agent.action"), attribute.String("lull.outcome", "failed"))
		w.with(func() { w.atFence = func() { w.with(func() { w.typed = time.Now() }) } })
		time.Sleep(6 * time.Minute)
		synctest.Wait()
		s = spansOf(t, recorder)
		s.says(s.last("agent.action"), attribute.String("lull.outcome", "cancelled"))
	})
}
