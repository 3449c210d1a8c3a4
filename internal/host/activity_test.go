package host

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/errtest"
	"lull/internal/platform/activity"
)

// fakeProbe is a probe whose answers the test determines.
type fakeProbe struct {
	mu     sync.Mutex
	says   idle.State
	takes  time.Duration
	during func(context.Context) // called during each reading
	reads  []time.Time

	now, most atomic.Int32 // readings in progress, and their maximum
}

func (f *fakeProbe) set(s idle.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.says = s
}

// while sets how long each reading takes and what is called during it.
func (f *fakeProbe) while(takes time.Duration, during func(context.Context)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.takes, f.during = takes, during
}

func (f *fakeProbe) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.reads)
}

func (f *fakeProbe) read(ctx context.Context, _ *instance.Probe, _ []string) activity.Reading {
	n := f.now.Add(1)
	defer f.now.Add(-1)
	for m := f.most.Load(); n > m && !f.most.CompareAndSwap(m, n); m = f.most.Load() {
	}
	f.mu.Lock()
	f.reads = append(f.reads, time.Now())
	during, takes := f.during, f.takes
	f.mu.Unlock()
	if during != nil {
		during(ctx)
	}
	select {
	case <-time.After(takes):
	case <-ctx.Done():
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return activity.Reading{State: f.says, Detail: "as the test says"}
}

// probedBy adds a probe to a spec.
func probedBy(s *instance.Spec) {
	s.StopAfter = new(idle.Duration)
	s.Probes = []instance.Probe{{Name: "job", Kind: instance.ProbeExec, Command: []string{"x"}, Interval: idle.Duration(10 * time.Second)}}
}

// inProbed runs a test with an instance web whose probe answers in 20 ms.
func inProbed(t *testing.T, says idle.State, f func(r *rig, p *fakeProbe, web string)) {
	t.Helper()
	p := &fakeProbe{says: says, takes: 20 * time.Millisecond}
	inTuned(t, func(c *Config) { c.ReadProbe = p.read }, func(r *rig) {
		r.k.Remembers = true
		f(r, p, r.run("web", probedBy))
	})
}

// blocked reports whether there is a block by the probe with this code.
func blocked(blocks []idle.Block, code idle.Code) bool {
	return slices.ContainsFunc(blocks, func(b idle.Block) bool { return b.Signal == "probe:job" && b.Code == code })
}

func TestProbeHoldsAndLetsGo(t *testing.T) {
	for _, c := range []struct {
		says idle.State
		code idle.Code
	}{{idle.Active, idle.SignalActive}, {idle.Unknown, idle.SignalUnknown}} {
		t.Run(c.says.String(), func(t *testing.T) {
			inProbed(t, c.says, func(r *rig, p *fakeProbe, _ string) {
				time.Sleep(time.Hour)
				o := r.is("web", power.Running)
				if !blocked(o.Blocks, c.code) {
					t.Errorf("the blocks are %v", o.Blocks)
				}
				if n := p.count(); n < 300 || n > 420 {
					t.Errorf("%d readings in an hour, at an interval of 10 s", n)
				}
				p.set(idle.Quiet)
				time.Sleep(30 * time.Second)
				if c.says == idle.Active { // the idle time starts at the end of the reading
					r.is("web", power.Running)
				}
				time.Sleep(time.Minute)
				o = r.is("web", power.Paused)
				before := p.count()
				time.Sleep(time.Hour)
				if n := p.count(); n != before {
					t.Errorf("%d readings while it slept", n-before)
				}
				if blocked(o.Blocks, idle.SignalUnknown) || !slices.ContainsFunc(o.Activity, func(r idle.Reading) bool { return r.Signal == "probe:job" && r.State == idle.Quiet }) {
					t.Errorf("asleep it shows %v, %v", o.Activity, o.Blocks)
				}
				errtest.None(t, r.Resume(context.Background(), "web", ByManual))
				p.set(c.says)
				time.Sleep(10 * time.Minute)
				r.is("web", power.Running)
			})
		})
	}
}

// TestProbeReadAfreshBeforeThePause checks that a probe that is active only in the
// reading right before the pause prevents the pause.
func TestProbeReadAfreshBeforeThePause(t *testing.T) {
	inProbed(t, idle.Quiet, func(r *rig, p *fakeProbe, _ string) {
		i := r.byName["web"]
		p.while(20*time.Millisecond, func(context.Context) {
			i.mu.Lock()
			defer i.mu.Unlock()
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.says = idle.Quiet; !i.custom.final.IsZero() {
				p.says = idle.Active
			}
		})
		time.Sleep(time.Hour)
		r.is("web", power.Running)
		if h := r.happenings("web", "paused"); len(h) > 0 {
			t.Errorf("it was paused: %v", h)
		}
	})
}

// TestClientDuringTheLastReading checks that a client that comes while the probes
// are read before the pause is served at once.
func TestClientDuringTheLastReading(t *testing.T) {
	inProbed(t, idle.Quiet, func(r *rig, p *fakeProbe, web string) {
		i := r.byName["web"]
		came := atomic.Int32{}
		p.while(time.Second, func(context.Context) {
			i.mu.Lock()
			final := !i.custom.final.IsZero()
			i.mu.Unlock()
			if final && came.Add(1) == 1 {
				c := r.k.Connect(web)
				go func() {
					time.Sleep(time.Minute)
					c.Close()
				}()
				if !i.tryAcquire() {
					t.Error("a reading holds the lock of the instance")
				} else {
					i.release()
				}
			}
		})
		time.Sleep(90 * time.Second)
		r.is("web", power.Running)
		if came.Load() == 0 {
			t.Fatal("there was no reading before the pause")
		}
		if h := r.happenings("web", "paused"); len(h) > 0 {
			t.Errorf("it was paused: %v", h)
		}
		time.Sleep(3 * time.Minute)
		r.is("web", power.Paused)
	})
}

// TestHungProbe checks that a probe that never returns is unknown, is started only
// once, and delays neither clients nor users.
func TestHungProbe(t *testing.T) {
	release := make(chan struct{})
	p := &fakeProbe{says: idle.Quiet}
	inTuned(t, func(c *Config) { c.ReadProbe = p.read }, func(r *rig) {
		release = make(chan struct{})
		p.while(0, func(context.Context) { <-release })
		web := r.run("web", probedBy)
		for range 60 {
			time.Sleep(time.Minute)
			if c := r.k.Connect(web); !answered(c) {
				t.Fatal("no answer")
			} else {
				c.Close()
			}
		}
		time.Sleep(time.Hour)
		o := r.is("web", power.Running)
		if !blocked(o.Blocks, idle.SignalUnknown) {
			t.Errorf("the blocks are %v", o.Blocks)
		}
		if p.count() != 1 || p.most.Load() != 1 {
			t.Errorf("%d readings, %d at once", p.count(), p.most.Load())
		}
		errtest.None(t, r.Pause(context.Background(), "web", ByManual, false))
		r.is("web", power.Paused)
		if c := r.k.Connect(web); !answered(c) {
			t.Fatal("no answer")
		} else {
			c.Close()
		}
		close(release)
		p.while(0, nil)
		time.Sleep(5 * time.Minute)
		r.is("web", power.Paused)
		if p.most.Load() != 1 {
			t.Errorf("%d readings at once", p.most.Load())
		}
	})
}

// TestProbeIsNoUse checks that a probe's connections to the instance, and the work
// that they cause, do not count as use. A reading that takes long is the exception,
// because it cannot be distinguished from use.
func TestProbeIsNoUse(t *testing.T) {
	for name, c := range map[string]struct {
		takes time.Duration
		want  power.Instance
	}{"quick": {20 * time.Millisecond, power.Paused}, "slow": {4 * time.Second, power.Running}} {
		t.Run(name, func(t *testing.T) {
			inProbed(t, idle.Quiet, func(r *rig, p *fakeProbe, web string) {
				p.while(0, func(ctx context.Context) {
					c2 := r.k.Connect(web)
					r.k.Proc(web).SetBusy(true)
					select {
					case <-time.After(c.takes):
					case <-ctx.Done():
					}
					r.k.Proc(web).SetBusy(false)
					c2.Close()
				})
				time.Sleep(5 * time.Minute)
				r.is("web", c.want)
			})
		})
	}
}

// TestClientBesideProbe checks that a client counts despite the probe's own
// connections if it stays longer than a reading takes, and always if the probe
// makes no connections.
func TestClientBesideProbe(t *testing.T) {
	for kind, stays := range map[string]time.Duration{"exec": time.Second, "file": 0} {
		t.Run(kind, func(t *testing.T) {
			p := &fakeProbe{says: idle.Quiet, takes: 20 * time.Millisecond}
			inTuned(t, func(c *Config) { c.ReadProbe = p.read }, func(r *rig) {
				r.k.Remembers = true
				web := r.run("web", func(s *instance.Spec) {
					if probedBy(s); kind == "file" {
						s.Probes = []instance.Probe{{Name: "job", Kind: kind, Path: "/p", Interval: idle.Duration(time.Second)}}
					}
				})
				if kind == "exec" {
					p.while(20*time.Millisecond, func(context.Context) { r.k.Connect(web).Close() })
				}
				for range 60 {
					time.Sleep(50*time.Second - stays)
					c := r.k.Connect(web)
					time.Sleep(stays)
					c.Close()
					r.is("web", power.Running)
				}
				if h := r.happenings("web", "paused"); len(h) > 0 {
					t.Errorf("it was paused between its clients: %v", h)
				}
			})
		})
	}
}

// TestProbeAfterCrash checks that after a crash of the daemon a probe is unknown
// until it is read again, and that a sleeping instance continues to sleep without a
// reading.
func TestProbeAfterCrash(t *testing.T) {
	p := &fakeProbe{says: idle.Quiet, takes: 20 * time.Millisecond}
	inTuned(t, func(c *Config) { c.ReadProbe = p.read }, func(r *rig) {
		r.run("web", probedBy)
		time.Sleep(50 * time.Second)
		p.set(idle.Active)
		r.crash()
		r.boot()
		if o := r.is("web", power.Running); !blocked(o.Blocks, idle.SignalUnknown) {
			t.Errorf("after the crash the blocks are %v", o.Blocks)
		}
		time.Sleep(10 * time.Minute)
		r.is("web", power.Running)
		p.set(idle.Quiet)
		time.Sleep(3 * time.Minute)
		r.is("web", power.Paused)
		n := p.count()
		r.crash()
		r.boot()
		time.Sleep(10 * time.Minute)
		r.is("web", power.Paused)
		if p.count() != n {
			t.Errorf("%d readings while it slept", p.count()-n)
		}
	})
}

// TestProbeForgottenAtWake checks that a reading from before a pause is not used
// after the wake.
func TestProbeForgottenAtWake(t *testing.T) {
	inProbed(t, idle.Quiet, func(r *rig, p *fakeProbe, _ string) {
		time.Sleep(20 * time.Second)
		if o := r.is("web", power.Running); blocked(o.Blocks, idle.SignalUnknown) {
			t.Fatalf("the probe has no reading: %v", o.Blocks)
		}
		errtest.None(t, r.Pause(context.Background(), "web", ByManual, false))
		errtest.None(t, r.Resume(context.Background(), "web", ByManual))
		if o := r.is("web", power.Running); !blocked(o.Blocks, idle.SignalUnknown) {
			t.Errorf("the blocks are %v", o.Blocks)
		}
		time.Sleep(20 * time.Second)
		if o := r.is("web", power.Running); blocked(o.Blocks, idle.SignalUnknown) {
			t.Errorf("the blocks are %v", o.Blocks)
		}
	})
}

// TestProbeWithLeasesOnly checks that with leases_only probes still count, and no
// other signal does.
func TestProbeWithLeasesOnly(t *testing.T) {
	p := &fakeProbe{says: idle.Active, takes: 20 * time.Millisecond}
	inTuned(t, func(c *Config) { c.ReadProbe = p.read }, func(r *rig) {
		web := r.run("web", func(s *instance.Spec) { probedBy(s); s.IdlePolicy = instance.PolicyLeasesOnly })
		r.k.Proc(web).SetBusy(true)
		time.Sleep(10 * time.Minute)
		r.is("web", power.Running)
		p.set(idle.Quiet)
		time.Sleep(3 * time.Minute)
		r.is("web", power.Paused)
	})
}

// TestProbeIntervals checks that each of several probes is read at its own
// interval, and that readings of one probe never overlap.
func TestProbeIntervals(t *testing.T) {
	var mu sync.Mutex
	reads, now := map[string]int{}, map[string]int{}
	read := func(_ context.Context, p *instance.Probe, env []string) activity.Reading {
		key := strings.Join(env, " ") + " " + p.Name
		mu.Lock()
		reads[key]++
		if now[key]++; now[key] > 1 {
			t.Errorf("%s is read twice at once", key)
		}
		mu.Unlock()
		time.Sleep(10 * time.Millisecond)
		mu.Lock()
		now[key]--
		mu.Unlock()
		return activity.Reading{State: idle.Active}
	}
	inTuned(t, func(c *Config) { c.ReadProbe = read }, func(r *rig) {
		for n := range 3 {
			r.run(fmt.Sprint("i", n), func(s *instance.Spec) {
				for _, every := range []int{1, 10, 60} {
					s.Probes = append(s.Probes, instance.Probe{Name: fmt.Sprint("every", every), Kind: instance.ProbeExec, Command: []string{"x"},
						Interval: idle.Duration(time.Duration(every) * time.Second)})
				}
			})
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if len(reads) != 9 {
			t.Errorf("read were %v", reads)
		}
		for key, n := range reads {
			every := 0
			fmt.Sscanf(key[strings.LastIndex(key, "every"):], "every%d", &every)
			if want := 3600 / every; n < want*8/10 || n > want*12/10 {
				t.Errorf("%s: %d readings in an hour", key, n)
			}
		}
	})
}
