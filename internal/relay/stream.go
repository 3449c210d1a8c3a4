package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// stream is a connection carried by goroutines, because its listener or its backend
// is not a kernel socket.
type stream struct {
	track
	in     *Instance
	ln     *Listener
	client net.Conn
	inside bool

	mu      sync.Mutex
	backend net.Conn
	dead    bool
}

func (l *Listener) acceptStreams() {
	for {
		nc, err := l.ln.Accept()
		if err != nil {
			if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
				continue
			}
			l.mu.RLock()
			closed := l.closed
			l.mu.RUnlock()
			if !closed {
				l.in.stats.note(fmt.Errorf("cannot accept: %w", err))
				l.in.log.Error("cannot accept connections", "instance", l.in.name, "err", err)
			}
			return
		}
		in := l.in
		in.stats.accepted.Add(1)
		s := &stream{in: in, ln: l, client: nc}
		s.owner = s
		s.last.Store(time.Now().UnixNano())
		if l.open.Add(1) > int64(in.opt.MaxOpen) {
			in.stats.refused.Add(1)
			l.open.Add(-1)
			_ = nc.Close()
			continue
		}
		in.link(&s.track)
		in.streams.Go(func() { s.serve(Backend{}, false) })
	}
}

func (s *stream) remote() netip.AddrPort {
	if t, ok := s.client.RemoteAddr().(*net.TCPAddr); ok {
		return t.AddrPort()
	}
	return netip.AddrPort{}
}

// serve carries the connection to its end. have means that b is already known and
// that the connection is counted as inside.
func (s *stream) serve(b Backend, have bool) {
	in := s.in
	defer func() {
		if p := recover(); p != nil {
			in.stats.panics.Add(1)
			in.log.Error("connection panicked", "instance", in.name, "panic", p, "stack", string(debug.Stack()))
		}
		s.askCut()
		switch {
		case s.inside && s.noise:
			in.gate.ignored.Add(-1)
		case s.inside:
			in.gate.leaveInside()
		}
		s.ln.open.Add(-1)
		in.unlink(&s.track)
	}()
	if !have {
		a := Arrival{Instance: in.name, Port: s.ln.port, Remote: s.remote(), Cause: CauseConnect, At: time.Now()}
		var err error
		if b, err = in.admit(in.ctx, a); err != nil {
			s.turnAway()
			return
		}
		s.inside = true
	}
	bc, err := in.dialBackend(in.ctx, b, s.ln.port)
	if err != nil {
		in.stats.unreachable.Add(1)
		in.stats.note(err)
		s.turnAway()
		return
	}
	s.mu.Lock()
	s.backend = bc
	dead := s.dead
	s.mu.Unlock()
	if dead {
		_ = bc.Close()
		return
	}
	if !s.noise {
		in.stats.relayed.Add(1)
	}
	g := &gated{Conn: bc, in: in, port: s.ln.port, remote: s.remote()}
	g.track.Store(&s.track)
	s.carry(g)
}

func (s *stream) carry(backend *gated) {
	var up sync.WaitGroup
	up.Go(func() { s.copyHalf(backend, s.client) })
	s.copyHalf(s.client, backend)
	up.Wait()
}

// copyHalf copies src to dst, and passes on its end. An error closes both.
func (s *stream) copyHalf(dst, src net.Conn) {
	defer func() {
		if p := recover(); p != nil {
			s.in.stats.panics.Add(1)
			s.in.log.Error("connection panicked", "panic", p, "stack", string(debug.Stack()))
			s.askCut()
		}
	}()
	buf := restBuffers.Get().(*[]byte)
	defer restBuffers.Put(buf)
	// The wrappers hide ReadFrom and WriteTo, which would bypass them.
	_, err := io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, *buf)
	if err == nil {
		if half, ok := dst.(interface{ CloseWrite() error }); ok {
			err = half.CloseWrite()
		} else {
			err = io.ErrClosedPipe
		}
	}
	if err != nil {
		if errors.Is(err, syscall.ECONNRESET) {
			lingerNone(s.client)
		}
		s.askCut()
	}
}

func lingerNone(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
}

func (s *stream) askCut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = true
	_ = s.client.Close()
	if s.backend != nil {
		_ = s.backend.Close()
	}
}

// admit counts an arrival as inside and returns its backend. It wakes the instance
// first if necessary. After an error nothing remains counted.
func (in *Instance) admit(ctx context.Context, a Arrival) (Backend, error) {
	in.gate.lastArrival.Store(a.At.UnixNano())
	w := &waiter{arrival: a, ch: make(chan error, 1)}
	ok := in.gate.enter()
	for {
		if ok {
			if b, ready := in.waker.Ready(a.Port); ready {
				return b, nil
			}
			in.gate.insideToWaiting()
		}
		if err := in.waitFor(ctx, w); err != nil {
			if !errors.Is(err, errShowPage) {
				in.gate.leaveWaiting()
			}
			return Backend{}, err
		}
		ok = in.gate.reenter()
	}
}

