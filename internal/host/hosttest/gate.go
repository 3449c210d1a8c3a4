package hosttest

import (
	"context"
	"sync"
	"time"

	"lull/internal/relay"
)

// Gate is a simulated relay with one port. Like the real one, it counts an arrival
// before it checks the flags, and requests one wake however many clients wait.
type Gate struct {
	K     *Kernel
	ID    string
	Waker relay.Waker

	dead    bool // its daemon is dead; guarded by K.mu
	mu      sync.Mutex
	held    bool
	asleep  bool
	waking  bool
	inside  int
	pairs   []*Client // relayed connections, if the kernel does not show any
	waiting int
	fresh   chan struct{} // closed by Release and at the end of a wake
	failed  error
}

func (g *Gate) change(f func(), seen ...string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
	for _, e := range seen {
		g.see(e, -1)
	}
	if g.fresh != nil {
		close(g.fresh)
	}
	g.fresh = make(chan struct{})
}

// see reports an event, unless the daemon is dead.
func (g *Gate) see(event string, client int) {
	if !g.gone() {
		g.K.see(event, client)
	}
}

func (g *Gate) gone() bool {
	g.K.mu.Lock()
	defer g.K.mu.Unlock()
	return g.dead
}

// Hold implements host.Gate.
func (g *Gate) Hold() { g.change(func() { g.held = true }, "hold") }

// Sleep implements host.Gate.
func (g *Gate) Sleep() { g.change(func() { g.asleep = true }, "sleep") }

// Release implements host.Gate.
func (g *Gate) Release() { g.change(func() { g.held, g.asleep = false, false }, "release") }

// Activity implements host.Gate.
func (g *Gate) Activity() relay.Activity {
	g.mu.Lock()
	defer g.mu.Unlock()
	a := relay.Activity{Held: g.held, Asleep: g.asleep, Open: g.inside, Waiting: g.waiting}
	g.each(func(*Client) { a.Open++ })
	g.K.mu.Lock()
	defer g.K.mu.Unlock()
	for _, c := range g.pairs {
		if c.moved.After(a.LastByte) {
			a.LastByte = c.moved
		}
	}
	return a
}

// each calls f for every open relayed client. g.mu must be held.
func (g *Gate) each(f func(*Client)) {
	g.K.mu.Lock()
	defer g.K.mu.Unlock()
	for _, c := range g.pairs {
		if !c.closed && !c.reset && !c.refused {
			f(c)
		}
	}
}

// Owed implements host.Gate. It counts only clients that the simulated kernel does
// not show; for the others, the kernel knows which side sent last.
func (g *Gate) Owed() (n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.each(func(c *Client) {
		if c.owed {
			n++
		}
	})
	return n
}

// Arrive connects a client through the relay. It returns once the client is
// connected to the program, or the error with which it was rejected.
func (g *Gate) Arrive(ctx context.Context) (*Client, error) {
	asks := false // whether this client requests the wake for whose result the others wait
	g.K.pointWith("relay-arrive", func(b []byte, _ time.Time) []byte {
		g.mu.Lock()
		defer g.mu.Unlock()
		return Append(b, flag(asks))
	})
	if g.gone() {
		return nil, errDead
	}
	n := g.K.arrival()
	g.mu.Lock()
	g.inside++
	if g.held {
		g.see("gated", n)
	}
	for g.held {
		g.inside, g.waiting = g.inside-1, g.waiting+1
		if g.asleep && !g.waking {
			g.waking, g.failed, asks = true, nil, true
			g.mu.Unlock()
			err := g.Waker.Wake(ctx, relay.Arrival{Cause: relay.CauseConnect})
			g.change(func() { g.waking, g.failed, asks = false, err, false })
			g.mu.Lock()
			if err != nil {
				g.see("turned", n)
				g.waiting--
				g.mu.Unlock()
				return nil, err
			}
		} else {
			if g.fresh == nil {
				g.fresh = make(chan struct{})
			}
			fresh := g.fresh
			g.mu.Unlock()
			select {
			case <-fresh:
			case <-ctx.Done():
				g.mu.Lock()
				g.waiting--
				g.mu.Unlock()
				return nil, ctx.Err()
			}
			g.mu.Lock()
		}
		g.inside, g.waiting = g.inside+1, g.waiting-1
	}
	if g.gone() {
		g.mu.Unlock()
		return nil, errDead
	}
	g.see("passed", n)
	g.mu.Unlock()
	g.K.point("relay-dial")
	if g.gone() {
		return nil, errDead
	}
	c := g.K.connect(g.ID, n, g)
	g.mu.Lock()
	g.inside--
	if g.K.Remote {
		g.pairs = append(g.pairs, c)
	}
	g.mu.Unlock()
	return c, nil
}
