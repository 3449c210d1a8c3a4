package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/lib/unixsock"
	"lull/internal/protocol/guest"
)

// maxGuests bounds the open connections of all workloads to LULL_SOCKET.
const maxGuests = 4096

// Guests serves LULL_SOCKET, through which workloads report on themselves. The
// sender is identified by the peer's PID, which the kernel provides, never by
// the message.
//
// A frozen program cannot send. So a message that is read while its instance is
// paused was sent before the freeze, and a message that holds an instance wakes
// it.
type Guests struct {
	Host     *Host
	Listener *unixsock.Listener
	Identify func(pid int) (id string, err error) // returns the instance that a process belongs to
}

// Run serves until ctx ends.
func (g *Guests) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := context.AfterFunc(ctx, func() { g.Listener.Close() })
	defer stop()
	slots := make(chan struct{}, maxGuests)
	for {
		c, err := g.Listener.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("cannot serve workloads: %w", err)
		}
		select {
		case slots <- struct{}{}:
		default:
			c.Close()
			continue
		}
		wg.Go(func() {
			defer func() { <-slots }()
			defer c.Close()
			end := context.AfterFunc(ctx, func() { c.Close() })
			defer end()
			if err := g.serve(c); err != nil && ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
				g.Host.log.Warn("a workload's messages ended", "err", err)
			}
		})
	}
}

func (g *Guests) serve(c *net.UnixConn) error {
	peer, err := unixsock.PeerOf(c)
	if err != nil {
		return err
	}
	id, err := g.Identify(peer.PID)
	if err != nil {
		return fmt.Errorf("cannot tell whose process %d is: %w", peer.PID, err)
	}
	i, err := g.Host.find(id)
	if err != nil {
		return err
	}
	busy := false
	defer func() {
		if busy { // it closed without saying that its work is done
			i.setBusy(-1)
		}
	}()
	return guest.Serve(c, func(m guest.Message) error {
		switch {
		case m.Method == guest.Busy && !busy:
			busy = true
			i.setBusy(+1)
			return nil
		case m.Method == guest.Waiting && busy:
			busy = false
			i.setBusy(-1)
			return nil
		}
		return g.Host.fromGuest(g.Host.ctx, i, m)
	})
}

// FromHarness handles a message that an instance's guest agent forwards for the
// programs beside it: Busy once one of them has work in progress, Waiting once
// none has. It may wait for the instance's lock until ctx ends.
func (h *Host) FromHarness(ctx context.Context, id string, m guest.Message) error {
	i, err := h.find(id)
	if err != nil {
		return err
	}
	if m.Method != guest.Busy && m.Method != guest.Waiting {
		return h.fromGuest(ctx, i, m)
	}
	on := m.Method == guest.Busy
	i.mu.Lock()
	changed := i.inside != on
	i.inside = on
	i.mu.Unlock()
	switch {
	case changed && on:
		i.setBusy(+1)
	case changed:
		i.setBusy(-1)
	}
	return nil
}

// fromGuest carries out one message of a workload.
func (h *Host) fromGuest(ctx context.Context, i *inst, m guest.Message) error {
	p := m.Params
	switch m.Method {
	case guest.Keepalive:
		if err := h.Hold(ctx, i.id, idle.Lease{Holder: p.Holder, Reason: p.Reason}, p.TTL); err != nil {
			return err
		}
		if i.state().Asleep() {
			i.wantWake("the program asked for a lease")
		}
		return nil
	case guest.KeepaliveRelease:
		return h.ReleaseLease(ctx, i.id, p.Holder)
	case guest.Busy, guest.Waiting: // a repetition; one message holds as long as its connection
	case guest.NextDue:
		at := p.At
		if at.IsZero() {
			at = h.now().Add(p.In)
		}
		if at.Sub(h.now()) > instance.MaxDeadline {
			return fmt.Errorf("cannot use next_due: %s is too far away", at.Format(time.RFC3339))
		}
		i.setNextDue(at)
	default:
		return fmt.Errorf("cannot take %s from a process: the host reads its activity itself", m.Method)
	}
	return nil
}
