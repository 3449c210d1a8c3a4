package microvm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"lull/internal/core/instance"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/guest/files"
	"lull/internal/runtime/microvm/share"
)

// A guest requests the files of its workspace on a separate port, served by this
// process (package share). Each connection has a key, which the control channel
// transmits. Restored guests, killed QEMUs and killed daemons leave bytes on the
// port, and the key keeps both sides from mistaking these for messages.
//
// While the guest is frozen no request is started, so the guest changes nothing on
// disk. A request that arrives before the final check prevents the pause; a later
// one is answered after the thaw.

// checkWorkspace returns why a guest cannot have the workspace s, or nil.
func (r *Runtime) checkWorkspace(s string) error {
	ws, err := instance.ParseWorkspace(s)
	if err != nil || ws.Dir == "" {
		return err
	}
	if r.parts().kernel.Version != "" && !r.parts().kernel.FUSE {
		return fmt.Errorf("the guests' kernel %s has no module fuse", r.parts().kernel.Version)
	}
	dir, err := filepath.EvalSymlinks(ws.Dir)
	if err != nil {
		return err
	}
	own, err := filepath.EvalSymlinks(r.cfg.Dir)
	if err != nil {
		return err
	}
	if below(own, dir) || below(dir, own) {
		return fmt.Errorf("%s contains this host's virtual machines (%s)", ws.Dir, r.cfg.Dir)
	}
	return share.Check(ws.Dir)
}

// below reports whether path is dir or inside it.
func below(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}

// shareFiles creates the server of the workspace, once per Work.
func (w *Work) shareFiles() error {
	if w.files != nil || w.rec.Workspace == "" {
		return nil
	}
	ws, err := instance.ParseWorkspace(w.rec.Workspace)
	if err != nil {
		return err
	}
	w.filesAt = ws.Path
	s := share.New(ws.Dir, ws.ReadOnly)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.frozen {
		s.Hold()
	}
	w.files = s
	return nil
}

// carryFiles keeps the workspace's port connected, beginning with c, which exists
// before the guest runs (see cutSilent). Each cause of a disconnect is logged
// once.
func (w *Work) carryFiles(c *gatedConn) {
	for said, patient := "", silence(silentFirst); ; {
		var err error
		select { // a waking guest must send other messages first
		case <-w.firstAnswer:
			err = w.serveFiles(c, patient)
		case <-w.gone:
		case <-w.qctx.Done():
		}
		c.Close()
		patient.after(c)
		switch {
		case err == nil:
			said = ""
		case err.Error() != said && w.qctx.Err() == nil && !w.isGone():
			said = err.Error()
			w.r.log.Warn("the workspace of a guest was cut", "instance", w.id, "err", err)
		}
		if !w.pause() {
			return
		}
		if c, err = w.port(w.qctx, filesSocket); err != nil {
			return // QEMU has ended or was released
		}
	}
}

// serveFiles serves one connection until it ends.
func (w *Work) serveFiles(c *gatedConn, patient silence) error {
	var k files.Key
	rand.Read(k[:])
	call := guest.WorkspaceCall{Key: k[:], Path: w.filesAt, User: w.filesFor}
	if w.files == nil {
		call.Refuse = true
		err := w.begin(call)
		if err == nil {
			<-w.qctx.Done()
		}
		return err
	}
	call.ReadOnly = w.files.ReadOnly()
	return w.files.Serve(w.qctx, c, k, func() error {
		if err := w.begin(call); err != nil {
			return err
		}
		w.loops.Go(func() { w.cutSilent(c, patient) })
		return nil
	})
}

// begin announces a connection to the guest. A frozen guest receives the message
// when it is thawed, so begin waits as long as the control channel exists.
func (w *Work) begin(call guest.WorkspaceCall) error {
	w.mu.Lock()
	p := w.peer
	w.mu.Unlock()
	if p == nil {
		return guest.ErrChannelEnded
	}
	err := p.Call(w.qctx, guest.Workspace, call, nil)
	var refused *guest.Error
	if err == nil || errors.As(err, &refused) {
		select {
		case w.shared <- err:
		default:
		}
	}
	return err
}

// filesFault returns why every file access of the workspace fails, for display,
// or "".
func (w *Work) filesFault() string {
	w.mu.Lock()
	s := w.files
	w.mu.Unlock()
	if s == nil || s.Fault() == "" {
		return ""
	}
	return "every request for a file of its workspace fails until the workspace is available again: " + s.Fault()
}

// awaitFiles waits until the workspace is mounted.
func (w *Work) awaitFiles(ctx context.Context) error {
	select {
	case err := <-w.shared:
		return err
	case <-w.gone:
		return errors.New("cannot mount the workspace: QEMU has ended")
	case <-ctx.Done():
		return fmt.Errorf("cannot mount the workspace: %w", context.Cause(ctx))
	}
}
