package report

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host"
	"lull/internal/host/hosttest"
	"lull/internal/protocol/hostctl"
)

// rig is a host without a relay on a simulated machine, in a synctest bubble.
type rig struct {
	*host.Host
	t      *testing.T
	k      hosttest.Kernel
	disk   *hosttest.Disk
	daemon *hosttest.Session
	tune   func(*host.Config) // changes the configuration of each daemon; may be nil
	end    func()             // ends the current daemon; nil once it has ended
}

func inBubble(t *testing.T, tune func(*host.Config), f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, disk: hosttest.NewDisk(), tune: tune}
		t.Cleanup(r.shut) // also after a Fatal: nothing may outlive the bubble
		r.boot()
		f(r)
		r.shut()
		if b := r.k.Broken(); len(b) > 0 {
			t.Errorf("broken: %v", b)
		}
	})
}

// boot starts a daemon with the current state of disk and kernel.
func (r *rig) boot() {
	r.daemon = &hosttest.Session{Disk: r.disk}
	c := host.Config{PauseAfter: time.Minute, StopAfter: 5 * time.Minute, Runtimes: map[string]host.Runtime{"process": &r.k}, Records: r.daemon,
		Log: slog.New(slog.DiscardHandler), NewGate: func(t host.RelayTarget) (host.Gate, error) { return &hosttest.Gate{K: &r.k, Waker: t.Waker}, nil }}
	if r.tune != nil {
		r.tune(&c)
	}
	r.Host = host.New(c)
	r.k.SetOnExit(r.Host.OnExit)
	if err := r.Load(context.Background(), r.disk.All()); err != nil {
		r.t.Errorf("load: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.end = func() {
		cancel()
		if err := <-ended; err != nil {
			r.t.Errorf("run: %v", err)
		}
	}
	synctest.Wait()
}

func (r *rig) shut() {
	if r.end != nil {
		r.end()
		r.end = nil
	}
}

// crash kills a daemon that has paused nothing. It writes nothing anymore.
func (r *rig) crash() {
	r.k.SetOnExit(nil)
	r.daemon.Dead.Store(true)
	r.shut()
}

func (r *rig) run(name string, change func(*instance.Spec)) string {
	r.t.Helper()
	id, err := r.Create(context.Background(), hosttest.Spec(name, change))
	if err == nil {
		err = r.Start(context.Background(), id, host.ByManual)
	}
	if err != nil {
		r.t.Fatalf("run %s: %v", name, err)
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

// report runs a reporter to s until end is called.
func (r *rig) report(s Server, log io.Writer) (rep *Reporter, end func()) {
	rep = &Reporter{Host: r.Host, Server: s, Name: "desk", Where: "http://server", Version: "v1", Every: 15 * time.Second, Log: slog.New(slog.NewTextHandler(log, nil))}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- rep.Run(ctx) }()
	synctest.Wait()
	return rep, func() {
		cancel()
		if err := <-ended; err != nil {
			r.t.Error(err)
		}
	}
}

// pass lets time pass in the bubble.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}
