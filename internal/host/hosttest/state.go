package hosttest

import (
	"encoding/binary"
	"slices"
	"time"
)

// State appends everything on which the simulated machine's future depends. Two
// machines that append the same bytes behave the same from then on. Times are
// relative to since. Texts for users are left out.
func (k *Kernel) State(b []byte, since time.Time) []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	b = Append(b, len(k.broken), k.starts, len(k.procs))
	for _, p := range k.procs { // every user of State has only one
		b = Append(b, int(p.run), flag(p.frozen), flag(p.dead), flag(p.term), flag(p.saved), flag(p.busy), flag(p.writes), flag(p.slow), p.asks, int(p.disk), int(p.cpu), int(p.last.Sub(since)), p.out)
		b = p.guard.state(b)
		b = Append(b, len(p.backlog))
		for _, c := range slices.Concat(p.backlog, p.open) {
			b = Append(b, slices.Index(k.clients, c))
		}
	}
	for _, c := range k.clients {
		b = c.state(b, since)
	}
	return b
}

// State appends the client's identity.
func (c *Client) State(b []byte, _ time.Time) []byte {
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	return Append(b, slices.Index(c.k.clients, c))
}

// state appends everything on which the client's future depends. k.mu must be held.
func (c *Client) state(b []byte, since time.Time) []byte {
	return Append(b, flag(c.accepted), flag(c.unread), flag(c.closed), flag(c.answered > 0), flag(c.owed), flag(c.refused), flag(c.reset), int(c.moved.Sub(since)))
}

// State appends the run's identity, and whether the run has ended.
func (p *Proc) State(b []byte, _ time.Time) []byte {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return Append(b, int(p.run), flag(p.dead), flag(p.frozen))
}

// state appends whether there is a guard, and whether it is closed. k.mu must be
// held.
func (g *guard) state(b []byte) []byte {
	return Append(b, flag(g != nil), flag(g != nil && g.closed))
}

// State appends everything on which the relay's future depends.
func (g *Gate) State(b []byte) []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Append(b, flag(g.held), flag(g.asleep), flag(g.waking), flag(g.failed != nil), flag(g.fresh != nil), g.inside, g.waiting)
}

// Append appends numbers to a state.
func Append(b []byte, ns ...int) []byte {
	for _, n := range ns {
		b = binary.AppendVarint(b, int64(n))
	}
	return b
}

func flag(on bool) int {
	if on {
		return 1
	}
	return 0
}
