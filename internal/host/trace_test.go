package host

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"lull/internal/core/power"
	"lull/internal/lib/tracing/tracetest"
)

// TestTracesAndLines checks that the span of a pause is below that of its check and
// has every step of the fence, that a wake has a trace of its own, and that equal
// checks produce one log line.
func TestTracesAndLines(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.shut()
		seen := tracetest.New()
		r.tune = func(c *Config) { c.Log, c.Tracer = seen.Logger(), seen.Tracer() }
		r.boot()
		id := r.run("a", nil)
		time.Sleep(66 * time.Second)
		r.is("a", power.Paused)
		if l := seen.Lines("msg=decision"); len(l) < 2 || len(l) > 4 || !strings.Contains(l[0], "instance=a outcome=hold") || !strings.Contains(l[len(l)-1], "outcome=pause code=idle_timeout_exceeded") {
			t.Errorf("a minute until the pause: %q", l)
		}
		c := r.k.Connect(id)
		synctest.Wait()
		r.is("a", power.Running)
		c.Close()
		for child, parent := range map[string]string{"instance.pause": "instance.detect", "intent": "instance.pause", "freeze": "instance.pause", "look": "instance.pause",
			"commit": "instance.pause", "thaw": "instance.wake", "publish": "instance.wake"} {
			seen.Under(t, child, parent)
		}
		wake := seen.Last(t, "instance.wake")
		if wake.Parent().IsValid() {
			t.Fatalf("the wake is under something: %v", wake)
		}
		tracetest.Has(t, wake, attribute.String("lull.instance.id", id), attribute.String("lull.instance.name", "a"), attribute.String("lull.by", "connection"))
	})
}
