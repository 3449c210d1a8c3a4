package microvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/instance"
	"lull/internal/protocol/guest"
)

// A guest that fills its own disk should get ENOSPC, like any program on a full
// disk. The guest agent ensures that, based on the free space of the host. If
// something else uses up that space first, a write fails that the guest considers
// complete, which would destroy its file system. QEMU therefore stops the machine
// on such an error, and repeats the write once there is space.

const (
	// layerSpare is the free space, in bytes, that guests must leave on the file
	// system of their disks.
	layerSpare = 32 << 20
	// resumeSpace is the free space, in bytes, at which a stopped machine is
	// continued.
	resumeSpace = 16 << 20
	// scarceSpace is the reported free space, in bytes, below which a guest's disk
	// counts as almost full.
	scarceSpace = 1 << 20
	// spaceCheckInterval is how often the free space is checked while a machine is
	// stopped.
	spaceCheckInterval = time.Second
)

// Special values of Work.reportedSpace, which otherwise is a number of bytes.
const (
	unlimited  = -1
	neverAsked = -2 // what an earlier daemon has reported is unknown
)

// layerLeft returns by how many bytes a guest's own disk may grow, or unlimited.
func (w *Work) layerLeft() (int64, error) {
	r := w.r
	layer := r.layer(w.id)
	has, err := taken(layer)
	if err != nil {
		return 0, err
	}
	size, err := fileSize(layer)
	if err != nil {
		return 0, err
	}
	left, err := freeBytes(r.layers())
	if err != nil {
		return 0, err
	}
	left -= layerSpare
	// The guest's memory is a sparse file too, and may still grow.
	mem, err := r.memoryNeed(w.id, w.rec)
	if err != nil {
		return 0, err
	}
	_, here, err := existingParent(r.layers())
	_, there, merr := existingParent(mem.path)
	if err := errors.Join(err, merr); err != nil {
		return 0, err
	}
	if here == there {
		left -= max(mem.bytes, 0)
	}
	if left >= size-has {
		return unlimited, nil
	}
	return max(left, 0), nil
}

// reportSpace tells a guest by how much its own disk may grow, if that has changed.
// While the guest is being woken, it reports only decreases, because each call
// delays the guest's client. A guest agent that does not know the call is not
// called again.
func (w *Work) reportSpace(ctx context.Context, waking bool) {
	if !w.rec.Layer || w.noSpaceCall.Load() {
		return
	}
	left, err := w.layerLeft()
	if err != nil {
		w.r.log.Warn("cannot read the free space for a guest's files", "instance", w.id, "err", err)
		return
	}
	if waking && left == unlimited {
		return
	}
	w.mu.Lock()
	same := left == w.reportedSpace || left >= 0 && w.reportedSpace >= 0 && max(left-w.reportedSpace, w.reportedSpace-left) < scarceSpace
	w.mu.Unlock()
	if same {
		return
	}
	var refused *guest.Error
	switch err := w.ask(ctx, w.r.cfg.LookLimit, guest.Room, guest.RoomCall{Free: left}, nil); {
	case errors.As(err, &refused):
		w.r.log.Warn("cannot report the free space to a guest", "instance", w.id, "err", err)
		w.noSpaceCall.Store(true)
	case err == nil:
		w.mu.Lock()
		w.reportedSpace = left
		w.mu.Unlock()
	}
}

// ioError handles QEMU's event for a failed read or write.
func (w *Work) ioError(data json.RawMessage) {
	var d struct {
		Action    string `json:"action"`
		Operation string `json:"operation"`
		NoSpace   bool   `json:"nospace"`
	}
	if json.Unmarshal(data, &d) == nil && d.Action == "stop" {
		w.setFull(true)
	}
}

func (w *Work) setFull(on bool) {
	w.mu.Lock()
	w.outOfSpace = on
	w.mu.Unlock()
}

// stands returns why the machine is stopped for lack of disk space, or "" if it is
// not.
func (w *Work) stands() string {
	if full, _ := w.shortOfSpace(); full {
		return "it is stopped until its own disk has space to write: " + w.r.roomSaying()
	}
	return ""
}

// shortOfSpace reports whether the machine is stopped for lack of disk space, and
// whether its guest was last told that almost none is left.
func (w *Work) shortOfSpace() (stands, scarce bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.outOfSpace, w.reportedSpace >= 0 && w.reportedSpace < scarceSpace
}

func (r *Runtime) roomSaying() string {
	free, err := freeBytes(r.layers())
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d bytes (%s) are free on the file system of %s", free, instance.Bytes(free), r.layers())
}

// awaitSpace waits until there is space and continues a stopped machine.
func (w *Work) awaitSpace() {
	if !w.awaiting.CompareAndSwap(false, true) {
		return
	}
	w.setFull(true)
	w.r.log.Warn("guest stopped for lack of disk space", "instance", w.id, "reason", w.stands())
	for w.pauseFor(spaceCheckInterval) {
		m, err := w.monitor()
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(w.qctx, callLimit)
		if free, err := freeBytes(w.r.layers()); err == nil && free >= resumeSpace {
			_ = m.do(ctx, "cont", nil, nil) // the status read below shows whether it succeeded
		}
		s, err := m.status(ctx)
		cancel()
		if err != nil || s == ioErrorStatus {
			continue
		}
		w.setFull(false)
		w.clockLate.Store(true) // the guest's clock has stopped as well
		w.awaiting.Store(false)
		w.r.log.Info("a guest continues", "instance", w.id)
		// A stop that happened before awaiting was reset has not been handled.
		if s, err := m.status(w.qctx); err != nil || s != ioErrorStatus || !w.awaiting.CompareAndSwap(false, true) {
			return
		}
		w.setFull(true)
	}
}

// ioErrorStatus is the status of a machine that QEMU has stopped because of a
// failed write.
const ioErrorStatus = "io-error"
