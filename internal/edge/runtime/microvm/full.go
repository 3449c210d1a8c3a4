package microvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"lull/internal/instance"
	"lull/internal/link/guest"
)

// A guest that writes more to its own disk than this machine has room for is to
// hear ENOSPC like any program on a full disk. Its harness sees to that, which is
// told how much room there is. What slips through, because others use the room at
// the same time, would be an error of a write that the guest thinks is done, and
// cost it its file system: there QEMU stops the machine, and it goes on with that
// same write when there is room.

const (
	// layerSpare is what guests leave free on the file system of their disks.
	layerSpare = 32 << 20
	// resumeRoom is with how much room a machine that stands still goes on.
	resumeRoom = 16 << 20
	// scarceRoom is with how little a guest is in trouble.
	scarceRoom = 1 << 20
	// roomTick is how often a machine that stands still looks for room.
	roomTick = time.Second
)

// Of Work.told beside a number of bytes.
const (
	unlimited  = -1
	neverAsked = -2 // what an earlier daemon told is not known
)

// layerLeft is by how many bytes a guest's own disk may still grow, or unlimited.
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
	// Its memory is a sparse file, too.
	mem, err := r.memoryNeed(w.id, w.rec)
	if err != nil {
		return 0, err
	}
	_, here, err := standing(r.layers())
	_, there, merr := standing(mem.path)
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

// tellRoom tells a guest how much its own disk may grow, where that has changed.
// One that is being woken is told of less only: every question costs its client
// time. A harness from before there was such a call is not asked again.
func (w *Work) tellRoom(ctx context.Context, waking bool) {
	if !w.rec.Layer || w.roomless.Load() {
		return
	}
	left, err := w.layerLeft()
	if err != nil {
		w.r.log.Warn("it is not known how much room there is for a guest's files", "instance", w.id, "error", err)
		return
	}
	if waking && left == unlimited {
		return
	}
	w.mu.Lock()
	same := left == w.told || left >= 0 && w.told >= 0 && max(left-w.told, w.told-left) < scarceRoom
	w.mu.Unlock()
	if same {
		return
	}
	var refused *guest.Error
	switch err := w.ask(ctx, w.r.cfg.LookLimit, guest.Room, guest.RoomCall{Free: left}, nil); {
	case errors.As(err, &refused):
		w.r.log.Warn("a guest cannot be told how much room there is for its files", "instance", w.id, "error", err)
		w.roomless.Store(true)
	case err == nil:
		w.mu.Lock()
		w.told = left
		w.mu.Unlock()
	}
}

// ioError is QEMU's event of a read or write that failed.
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
	w.full = on
	w.mu.Unlock()
}

// stands says why the machine stands still for want of room, "" when it does not.
func (w *Work) stands() string {
	if full, _ := w.shortOfRoom(); full {
		return "it stands still until there is room for what it writes to its own disk: " + w.r.roomSaying()
	}
	return ""
}

// shortOfRoom says whether the machine stands still for want of room, and whether
// its guest was told that there is next to none.
func (w *Work) shortOfRoom() (stands, scarce bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.full, w.told >= 0 && w.told < scarceRoom
}

func (r *Runtime) roomSaying() string {
	free, err := freeBytes(r.layers())
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d bytes (%s) are free on the file system of %s", free, instance.Bytes(free), r.layers())
}

// awaitRoom lets a machine that stands still go on when there is room.
func (w *Work) awaitRoom() {
	if !w.awaiting.CompareAndSwap(false, true) {
		return
	}
	w.setFull(true)
	w.r.log.Warn("a guest stands still", "instance", w.id, "reason", w.stands())
	for w.pauseFor(roomTick) {
		m, err := w.monitor()
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(w.qctx, callLimit)
		if free, err := freeBytes(w.r.layers()); err == nil && free >= resumeRoom {
			err = m.do(ctx, "cont", nil, nil)
		}
		s, err := m.status(ctx)
		cancel()
		if err != nil || s == ioErrorStatus {
			continue
		}
		w.setFull(false)
		w.late.Store(true) // its clock stood still, too
		w.awaiting.Store(false)
		w.r.log.Info("a guest goes on", "instance", w.id)
		// A stop that came before awaiting was taken back has told nobody.
		if s, err := m.status(w.qctx); err != nil || s != ioErrorStatus || !w.awaiting.CompareAndSwap(false, true) {
			return
		}
		w.setFull(true)
	}
}

// ioErrorStatus is QEMU's word for a machine that it stopped at a failed write.
const ioErrorStatus = "io-error"
