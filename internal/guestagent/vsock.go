package guestagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

	"lull/internal/protocol/guest"
	"lull/internal/protocol/guest/vsock"
)

// overVsock is a vsock connection to the host.
type overVsock struct {
	*guest.Peer
	c io.Closer
}

// dialHost connects to the host. It loads those modules that are in ModuleDir; the
// others are built in.
func dialHost(ctx context.Context, port uint32, k vsock.Key) (io.ReadWriteCloser, error) {
	for _, m := range vsock.Modules {
		if err := loadModule(filepath.Join(ModuleDir, m+".ko")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	c, err := vsock.Dial(ctx, vsock.Host, port, k)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// moveToVsock connects to the vsock port on which the host waits, and sends further
// messages there.
func (h *Harness) moveToVsock(ctx context.Context, c guest.VsockCall) error {
	if len(c.Key) != len(vsock.Key{}) {
		return fmt.Errorf("cannot use key: %d bytes, want %d", len(c.Key), len(vsock.Key{}))
	}
	conn, err := h.cfg.DialHost(ctx, c.Port, vsock.Key(c.Key))
	if err != nil {
		return err
	}
	v := &overVsock{guest.NewPeer(conn), conn}
	h.mu.Lock()
	old := h.fast
	h.fast = v
	h.mu.Unlock()
	if old != nil {
		old.c.Close()
	}
	h.work.Go(func() { h.serveVsock(ctx, v) })
	return nil
}

// serveVsock serves one vsock connection until it ends. Messages then go over the
// port again.
func (h *Harness) serveVsock(ctx context.Context, v *overVsock) {
	defer v.c.Close()
	defer context.AfterFunc(ctx, func() { v.c.Close() })()
	err := h.serve(ctx, v.Peer)
	h.mu.Lock()
	was := h.fast == v
	if was {
		h.fast = nil
	}
	exit := h.exit
	h.mu.Unlock()
	if was && err != nil && ctx.Err() == nil {
		h.log.Warn("the vsock connection ended; using the serial port", "err", err)
	}
	if exit == nil || ctx.Err() != nil {
		return
	}
	// Report again, because the message may have been lost with the connection.
	if err := h.host().Notify(guest.Exited, *exit); err != nil {
		h.log.Warn("cannot report the end of the workload; the next hello will", "err", err)
	}
}

// prefers is called when a waking host has sent the time on p. If p is the port,
// the host has no vsock connection. One that was saved with the guest is then dead,
// and is closed.
func (h *Harness) prefers(p *guest.Peer) {
	h.mu.Lock()
	v := h.fast
	if v != nil && v.Peer != p {
		h.fast = nil
	}
	h.mu.Unlock()
	if v != nil && v.Peer != p {
		v.c.Close()
	}
}
