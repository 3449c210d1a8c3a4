package host

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/protocol/hostctl"
)

// rig is a complete host on a simulated machine, in a synctest bubble.
type rig struct {
	*Host
	t      *testing.T
	k      *hosttest.Kernel
	disk   *hosttest.Disk
	daemon *hosttest.Session // the current daemon's access to the disk
	gates  map[string]*hosttest.Gate
	tune   func(*Config) // changes the configuration of each new daemon; may be nil
	end    context.CancelFunc
	done   chan error
}

func inBubble(t *testing.T, f func(r *rig)) {
	t.Helper()
	inTuned(t, nil, f)
}

func inTuned(t *testing.T, tune func(*Config), f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, k: &hosttest.Kernel{}, disk: hosttest.NewDisk(), gates: map[string]*hosttest.Gate{}, tune: tune}
		t.Cleanup(r.shut) // also after a Fatal: nothing may outlive the bubble
		r.boot()
		f(r)
		r.shut()
		if b := r.k.Broken(); len(b) > 0 {
			t.Errorf("broken: %v", b)
		}
		if n := r.illegal.Load(); n > 0 {
			t.Errorf("%d illegal transitions", n)
		}
	})
}

// boot starts a daemon with the current state of disk and kernel.
func (r *rig) boot() {
	if err := r.bootFaulty(); err != nil {
		r.t.Errorf("load: %v", err)
	}
}

// bootFaulty is boot for a daemon that may fail to adopt some instances.
func (r *rig) bootFaulty() error {
	r.daemon = &hosttest.Session{Disk: r.disk}
	c := Config{PauseAfter: time.Minute, StopAfter: 5 * time.Minute, Runtimes: map[string]Runtime{"process": r.k},
		Records: r.daemon, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), KeepEvents: 512,
		NewGate: func(t RelayTarget) (Gate, error) {
			g := &hosttest.Gate{K: r.k, Waker: t.Waker}
			r.gates[t.Name] = g
			return g, nil
		}}
	if r.tune != nil {
		r.tune(&c)
	}
	r.Host = New(c)
	r.k.SetOnExit(r.Host.OnExit)
	err := r.Load(context.Background(), r.disk.All())
	for name, g := range r.gates {
		if o, err := r.Get(name); err == nil {
			g.ID = o.ID
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.end, r.done = cancel, make(chan error, 1)
	go func() { r.done <- r.Run(ctx) }()
	synctest.Wait()
	return err
}

func (r *rig) shut() {
	if r.end == nil {
		return
	}
	r.end()
	r.end = nil
	if err := <-r.done; err != nil {
		r.t.Errorf("run: %v", err)
	}
}

// crash kills the daemon. It neither thaws nor writes anything.
func (r *rig) crash() {
	r.k.SetOnExit(nil)
	r.daemon.Dead.Store(true)
	for _, i := range r.all() {
		i.mu.Lock()
		i.proc.frozen, i.proc.guard = false, nil // keeps the end of Run from thawing anything
		i.mu.Unlock()
	}
	r.end()
	<-r.done
}

func (r *rig) run(name string, change func(*instance.Spec)) string {
	r.t.Helper()
	id, err := r.Create(context.Background(), hosttest.Spec(name, change))
	if err != nil {
		r.t.Fatalf("create: %v", err)
	}
	if g := r.gates[name]; g != nil {
		g.ID = id
	}
	if err := r.Start(context.Background(), id, ByManual); err != nil {
		r.t.Fatalf("start: %v", err)
	}
	synctest.Wait()
	return id
}

func (r *rig) is(name string, want power.Instance) hostctl.Instance {
	r.t.Helper()
	synctest.Wait()
	o, err := r.Get(name)
	if err != nil || o.State != string(want) {
		r.t.Fatalf("%s is %s (%s), want %s: %v; blocks %v", name, o.State, o.StatusReason, want, err, o.Blocks)
	}
	return o
}

// happenings returns the actor and reason of each of an instance's events of one
// kind.
func (r *rig) happenings(name, kind string) (out []string) {
	synctest.Wait()
	events, _, _ := r.events.Since(0)
	for _, e := range events {
		if e.Instance == name && e.Type == kind {
			out = append(out, e.By+": "+e.Reason)
		}
	}
	return out
}

func (r *rig) lease(id, holder string, ttl time.Duration) {
	if err := r.Hold(context.Background(), id, idle.Lease{Holder: holder}, ttl); err != nil {
		r.t.Errorf("lease: %v", err)
	}
}
