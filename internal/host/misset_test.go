package host

import (
	"context"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

// TestMissetByTheHost checks that, if a changed default of the host makes an
// instance's timers no longer increase, that fault is shown everywhere.
func TestMissetByTheHost(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.run("a", func(s *instance.Spec) { s.ReclaimAfter = idle.Duration(3 * time.Minute) })
		r.run("b", func(s *instance.Spec) {
			stop := idle.Duration(10 * time.Minute)
			s.ReclaimAfter, s.StopAfter = idle.Duration(3*time.Minute), &stop
		})
		if got := r.Misset(); len(got) > 0 {
			t.Errorf("misset before: %v", got)
		}
		r.crash()
		r.tune = func(c *Config) { c.StopAfter = 20 * time.Second }
		r.boot()
		const want = "reclaim_after: 3m is not before stop_after 20s"
		if got := r.Misset(); len(got) != 1 || !strings.HasPrefix(got[0], "a: ") || !strings.Contains(got[0], want) {
			t.Errorf("misset: %v", got)
		}
		y, err := r.Why(context.Background(), "a", time.Time{})
		if err != nil || !strings.Contains(y.Answer, want) || !strings.Contains(y.Instance.Misset, want) {
			t.Errorf("why: %v, %v", y.Answer, err)
		}
	})
}
