package agent

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"sync/atomic"
	"time"

	"lull/internal/base/wall"
	"lull/internal/edge/gpu"
	"lull/internal/edge/proc"
	"lull/internal/link/agentctl"
)

// Meter counts the bytes that lull's own connections move, so that they are
// not taken for use. The zero value is ready.
type Meter struct{ n atomic.Uint64 }

// Bytes is the running total.
func (m *Meter) Bytes() uint64 { return m.n.Load() }

// Dial is a net.Dialer's DialContext whose connections are counted.
func (m *Meter) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &metered{Conn: c, m: m}, nil
}

// metered counts what is read and written, and headers by a guess: 52 bytes a
// packet of 1460.
type metered struct {
	net.Conn
	m *Meter
}

func (c *metered) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.count(n)
	return n, err
}

func (c *metered) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.count(n)
	return n, err
}

func (c *metered) count(n int) {
	if n > 0 {
		c.m.n.Add(uint64(n + (n/1460+1)*52))
	}
}

// Machine sets the parts of o that read this machine: signals, clocks, memory
// and timers. The caller releases them with the returned function.
func Machine(o Options, own *Meter) (Options, func(), error) {
	now, err := wall.Read()
	if err != nil {
		return o, nil, err
	}
	boot, err := proc.Live().BootID()
	if err != nil {
		return o, nil, err
	}
	if o.Own == nil {
		o.Own = &proc.OwnWrites{}
	}
	m := proc.NewMachine(proc.MachineConfig{Own: o.Own, OwnBytes: own.Bytes})
	bus := &proc.Logind{}
	work := &proc.Work{}
	people := &proc.People{Own: o.Own, Logins: bus}
	o.Cheap, o.BootID = m, boot
	o.Slow = Signals(people, bus, work, &gpu.Reader{})
	o.Timers = Pending(bus)
	o.Memory = func() (agentctl.Memory, error) {
		total, free, err := work.ReadMemory()
		return agentctl.Memory{TotalBytes: total, AvailableBytes: free}, err
	}
	// A clock that was read once is read again; if ever not, time stands still
	// and nothing becomes due.
	last := &atomic.Pointer[wall.Reading]{}
	last.Store(&now)
	o.Clocks = func() wall.Reading {
		r, err := wall.Read()
		if err != nil {
			return *last.Load()
		}
		last.Store(&r)
		return r
	}
	return o, func() { m.Close(); bus.Close() }, nil
}

// Systemd is the Power of a machine without a cloud.
type Systemd struct{}

var _ Power = Systemd{}

// PowerOff implements Power.
func (Systemd) PowerOff(ctx context.Context) error { return systemctl(ctx, "poweroff") }

// Hibernate implements Power.
func (Systemd) Hibernate(ctx context.Context) error { return systemctl(ctx, "hibernate") }

func systemctl(ctx context.Context, verb string) error {
	cmd := exec.CommandContext(ctx, "systemctl", "--no-wall", verb)
	cmd.WaitDelay = 5 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot run systemctl %s: %w: %.300s", verb, err, out)
	}
	return nil
}
