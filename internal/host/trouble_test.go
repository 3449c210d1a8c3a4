package host

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// ailing is a machine whose programs can have faults.
type ailing struct {
	*hosttest.Kernel
	what *atomic.Value
}

func (a ailing) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	w, err := a.Kernel.Start(ctx, l)
	if err != nil {
		return nil, err
	}
	return patient{w.(*hosttest.Proc), a.what}, nil
}

type patient struct {
	*hosttest.Proc
	what *atomic.Value
}

func (p patient) Trouble() string { return p.what.Load().(string) }

// TestTrouble checks that a program's trouble is published once when it begins
// and once when it ends, and that why shows it meanwhile.
func TestTrouble(t *testing.T) {
	inBubble(t, func(r *rig) {
		var what atomic.Value
		what.Store("")
		r.Host.cfg.Runtimes["process"] = ailing{r.k, &what}
		id := r.run("a", func(s *instance.Spec) { never := idle.Duration(0); s.PauseAfter = &never })
		say := func(s string) {
			what.Store(s)
			time.Sleep(30 * time.Second)
			synctest.Wait()
		}
		say("its disk is full since 1s")
		const latest = "its disk is full since 2s"
		say(latest)
		y, err := r.Why(t.Context(), id, time.Time{})
		if err != nil || !strings.Contains(y.Answer, latest) || y.Instance.Trouble == "" {
			t.Errorf("why: %q, %v", y.Answer, err)
		}
		say("")
		for kind, want := range map[string]string{"trouble": ": its disk is full since 1s", "trouble_over": ": its disk is full since 2s"} {
			if got := r.happenings("a", kind); !slices.Equal(got, []string{want}) {
				t.Errorf("%s: %q", kind, got)
			}
		}
		if o := r.is("a", power.Running); o.Trouble != "" {
			t.Errorf("trouble: %s", o.Trouble)
		}
	})
}
