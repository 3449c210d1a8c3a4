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

// Rate limits for what a guest sends, in bytes per second and per burst. Each
// line costs extra, because short lines are work as well. Excess input is read
// later.
const (
	talkRate  = 8 << 20
	talkBurst = 4 << 20
	lineCost  = 1 << 10
	emptyCost = 1 << 6
	maxAge    = 24 * time.Hour
	maxAsks   = 16 // maximum messages of programs in progress; fewer than a peer serves
)

// port connects to one of the guest's ports.
func (w *Work) port(ctx context.Context, socket string) (*gatedConn, error) {
	c, err := dialSocket(ctx, w.path(socket), w.gone)
	if err != nil {
		return nil, err
	}
	return w.ports.through(c)
}

// The time for which a running guest may be silent on a port before it is
// reconnected, at first and at most, and the interval of the check.
const (
	silentFirst = 500 * time.Millisecond
	silentMost  = time.Minute
	silentLook  = 100 * time.Millisecond
)

// silence is how long the next connection of a port may be silent.
type silence time.Duration

// after updates s when a connection has ended.
func (s *silence) after(c *gatedConn) {
	*s = min(*s*2, silence(silentMost))
	if c.said.Load() {
		*s = silence(silentFirst)
	}
}

// cutSilent closes a connection on which a running guest does not answer. QEMU 7.2
// does not notice when a port's connection ends while the machine is stopped: if
// the guest then writes before the next connection, the port blocks permanently
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

// talk serves the guest on c, and keeps the control channel connected afterwards.
func (w *Work) talk(c *gatedConn, p *guest.Peer) {
	waking := w.waking.Swap(false)
	for patient := silence(silentFirst); ; {
		if w.tookOver { // a booting guest is silent for a long time
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

// converse serves one connection of the channel until it ends.
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

// greet sends hello on a new channel and processes the missed messages. A
// frozen guest answers when it is thawed, so this waits as long as the channel
// exists. A guest being woken answers hello along with the clock call: in cold
// software emulation a second call costs tens of milliseconds.
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

// met processes a guest's report about itself.
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
	_ = w.message(said) // the reply is not needed
	w.firstAnswerOnce.Do(func() { close(w.firstAnswer) })
}

func (w *Work) exitNote(n guest.ExitNote) {
	select {
	case w.note <- n:
	default: // already reported
	}
}

// handle handles a request from a guest. All of it is bounded and validated. met
// says that the guest has answered on this connection or is waking, so that its
// clock may be behind.
func (w *Work) handle(q guest.Request, met bool) (any, error) {
	switch q.Method {
	case guest.Log:
		var n guest.LogNote
		if err := q.Bind(&n); err != nil {
			return nil, err
		}
		at := time.Now().Add(-min(max(time.Duration(n.Age)*time.Millisecond, 0), maxAge))
		if t := time.UnixMilli(n.At); !met && n.At > 0 && t.Before(at) {
			at = t // sent to an earlier daemon
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
		return nil, nil // the health readings are more complete
	}
	if q.ID == nil {
		return nil, errors.New("cannot accept a program's message without an id")
	}
	return nil, w.message(m)
}

// message forwards a message of a program. One goroutine reads all replies and
// messages of a guest, and messages must not delay it. A few are therefore
// handled concurrently, and further ones are rejected.
func (w *Work) message(m guest.Message) error {
	if w.r.cfg.OnMessage == nil {
		return errors.New("cannot take messages of programs here")
	}
	select {
	case w.asks <- struct{}{}:
		defer func() { <-w.asks }()
	default:
		return fmt.Errorf("cannot take it: %d messages of this guest are being worked on", maxAsks)
	}
	ctx, cancel := context.WithTimeout(w.qctx, callLimit)
	defer cancel()
	return w.r.cfg.OnMessage(ctx, w.id, m)
}
