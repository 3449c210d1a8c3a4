package guestagent

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"lull/internal/protocol/guest"
)

// Limits on LULL_SOCKET in the guest.
const (
	maxClients = 256
	hostLimit  = 30 * time.Second // maximum wait for an answer of the host
)

// serveWorkload forwards messages of programs to the host, and the host's answers
// back. A busy message keeps the instance awake as long as the program's connection
// is open.
func (h *Harness) serveWorkload(ctx context.Context, ln net.Listener) {
	if err := os.Chmod(h.cfg.Socket, 0o666); err != nil { // every user in the guest belongs to the workload
		h.log.Warn("cannot open the socket to every user", "err", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	slots := make(chan struct{}, maxClients)
	for {
		c, err := ln.Accept()
		if err != nil {
			if ctx.Err() == nil {
				h.log.Error("stopped serving programs", "err", err)
			}
			return
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
			defer context.AfterFunc(ctx, func() { c.Close() })()
			if err := h.serveProgram(ctx, c); err != nil && ctx.Err() == nil {
				h.log.Warn("a program's messages ended", "err", err)
			}
		})
	}
}

func (h *Harness) serveProgram(ctx context.Context, c net.Conn) error {
	busy := false
	defer func() {
		if busy {
			_ = h.setBusy(ctx, -1) // the program has disconnected; if the report fails, the next hello tells the host
		}
	}()
	return guest.Serve(c, func(m guest.Message) error {
		switch m.Method {
		case guest.Busy, guest.Waiting:
			on := m.Method == guest.Busy
			if on == busy {
				return nil
			}
			busy = on
			if on {
				return h.setBusy(ctx, +1)
			}
			return h.setBusy(ctx, -1)
		case guest.Keepalive:
			return h.ask(ctx, m.Method, map[string]any{"ttl_ms": m.Params.TTL.Milliseconds(), "reason": m.Params.Reason, "holder": m.Params.Holder})
		case guest.KeepaliveRelease:
			return h.ask(ctx, m.Method, map[string]any{"holder": m.Params.Holder})
		case guest.NextDue:
			if !m.Params.At.IsZero() {
				return h.ask(ctx, m.Method, map[string]any{"at": m.Params.At})
			}
			return h.ask(ctx, m.Method, map[string]any{"in_ms": m.Params.In.Milliseconds()})
		}
		return errors.New("cannot take activity from a program: the harness reads it itself")
	})
}

func (h *Harness) ask(ctx context.Context, method string, params any) error {
	ctx, cancel := context.WithTimeout(ctx, hostLimit)
	defer cancel()
	return h.host().Call(ctx, method, params, nil)
}

// setBusy adds n to the number of busy programs. It tells the host when the first
// becomes busy and when the last one stops.
func (h *Harness) setBusy(ctx context.Context, n int) error {
	h.mu.Lock()
	was := h.busy > 0
	h.busy += n
	is := h.busy > 0
	h.mu.Unlock()
	if was == is {
		return nil
	}
	if is {
		return h.ask(ctx, guest.Busy, nil)
	}
	return h.ask(ctx, guest.Waiting, nil)
}
