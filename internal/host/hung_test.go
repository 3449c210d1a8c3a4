package host

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/host/hosttest"
)

// hanging is a machine on which some programs do not answer a restarted daemon.
// They can still be killed.
type hanging struct {
	*hosttest.Kernel
	hung map[string]bool
	well *atomic.Bool // set once no program hangs anymore
}

func (k hanging) Adopt(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	if k.hung[id] && !k.well.Load() {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	return k.Kernel.Adopt(ctx, id, ident)
}

func (k hanging) End(ctx context.Context, id string) error {
	if p := k.Proc(id); p != nil {
		return p.Kill(ctx)
	}
	return nil
}

var _ instance.Ender = hanging{}

// TestHungOnes starts a daemon with many hung programs. It checks that the daemon
// serves requests within seconds and adopts healthy programs. A hung program must
// be reported as such, can be stopped or removed by a user, and is adopted once it
// answers again.
func TestHungOnes(t *testing.T) {
	inBubble(t, func(r *rig) {
		k := hanging{r.k, map[string]bool{}, new(atomic.Bool)}
		asleep := r.asleep("asleep", power.Paused)
		k.hung[asleep] = true
		var hung []string
		for n := range 20 {
			name := "hung" + string(rune('a'+n))
			k.hung[r.run(name, nil)] = true
			hung = append(hung, name)
		}
		r.run("well", nil)
		r.crash()
		r.tune = func(c *Config) { c.Runtimes = map[string]Runtime{"process": k} }
		began := time.Now()
		r.boot()
		if d := time.Since(began); d > 3*time.Second {
			t.Errorf("no client was served for %s", d)
		}
		time.Sleep(22 * time.Second)
		synctest.Wait()
		if w := r.is("well", power.Running); w.Unavailable != "" {
			t.Errorf("what is well: %s", w.Unavailable)
		}
		for _, name := range []string{hung[0], "asleep"} {
			y, err := r.Why(context.Background(), name, time.Time{})
			if err != nil || y.Fact(why.Unreached.Code) == nil || !strings.Contains(y.Answer, context.DeadlineExceeded.Error()) ||
				y.Fact(why.Pauses.Code) != nil || y.Fact(why.StopsUnused.Code) != nil {
				t.Errorf("why %s: %v, %v", name, y.Answer, err)
			}
			if o, _ := r.Get(name); o.Unavailable == "" || o.PauseAt != nil || o.StopAt != nil || o.NextStepAt != nil {
				t.Errorf("%s: %+v", name, o)
			}
		}
		began = time.Now()
		for _, name := range []string{hung[0], "asleep"} {
			if err := r.Stop(context.Background(), name, ByManual, false); err != nil {
				t.Errorf("stop: %v", err)
			}
			if o := r.is(name, power.Stopped); !strings.Contains(o.StatusReason, disorderSaying) || o.Unavailable != "" {
				t.Errorf("stopped: %+v", o)
			}
		}
		if err := r.Delete(context.Background(), hung[1], ByManual); err != nil {
			t.Errorf("remove: %v", err)
		}
		if d := time.Since(began); d > 3*adoptAgain {
			t.Errorf("two stops and a removal took %s", d)
		}
		if r.k.Proc(asleep) != nil {
			t.Error("what was stopped lives")
		}
		k.well.Store(true)
		time.Sleep(adoptLimit + 2*time.Second)
		for _, name := range hung[2:] {
			if o := r.is(name, power.Running); o.Unavailable != "" {
				t.Errorf("%s: %s", name, o.Unavailable)
			}
		}
		if err := r.Start(context.Background(), hung[0], ByManual); err != nil {
			t.Errorf("started again: %v", err)
		}
	})
}

// mute is a guest that runs but does not receive signals.
type mute struct{ *hosttest.Proc }

func (mute) Signal(syscall.Signal) error {
	time.Sleep(30 * time.Second)
	return errors.New("it does not answer")
}

type muting struct{ *hosttest.Kernel }

func (k muting) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	w, err := k.Kernel.Start(ctx, l)
	if err != nil {
		return nil, err
	}
	return mute{w.(*hosttest.Proc)}, nil
}

// TestStopOfMuteGuest checks that a guest that cannot be asked to exit is
// killed after its stop grace.
func TestStopOfMuteGuest(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		r.Host.cfg.Runtimes["process"] = muting{r.k}
		r.run("a", func(s *instance.Spec) { s.StopGrace = idle.Duration(3 * time.Second) })
		began := time.Now()
		if err := r.Stop(context.Background(), "a", ByManual, false); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(began); d > 4*time.Second {
			t.Errorf("its stop took %s", d)
		}
		if o := r.is("a", power.Stopped); !strings.Contains(o.StatusReason, disorderSaying) {
			t.Errorf("stopped: %s", o.StatusReason)
		}
	})
}
