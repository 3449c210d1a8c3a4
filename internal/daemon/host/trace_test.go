package host

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

// lockedLog is a log in memory.
type lockedLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedLog) decisions() (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.b.String()) {
		if strings.Contains(line, "msg=decision") {
			out = append(out, line)
		}
	}
	return out
}

// TestTracesAndLines: a pause is a trace under the look that decided on it,
// with every step of the fence; a wake is one of its own; and looks that say
// the same make one line.
func TestTracesAndLines(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.shut()
		spans, log := tracetest.NewSpanRecorder(), &lockedLog{}
		r.tune = func(c *Config) {
			c.Log = slog.New(slog.NewTextHandler(log, nil))
			c.Tracer = sdk.NewTracerProvider(sdk.WithSpanProcessor(spans)).Tracer("test")
		}
		r.boot()
		id := r.run("a", nil)
		time.Sleep(66 * time.Second)
		r.is("a", power.Paused)
		if l := log.decisions(); len(l) < 2 || len(l) > 4 || !strings.Contains(l[0], "instance=a outcome=hold") || !strings.Contains(l[len(l)-1], "outcome=pause code=idle_timeout_exceeded") {
			t.Errorf("a minute until the pause: %q", l)
		}
		c := r.k.Connect(id)
		synctest.Wait()
		r.is("a", power.Running)
		c.Close()
		byID, byName := map[string]sdk.ReadOnlySpan{}, map[string]sdk.ReadOnlySpan{}
		for _, s := range spans.Ended() {
			byID[s.SpanContext().SpanID().String()], byName[s.Name()] = s, s
		}
		for child, parent := range map[string]string{"instance.pause": "instance.detect", "intent": "instance.pause", "freeze": "instance.pause", "look": "instance.pause",
			"commit": "instance.pause", "thaw": "instance.wake", "publish": "instance.wake"} {
			s := byName[child]
			if s == nil || byID[s.Parent().SpanID().String()] == nil || byID[s.Parent().SpanID().String()].Name() != parent {
				t.Errorf("%s is not under %s: %v", child, parent, s)
			}
		}
		wake := byName["instance.wake"]
		if wake == nil || wake.Parent().IsValid() {
			t.Fatalf("the wake: %v", wake)
		}
		got := attribute.NewSet(wake.Attributes()...)
		for key, want := range map[attribute.Key]string{"lull.instance.id": id, "lull.instance.name": "a", "lull.by": "connection"} {
			if v, _ := got.Value(key); v.AsString() != want {
				t.Errorf("%s is %q, want %q", key, v.AsString(), want)
			}
		}
	})
}
