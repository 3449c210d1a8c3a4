package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"

	"lull/internal/host"
	"lull/internal/lib/unixsock"
	"lull/internal/protocol/guest"
)

// maxPrograms bounds the number of open connections to LULL_SOCKET.
const maxPrograms = 4096

// Programs serves LULL_SOCKET, on which programs report about themselves. The
// sender is identified by the PID that the kernel provides, not by the message.
type Programs struct {
	Host     *host.Host
	Log      *slog.Logger
	Listener *unixsock.Listener
	Identify func(pid int) (id string, err error) // returns the ID of the instance to which a process belongs
}

// Run serves until ctx ends.
func (p *Programs) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := context.AfterFunc(ctx, func() { p.Listener.Close() })
	defer stop()
	slots := make(chan struct{}, maxPrograms)
	for {
		c, err := p.Listener.AcceptUnix()
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
			if err := p.serve(ctx, c); err != nil && ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
				p.Log.Warn("a workload's messages ended", "err", err)
			}
		})
	}
}

func (p *Programs) serve(ctx context.Context, c *net.UnixConn) error {
	peer, err := unixsock.PeerOf(c)
	if err != nil {
		return err
	}
	id, err := p.Identify(peer.PID)
	if err != nil {
		return fmt.Errorf("cannot determine the owner of process %d: %w", peer.PID, err)
	}
	if !p.Host.Has(id) {
		return &host.NotFoundError{Name: id}
	}
	busy := false
	defer func() {
		if busy { // the program has disconnected without reporting that its work is done
			_ = p.Host.ProgramBusy(id, -1) // fails only if the instance was removed
		}
	}()
	return guest.Serve(c, func(m guest.Message) error {
		switch {
		case m.Method == guest.Busy && !busy:
			busy = true
			return p.Host.ProgramBusy(id, +1)
		case m.Method == guest.Waiting && busy:
			busy = false
			return p.Host.ProgramBusy(id, -1)
		}
		return p.Host.FromProgram(ctx, id, m)
	})
}
