package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"lull/internal/protocol/guest"
)

// Rate limits on what a guest sends, in bytes per second and per burst. Each line
// has an extra cost, because short lines cause work too. What exceeds the limits is
// read later.
const (
	talkRate  = 8 << 20
	talkBurst = 4 << 20
	lineCost  = 1 << 10
	emptyCost = 1 << 6
	maxAge    = 24 * time.Hour
	maxAsks   = 16 // maximum concurrent messages of programs, fewer than a peer serves
)

// port connects to one of the guest's ports.
func (w *Work) port(ctx context.Context, socket string) (*gatedConn, error) {
	c, err := dialSocket(ctx, w.path(socket), w.gone)
	if err != nil {
		return nil, err
	}
	return w.ports.through(c)
}

// How long a running guest may be silent on a new connection of a port before the
// port is reconnected, at first and at most; and the interval of that check.
const (
	silentFirst = 500 * time.Millisecond
	silentMost  = time.Minute
	silentLook  = 100 * time.Millisecond
)

// silence is how long a guest may be silent on the next connection of a port.
type silence time.Duration

// after updates s after a connection has ended: it doubles unless the guest has
// said something on that connection.
func (s *silence) after(c *gatedConn) {
	*s = min(*s*2, silence(silentMost))
	if c.said.Load() {
		*s = silence(silentFirst)
	}
}

// cutSilent closes a connection on which a running guest is silent for limit.
//
// QEMU 7.2 does not notice if a port's connection ends while the machine is
// stopped. If the guest then writes before the next connection, the port is blocked
// and the next connection goes unnoticed. A disconnect while the machine runs
// clears that state.
func (w *Work) cutSilent(c *gatedConn, limit silence) {
	for left := time.Duration(limit); left > 0; {
		select {
		case <-c.heard:
			return
		case <-w.qctx.Done():
			return
		case <-time.After(silentLook):
		}
		if m, err := w.monitor(); err == nil {
			if s, err := m.status(w.qctx); err == nil && s == "running" {
				left -= silentLook
			}
		}
	}
	w.r.log.Warn("a guest does not answer on a port; reconnecting", "instance", w.id)
	c.Close()
}

// speak makes c the serial connection to the guest.
func (w *Work) speak(c net.Conn) *guest.Peer {
	p := guest.NewPeer(c)
	w.mu.Lock()
	w.peer = p
	w.mu.Unlock()
	return p
}

// talk serves the guest on c, and reconnects the control channel whenever it ends.
func (w *Work) talk(c *gatedConn, p *guest.Peer) {
	waking := w.waking.Swap(false)
	for patient := silence(silentFirst); ; {
		if w.tookOver { // a booting guest, unlike an adopted one, is silent for a long time
			c, limit := c, patient
			w.loops.Go(func() { w.cutSilent(c, limit) })
		}
		err := w.converse(c, p, waking)
		waking = false
		patient.after(c)
		if err != nil && w.qctx.Err() == nil && !w.isGone() {
			w.r.log.Warn("the control channel of a guest failed", "instance", w.id, "err", err)
		}
		if !w.pause() {
			return
		}
		if c, err = w.port(w.qctx, ctlSocket); err != nil {
			return
		}
		p = w.speak(c)
	}
}

// converse serves one connection of the control channel until it ends.
func (w *Work) converse(c io.Closer, p *guest.Peer, waking bool) error {
	defer c.Close()
	defer context.AfterFunc(w.qctx, func() { c.Close() })()
	live, ended := context.WithCancel(w.qctx)
	defer ended()
	var met atomic.Bool
	met.Store(waking)
	w.loops.Go(func() { w.greet(live, p, waking, &met) })
	err := p.Run(func(bytes int) error {
		cost := emptyCost
		if bytes > 1 {
			cost = lineCost + bytes
		}
		return w.slow.WaitN(w.qctx, cost)
	}, func(q guest.Request) (any, error) { return w.handle(q, met.Load()) })
	w.mu.Lock()
	if w.peer == p {
		w.peer = nil
	}
	w.mu.Unlock()
	return err
}

