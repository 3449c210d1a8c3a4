package hosttest

import (
	"context"
	"errors"
	"slices"
	"syscall"

	"lull/internal/core/instance"
)

// Daemon is one daemon's access to a Kernel. After Crash, whatever its goroutines
// still do has no effect.
type Daemon struct {
	*Kernel
	dead bool // guarded by the kernel's mu
}

// Crash kills the daemon, including its relay. Programs stay as they are.
func (d *Daemon) Crash(relay *Gate) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.see("crash", -1)
	d.dead, relay.dead, d.OnExit = true, true, nil
	cut := func(c *Client) bool {
		c.reset = c.reset || c.gate == relay
		return c.gate == relay
	}
	for _, p := range d.procs {
		if p.guard != nil {
			p.guard.closed, p.guard = true, nil
		}
		p.backlog, p.open = slices.DeleteFunc(p.backlog, cut), slices.DeleteFunc(p.open, cut)
	}
	for _, q := range d.kept {
		if q.guard != nil {
			q.guard.close()
		}
	}
}

// Dead reports whether the daemon was killed.
func (d *Daemon) Dead() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dead
}

// Start implements instance.Runtime.
func (d *Daemon) Start(_ context.Context, l instance.Launch) (instance.Workload, error) {
	d.point("kernel-start")
	if d.Dead() {
		return nil, errDead
	}
	return &run{d.start(l), d}, nil
}

// Adopt implements instance.Runtime.
func (d *Daemon) Adopt(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	if d.Dead() {
		return nil, errDead
	}
	w, err := d.Kernel.Adopt(ctx, id, ident)
	if err != nil {
		return nil, err
	}
	return &run{w.(*Proc), d}, nil
}

// run is a Proc as one daemon has access to it.
type run struct {
	*Proc
	d *Daemon
}

var _ instance.Hibernator = (*run)(nil)

func (r *run) Freeze(ctx context.Context) error {
	if r.d.Dead() {
		return errDead
	}
	return r.Proc.Freeze(ctx)
}

func (r *run) Thaw() error {
	if r.d.Dead() {
		return errDead
	}
	return r.Proc.Thaw()
}

func (r *run) Guard(ports []instance.Endpoint, outbound bool, wake func(string)) (instance.Guard, error) {
	if r.d.Dead() {
		return nil, errDead
	}
	return r.Proc.Guard(ports, outbound, wake)
}

func (r *run) Signal(s syscall.Signal) error {
	if r.d.Dead() {
		return errDead
	}
	return r.Proc.Signal(s)
}

func (r *run) Kill(ctx context.Context) error {
	if r.d.Dead() {
		return errDead
	}
	return r.Proc.Kill(ctx)
}

func (r *run) Hibernate(context.Context) (int64, error) {
	r.k.point("kernel-save")
	if r.d.Dead() {
		return 0, errDead
	}
	return r.hibernate()
}

func (r *run) Sample(ports []instance.Endpoint) instance.Sample {
	if r.d.Dead() {
		return instance.Sample{}
	}
	return r.Proc.Sample(ports)
}

var errDead = errors.New("the daemon is dead")
