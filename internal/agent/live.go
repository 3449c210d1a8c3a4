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

// Meter counts the bytes of lull's own network traffic, which must not count as use.
// The zero value is ready for use.
type Meter struct{ n atomic.Uint64 }

// Bytes returns the total so far.
func (m *Meter) Bytes() uint64 { return m.n.Load() }

// A frame has 66 bytes of Ethernet, IPv4 and TCP headers and at most 1448 bytes of
// content. Acknowledgements are not counted, so the sum stays below the interface's
// own count.
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
				return c, nil // loopback does not count for the network signal
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

// Machine returns o with the parts that read this machine: signals, clocks, memory
// and timers. Rates are measured over at least window. The returned function releases
// the parts.
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

// machineClocks returns the function that reads the machine's clocks, after a first
// reading to detect errors.
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
			return last // clocks that could be read once stay readable
		}
		last = r
		return r
	}, nil
}
