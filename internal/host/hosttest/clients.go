package hosttest

import (
	"sync/atomic"
	"time"

	"lull/internal/core/instance"
)

// guard implements instance.Guard.
type guard struct {
	p      *Proc
	wake   func(string)
	closed bool
}

// Guard implements instance.Workload.
func (p *Proc) Guard(_ []instance.Endpoint, _ bool, wake func(string)) (instance.Guard, error) {
	p.k.mu.Lock()
	if !p.frozen && !p.dead {
		p.k.breach("%s was guarded while it runs", p.id)
	}
	g := &guard{p: p, wake: wake}
	p.guard = g
	p.k.see("arm", -1)
	what := p.pending()
	p.k.mu.Unlock()
	if what != "" { // like a real poll set, it also reports earlier arrivals
		g.fire(what)
	}
	return g, nil
}

func (g *guard) fire(what string) {
	g.p.k.pointWith("poller", func(b []byte, _ time.Time) []byte {
		g.p.k.mu.Lock()
		defer g.p.k.mu.Unlock()
		return g.state(b)
	})
	g.p.k.mu.Lock()
	closed := g.closed
	g.p.k.mu.Unlock()
	if !closed {
		g.wake(what)
	}
}

// Pending implements instance.Guard.
func (g *guard) Pending() string {
	g.p.k.mu.Lock()
	defer g.p.k.mu.Unlock()
	if g.closed {
		return ""
	}
	return g.p.pending()
}

// Close implements instance.Guard.
func (g *guard) Close() {
	g.p.k.mu.Lock()
	defer g.p.k.mu.Unlock()
	g.closed = true
	if g.p.guard == g {
		g.p.k.see("disarm", -1)
		g.p.guard = nil
	}
}

func (p *Proc) pending() string {
	if len(p.backlog) > 0 {
		return "a client waits in the backlog"
	}
	what := ""
	for _, c := range p.open {
		switch {
		case c.unread:
			return "data on a simulated connection"
		case c.closed: // the same wording as in package sockets
			what = "closed by the client: a simulated connection"
		}
	}
	return what
}

// ConnectUnix is Connect over a unix socket. How long such a client has been
// quiet is unknown, so it counts as active.
func (k *Kernel) ConnectUnix(id string) *Client {
	c := k.Connect(id)
	k.mu.Lock()
	c.local = true
	k.mu.Unlock()
	return c
}

// quietFor returns for how long the connection has carried no byte. k.mu must be
// held.
func (c *Client) quietFor() time.Duration {
	if c.local {
		return 0
	}
	return time.Since(c.moved)
}

// Connect connects a client, which sends its first bytes. The kernel completes the
// handshake even if the program does not run.
func (k *Kernel) Connect(id string) *Client { return k.connect(id, k.arrival(), nil) }

// arrival returns the number of the next client.
func (k *Kernel) arrival() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.arrivals++
	return k.arrivals - 1
}

// connect is Connect, through the relay gate unless that is nil.
func (k *Kernel) connect(id string, n int, gate *Gate) *Client {
	c := &Client{k: k, id: id, n: n, unread: true, moved: time.Now(), gate: gate}
	if k.At != nil {
		k.mu.Lock()
		k.clients = append(k.clients, c)
		k.mu.Unlock()
	}
	k.pointWith("connect", c.State)
	k.mu.Lock()
	q := k.kept[id]
	for gate == nil && q != nil && q.shut != nil {
		opened := q.shut
		k.mu.Unlock()
		<-opened
		k.pointWith("connect", c.State) // the client's first packet was ignored, so it is sent again
		k.mu.Lock()
		q = k.kept[id]
	}
	if gate != nil && gate.dead {
		c.reset = true
		k.mu.Unlock()
		return c
	}
	p := k.procs[id]
	switch {
	case p != nil && !p.dead:
	case q != nil && gate == nil:
		k.see("queued", n)
		q.backlog = append(q.backlog, c)
		g := q.guard
		k.mu.Unlock()
		if g != nil {
			g.fire()
		}
		return c
	default:
		c.refused = true
		k.see("refused", n)
		k.mu.Unlock()
		return c
	}
	k.see("queued", n)
	p.backlog = append(p.backlog, c)
	k.stir(p)
	return c
}

