package memnet

import (
	"net"
	"sync"
)

// Listener is a net.Listener on an address of the network, with its backlog.
type Listener struct {
	network *Network
	name    string
	backlog int

	mu      sync.Mutex
	queue   []*Conn
	closed  bool
	changed signal
}

var _ net.Listener = (*Listener)(nil)

// Accept accepts the connection that has waited longest. After Close it returns
// net.ErrClosed.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return nil, &net.OpError{Op: "accept", Net: "mem", Addr: l.Addr(), Err: net.ErrClosed}
		}
		if len(l.queue) > 0 {
			c := l.queue[0]
			l.queue = l.queue[1:]
			l.changed.notify()
			l.mu.Unlock()
			return c, nil
		}
		wait := l.changed.wait()
		l.mu.Unlock()
		<-wait
	}
}

// Close stops listening, resets connections that were not accepted and frees the
// address. Dials that wait for room in the backlog are refused. A second Close
// returns net.ErrClosed.
func (l *Listener) Close() error {
	n := l.network
	n.mu.Lock()
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		n.mu.Unlock()
		return &net.OpError{Op: "close", Net: "mem", Addr: l.Addr(), Err: net.ErrClosed}
	}
	l.closed = true
	delete(n.listeners, l.name)
	orphans := l.queue
	l.queue = nil
	l.changed.notify()
	l.mu.Unlock()
	n.mu.Unlock()
	for _, c := range orphans {
		c.Abort()
	}
	return nil
}

// Addr returns the listening address, with the port that was chosen for port 0.
func (l *Listener) Addr() net.Addr { return address(l.name) }

// Pending returns the number of connections in the backlog.
func (l *Listener) Pending() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue)
}
