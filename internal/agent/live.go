package agent

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/lib/wall"
	"lull/internal/platform/gpu"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
)

// Meter counts the bytes of lull's own network traffic, so that they do not
// count as use. The zero value is ready for use.
type Meter struct{ n atomic.Uint64 }

// Bytes returns the total so far.
func (m *Meter) Bytes() uint64 { return m.n.Load() }

// Frames carry 66 bytes of Ethernet, IPv4 and TCP headers and at most 1448 of
// content. Acknowledgements are not counted, so that the sum stays below the
// interface's count.
const (
	frameHead = 66
	frameFull = 1448
)

func (m *Meter) add(n int) {
	if n > 0 {
		m.n.Add(uint64(n + frameHead*(1+n/frameFull)))
	}
}

// Transport returns an HTTP transport whose connections are counted. proxy may
// be nil.
func (m *Meter) Transport(proxy func(*http.Request) (*url.URL, error)) *http.Transport {
	d := &net.Dialer{Timeout: 5 * time.Second}
	return &http.Transport{
		Proxy: proxy, MaxIdleConns: 4, IdleConnTimeout: 30 * time.Second, TLSHandshakeTimeout: 5 * time.Second,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := d.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			if a, ok := c.RemoteAddr().(*net.TCPAddr); ok && a.IP.IsLoopback() {
				return c, nil // the network signal excludes loopback
			}
			return metered{c, m}, nil
		},
	}
}

type metered struct {
	net.Conn
	m *Meter
}

func (c metered) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.m.add(n)
	return n, err
}

func (c metered) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.m.add(n)
	return n, err
}

// Machine sets the parts of o that read this machine: signals, clocks, memory
// and timers. Rates are measured over at least window. The caller must call the
// returned function to release the parts.
func Machine(o Options, own *Meter, window time.Duration) (Options, func(), error) {
	clocks, err := machineClocks()
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
	m := proc.NewMachine(proc.MachineConfig{LeastWindow: window, Own: o.Own, OwnBytes: own.Bytes})
	bus := &proc.Logind{}
	work := &proc.Work{}
	logins := &proc.LoginReader{Own: o.Own, Logins: bus}
	o.Cheap, o.BootID, o.Clocks = m, boot, clocks
	o.Slow = Signals(logins, bus, work, &gpu.Reader{})
	o.Timers = Pending(bus)
	o.Memory = func() (agentctl.Memory, error) {
		total, free, err := work.ReadMemory()
		return agentctl.Memory{TotalBytes: total, AvailableBytes: free}, err
	}
	return o, func() { m.Close(); bus.Close() }, nil
}

// machineClocks reads the machine's clocks once, to fail early, and returns
// their reader.
func machineClocks() (func() wall.Reading, error) {
	last, err := wall.Read()
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	return func() wall.Reading {
		r, err := wall.Read()
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			return last // clocks that could be read once remain readable
		}
		last = r
		return r
	}, nil
}