// stir makes a running program work, or a frozen one's guard fire. It releases
// k.mu, which must be held.
func (k *Kernel) stir(p *Proc) {
	if !p.frozen {
		p.work()
		k.mu.Unlock()
		return
	}
	g, what := p.guard, p.pending()
	k.mu.Unlock()
	if g != nil {
		g.fire(what)
	}
}

// Send sends more bytes on an open connection.
func (c *Client) Send() {
	c.k.pointWith("send", c.State)
	c.k.mu.Lock()
	p := c.k.procs[c.id]
	if p == nil || p.dead || c.reset || c.refused || c.closed {
		c.k.mu.Unlock()
		return
	}
	if c.accepted && !c.unread {
		c.k.see("sent", c.n)
	}
	c.unread, c.moved = true, time.Now()
	c.k.stir(p)
}

// Close closes the connection from the client's side.
func (c *Client) Close() {
	c.k.pointWith("close", c.State)
	c.k.mu.Lock()
	p := c.k.procs[c.id]
	if p == nil || p.dead || c.reset || c.refused {
		c.k.mu.Unlock()
		return
	}
	if c.closed = true; c.accepted && !c.unread { // otherwise the program first reads the remaining bytes
		c.noticed = true
		c.k.see("closed", c.n)
	}
	c.k.stir(p)
}

// Outcome returns "answered", "refused", "reset" or "waiting".
func (c *Client) Outcome() string {
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	switch {
	case c.answered > 0:
		return "answered"
	case c.refused:
		return "refused"
	case c.reset:
		return "reset"
	}
	return "waiting"
}

// Relayed reports whether the client came through the relay.
func (c *Client) Relayed() bool { return c.gate != nil }

// Disk keeps records in memory and counts writes. It implements records.Store.
type Disk struct {
	On     func(r *instance.Record) // called at each write, unless nil
	Writes atomic.Int64

	recs map[string]instance.Record
	sem  chan struct{}
}

// NewDisk returns an empty Disk.
func NewDisk() *Disk {
	return &Disk{recs: map[string]instance.Record{}, sem: make(chan struct{}, 1)}
}

// Put implements records.Store.
func (d *Disk) Put(r *instance.Record) error {
	if d.On != nil {
		d.On(r)
	}
	return d.put(r)
}

func (d *Disk) put(r *instance.Record) error {
	d.sem <- struct{}{}
	d.recs[r.ID] = *r
	d.Writes.Add(1)
	<-d.sem
	return nil
}

// Note implements records.Store.
func (d *Disk) Note(r *instance.Record) error { return d.Put(r) }

// Delete implements records.Store.
func (d *Disk) Delete(id string) error {
	d.sem <- struct{}{}
	delete(d.recs, id)
	<-d.sem
	return nil
}

// All returns the records that a crash at this moment would leave.
func (d *Disk) All() []instance.Record {
	d.sem <- struct{}{}
	defer func() { <-d.sem }()
	var out []instance.Record
	for _, r := range d.recs {
		out = append(out, r)
	}
	return out
}

// Session is one daemon's access to a disk. Once the session is Dead, nothing is
// written, not even by a write in progress.
type Session struct {
	*Disk
	Dead atomic.Bool
}

// Put implements records.Store.
func (s *Session) Put(r *instance.Record) error {
	if s.Dead.Load() {
		return errDead
	}
	if s.On != nil {
		s.On(r)
	}
	if s.Dead.Load() {
		return errDead
	}
	return s.put(r)
}

// Note implements records.Store.
func (s *Session) Note(r *instance.Record) error { return s.Put(r) }

// Spec returns the spec of a program that listens on one port, reached both
// directly and through the relay, and that is not restarted. change, if not nil, is
// applied last.
func Spec(name string, change func(*instance.Spec)) instance.Spec {
	s := instance.Spec{Name: name, Command: []string{"x"}, Restart: instance.RestartNo, Expose: []instance.Endpoint{
		{Listen: "127.0.0.1:80", Target: "127.0.0.1:80"}, {Listen: "127.0.0.1:81", Target: "127.0.0.1:80"}}}
	if change != nil {
		change(&s)
	}
	return s
}