// greet sends hello on a new connection and handles what the answer says about the
// time before. A frozen guest answers only when it is thawed, so greet waits as
// long as the connection exists. For a guest that is being woken, the clock call
// includes hello, because in cold software emulation a second call takes tens of
// milliseconds.
func (w *Work) greet(ctx context.Context, p *guest.Peer, waking bool, met *atomic.Bool) {
	if waking {
		select {
		case a := <-w.hello:
			if a != nil {
				w.met(*a)
				return
			}
		case <-ctx.Done():
			return
		}
	}
	var a guest.HelloAnswer
	if err := p.Call(ctx, guest.Hello, guest.HelloCall{LogTimes: true}, &a); err == nil {
		met.Store(true)
		w.met(a)
	}
}

// met handles a guest's answer to hello.
func (w *Work) met(a guest.HelloAnswer) {
	if a.Version != guest.Version {
		w.r.log.Error("a guest has another protocol version", "instance", w.id, "version", a.Version, "want", guest.Version)
		return
	}
	if a.Exit != nil {
		w.exitNote(*a.Exit)
	}
	said := guest.Message{Method: guest.Waiting}
	if a.Busy {
		said.Method = guest.Busy
	}
	_ = w.message(said) // the reply does not matter
	w.firstAnswerOnce.Do(func() { close(w.firstAnswer) })
}

func (w *Work) exitNote(n guest.ExitNote) {
	select {
	case w.note <- n:
	default: // the exit was already reported
	}
}

// handle handles a message from a guest, whose whole content is bounded and
// validated. met means that the guest has answered on this connection, or is being
// woken: its clock may then be behind.
func (w *Work) handle(q guest.Request, met bool) (any, error) {
	switch q.Method {
	case guest.Log:
		var n guest.LogNote
		if err := q.Bind(&n); err != nil {
			return nil, err
		}
		at := time.Now().Add(-min(max(time.Duration(n.Age)*time.Millisecond, 0), maxAge))
		if t := time.UnixMilli(n.At); !met && n.At > 0 && t.Before(at) {
			at = t // the guest had sent it to an earlier daemon
		}
		if n.Dropped > 0 {
			fmt.Fprintf(w.log, "lull: %d bytes of output were lost here\n", n.Dropped)
		}
		if err := w.log.add(n.Data, at); err != nil {
			w.r.log.Error("cannot store a guest's output", "instance", w.id, "err", err)
		}
		return nil, nil
	case guest.Output:
		var n guest.OutputNote
		if err := q.Bind(&n); err != nil {
			return nil, err
		}
		w.output(n)
		return nil, nil
	case guest.Taken:
		var n guest.TakenNote
		if err := q.Bind(&n); err != nil {
			return nil, err
		}
		w.taken(n)
		return nil, nil
	case guest.Exited:
		var n guest.ExitNote
		if err := q.Bind(&n); err != nil {
			return nil, err
		}
		if n.Code < 0 || n.Code > 255 || n.Signal < 0 || n.Signal > 64 {
			return nil, &guest.Error{Code: guest.InvalidParams, Message: "cannot use code or signal: out of range"}
		}
		w.exitNote(n)
		return nil, nil
	}
	m, err := q.Message()
	if err != nil {
		return nil, err
	}
	if m.Method == guest.Activity {
		return nil, nil // ignored, because health calls return more
	}
	if q.ID == nil {
		return nil, errors.New("cannot accept a program's message without an id")
	}
	return nil, w.message(m)
}

// message forwards a message of a program. It must not delay the goroutine that
// reads everything the guest sends. A few messages are therefore handled
// concurrently, and any more are rejected.
func (w *Work) message(m guest.Message) error {
	if w.r.cfg.OnMessage == nil {
		return errors.New("cannot accept messages of programs here")
	}
	select {
	case w.asks <- struct{}{}:
		defer func() { <-w.asks }()
	default:
		return fmt.Errorf("cannot accept the message: %d messages of this guest are in progress", maxAsks)
	}
	ctx, cancel := context.WithTimeout(w.qctx, callLimit)
	defer cancel()
	return w.r.cfg.OnMessage(ctx, w.id, m)
}