// waitFor queues w and waits until it is resumed. After errShowPage, w stays in the
// queue and counted as waiting; linger ends that.
func (in *Instance) waitFor(ctx context.Context, w *waiter) error {
	if err := in.enqueue(w); err != nil {
		if errors.Is(err, ErrQueueFull) {
			in.stats.refused.Add(1)
		} else if errors.Is(err, ErrNotAccept) {
			in.stats.unreachable.Add(1)
			in.stats.note(err)
		}
		return err
	}
	select {
	case err := <-w.ch:
		return err
	case <-ctx.Done():
		if errors.Is(context.Cause(ctx), errShowPage) {
			in.linger(w)
			return errShowPage
		}
		if !in.dequeue(w) {
			<-w.ch
		}
		in.stats.gone.Add(1)
		return errors.Join(errClientGone, ctx.Err())
	}
}

// dialBackend connects to the backend, and retries while that refuses. After a
// timeout it returns the backend's last error, if there is one, because that says
// more.
func (in *Instance) dialBackend(ctx context.Context, b Backend, port int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, in.opt.DialTimeout)
	defer cancel()
	dial := b.Dial
	if dial == nil {
		dial = func(ctx context.Context) (net.Conn, error) {
			// The backend is on this machine, so its kernel reports its end without
			// keepalive.
			d := net.Dialer{KeepAlive: -1}
			return d.DialContext(ctx, "tcp", b.Addr.String())
		}
	}
	var failure error
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		c, err := dial(ctx)
		if err == nil {
			return c, nil
		}
		if failure == nil || ctx.Err() == nil {
			failure = err
		}
		pause := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			pause.Stop()
			return nil, fmt.Errorf("cannot connect to %s port %d: %w", in.name, port, failure)
		case <-pause.C:
		}
	}
}

// gated is a backend connection whose writes pass the gate. While the backend is
// held or asleep, they wait, and a wake is requested.
type gated struct {
	net.Conn
	in     *Instance
	port   int
	remote netip.AddrPort
	track  atomic.Pointer[track] // the connection or request whose bytes are being written
}

func (g *gated) Read(p []byte) (int, error) {
	n, err := g.Conn.Read(p)
	if n > 0 {
		now := time.Now().UnixNano()
		g.touch(now, false)
		if !g.noise() {
			g.in.gate.lastByte.Store(now)
		}
	}
	return n, err
}

func (g *gated) noise() bool {
	k := g.track.Load()
	return k != nil && k.noise
}

func (g *gated) touch(now int64, owed bool) {
	if k := g.track.Load(); k != nil {
		k.last.Store(now)
		k.owed.Store(owed)
	}
}

func (g *gated) Write(p []byte) (int, error) {
	noise := g.noise()
	if err := g.pass(noise); err != nil {
		return 0, err
	}
	n, err := g.Conn.Write(p)
	g.leave(n > 0, noise)
	return n, err
}

// CloseWrite passes the gate too, because the backend must be awake to see the end.
func (g *gated) CloseWrite() error {
	half, ok := g.Conn.(interface{ CloseWrite() error })
	if !ok {
		return fmt.Errorf("cannot half-close a %T", g.Conn)
	}
	noise := g.noise()
	if err := g.pass(noise); err != nil {
		return err
	}
	defer g.leave(false, noise)
	return half.CloseWrite()
}

func (g *gated) leave(moved, noise bool) {
	now := time.Now().UnixNano()
	if moved {
		g.touch(now, true)
	}
	if !noise {
		g.in.gate.end(moved, now)
	}
}

// pass returns once the caller may send bytes. The caller must then call leave.
func (g *gated) pass(noise bool) error {
	in := g.in
	if noise {
		for in.gate.shut() {
			w := &waiter{noise: true, ch: make(chan error, 1), arrival: Arrival{Cause: CauseData}}
			if err := in.enqueue(w); err != nil {
				return err
			}
			if !in.gate.shut() && in.dequeue(w) {
				return nil
			}
			select {
			case err := <-w.ch:
				if err != nil {
					return err
				}
			case <-in.ctx.Done():
				in.dequeue(w)
				return ErrClosed
			}
		}
		return nil
	}
	var w *waiter
	for !in.gate.begin() {
		if w == nil {
			w = &waiter{ch: make(chan error, 1), arrival: Arrival{
				Instance: in.name, Port: g.port, Remote: g.remote, Cause: CauseData, At: time.Now(),
			}}
		}
		err := in.waitFor(in.ctx, w)
		in.gate.leaveWaiting()
		if err != nil {
			return err
		}
	}
	return nil
}
