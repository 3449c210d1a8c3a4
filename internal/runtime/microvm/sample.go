package microvm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"lull/internal/core/instance"
	"lull/internal/protocol/guest"
	"lull/internal/runtime/microvm/vnet"
)

// newClockCall returns the current time with fresh random bytes.
func newClockCall() guest.ClockCall {
	c := guest.ClockCall{UnixNano: time.Now().UnixNano(), Seed: make([]byte, 64)}
	rand.Read(c.Seed)
	return c
}

func (w *Work) setClock(ctx context.Context) error {
	c := newClockCall()
	if w.rec.Clone {
		c.Name, c.Machine = hostName(w.id), newMachineID()
	}
	ctx, cancel := context.WithTimeout(ctx, w.r.cfg.CallLimit)
	defer cancel()
	var a guest.ClockAnswer
	for {
		c.UnixNano = time.Now().UnixNano()
		err := w.ask(ctx, w.r.cfg.CallLimit, guest.SetClock, c, &a)
		if err == nil {
			break
		}
		var refused *guest.Error
		// If the channel was only cut, the call is repeated once it is connected
		// again.
		if errors.As(err, &refused) || ctx.Err() != nil || !w.pause() {
			return fmt.Errorf("cannot set the guest's clock: %w", err)
		}
	}
	if w.rec.Clone {
		w.rec.Clone = false
		if err := writeRecord(w.r.dir(w.id), w.rec); err != nil {
			return err
		}
	}
	w.r.log.Debug("clock set", "instance", w.id, "behind", time.Duration(a.Behind))
	select {
	case w.hello <- a.Hello:
	default: // already sent
	}
	return nil
}

// tuneClock corrects the clock of a guest that received the time late. After a
// restore in software emulation, or on a busy machine, delivery can take up to a
// second, and the guest's clock is behind by as much. off is the measured clock
// error, and way the round trip time of the measurement.
func (w *Work) tuneClock(off, way time.Duration) {
	if !w.clockLate.Load() {
		return
	}
	if off.Abs() <= way/2+clockSlack {
		w.clockLate.Store(false)
		return
	}
	err := w.ask(w.ctx, w.r.cfg.LookLimit, guest.SetClock, newClockCall(), nil)
	w.r.log.Debug("clock set again", "instance", w.id, "off", off, "seen_over", way, "err", err)
}

// probe probes the guest and stores the answer. If known, it returns the guest's
// clock error and the round trip time of the measurement.
func (w *Work) probe(ctx context.Context) (off, way time.Duration, known bool) {
	var a guest.HealthAnswer
	began := time.Now()
	err := w.ask(ctx, w.r.cfg.LookLimit, guest.Health, nil, &a)
	way = time.Since(began)
	if err == nil {
		w.answered()
	}
	if err == nil || w.examine(ctx) {
		w.takeConsole(ctx)
	}
	if known = err == nil && a.Now != 0; known {
		off = time.Unix(0, a.Now).Sub(began.Add(way / 2))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last, w.lastAt, w.lastHealthErr = a, time.Now(), err
	return off, way, known
}

// Sample implements instance.Workload. For a frozen guest it returns the readings
// from just before the freeze.
func (w *Work) Sample(ports []instance.Endpoint) instance.Sample {
	if !w.isFrozen() {
		if off, way, known := w.probe(w.ctx); known {
			w.tuneClock(off, way)
			w.reportSpace(w.ctx, false)
		}
	}
	open, ended := w.net.Opens()
	w.mu.Lock()
	a, at, err := w.last, w.lastAt, w.lastHealthErr
	w.mu.Unlock()
	if at.IsZero() && err == nil {
		at, err = time.Now(), errors.New("not probed since this daemon adopted the guest")
	}
	s := instance.Sample{At: at, CPU: time.Duration(a.CPU) * time.Millisecond, NetBytes: a.Net, Outbound: a.Outbound, LastClosed: ended}
	for _, o := range open {
		s.Inbound = append(s.Inbound, conn(o, a.Conns))
	}
	say := func(part string) error {
		switch {
		case err != nil:
			return fmt.Errorf("cannot read the guest: %w", err)
		case part != "":
			return fmt.Errorf("the guest cannot read it: %.500s", part)
		}
		return nil
	}
	s.Calls = w.net.Calls()
	s.DiskBytes, s.DiskErr = w.disk()
	s.CPUErr, s.NetErr, s.ConnErr = say(a.CPUErr), say(a.NetErr), say(a.TCPErr)
	return s
}

// conn combines a connection into the guest with what the guest reports about it.
func conn(o vnet.Open, waiting []guest.WaitingConn) instance.Conn {
	c := instance.Conn{Local: netip.AddrPortFrom(vnet.Guest, o.Port).String(), Remote: netip.AddrPortFrom(vnet.Gateway, o.From).String(),
		QuietFor: o.QuietFor, Turn: o.Turn, Accepted: true}
	for _, x := range waiting {
		if x.Port == o.Port && x.Remote == o.From {
			c.Unread, c.Accepted = x.Unread, x.Accepted
		}
	}
	return c
}

// Listeners implements instance.Workload. A listener on the guest's own address is
// reported as listening on every address, because the guest's address has no
// meaning outside.
func (w *Work) Listeners() ([]instance.Listener, error) {
	if !w.isFrozen() {
		w.probe(w.ctx)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lastHealthErr != nil {
		return nil, fmt.Errorf("cannot read the guest: %w", w.lastHealthErr)
	}
	if w.last.TCPErr != "" {
		return nil, fmt.Errorf("the guest cannot read it: %.500s", w.last.TCPErr)
	}
	return listeners(w.last.Listens), nil
}

func listeners(all []guest.ListenAddr) (out []instance.Listener) {
	for _, l := range all {
		ap, err := netip.ParseAddrPort(l.Addr)
		if err != nil || l.Network != "tcp" && l.Network != "udp" {
			continue
		}
		if ap.Addr() == vnet.Guest {
			ap = netip.AddrPortFrom(netip.IPv4Unspecified(), ap.Port())
		}
		out = append(out, instance.Listener{Network: l.Network, Addr: ap.String(), Private: ap.Addr().Unmap().IsLoopback(),
			Why: "it is inside a virtual machine; clients reach it through the relay"})
	}
	return out
}
