package host

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// settling is a machine whose programs take 5 s to write out their data.
type settling struct{ *hosttest.Kernel }

func (s settling) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	w, err := s.Kernel.Start(ctx, l)
	if err != nil {
		return nil, err
	}
	return slowFlusher{w.(*hosttest.Proc)}, nil
}

type slowFlusher struct{ *hosttest.Proc }

func (slowFlusher) Flush(context.Context) { <-time.After(5 * time.Second) }

// TestSettleHoldsNobody checks that a client that comes while a program writes
// out its data is answered at once and cancels the pause. Without a client, the
// program is paused afterwards.
func TestSettleHoldsNobody(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.Host.cfg.Runtimes["process"] = settling{r.k}
		r.run("a", nil)
		time.Sleep(62 * time.Second) // due to pause after 60 s; writes out its data until 65 s
		synctest.Wait()
		r.is("a", power.Running)
		began := time.Now()
		c, err := r.gates["a"].Arrive(r.ctx)
		if err != nil || c.Outcome() != "answered" || time.Since(began) > 0 {
			t.Fatalf("the client was %v after %s: %v", c, time.Since(began), err)
		}
		time.Sleep(10 * time.Second)
		if o := r.is("a", power.Running); o.PauseCount != 0 {
			t.Errorf("paused %d times", o.PauseCount)
		}
		if n := len(r.happenings("a", "pause_cancelled")); n != 1 {
			t.Errorf("%d pauses were cancelled", n)
		}
		c.Close()
		time.Sleep(80 * time.Second)
		r.is("a", power.Paused)
	})
}
