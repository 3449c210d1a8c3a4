package host

import (
	"context"
	"runtime/debug"
	"time"
)

// Starting and checking an instance takes many times the memory that it needs while
// it sleeps, and Go keeps what it has once got from the kernel for a while, or for
// good if little happens. So after many pauses the host gives it back.

const (
	trimAt   = 64              // pauses since the last time
	trimPart = 8               // at least an eighth of all instances, because the cost is that of all
	trimRest = 2 * time.Second // without a pause
)

// notePause counts a pause.
func (h *Host) notePause() {
	if h.pauses.Add(1)%trimAt == 0 {
		select {
		case h.trims <- struct{}{}:
		default:
		}
	}
}

// trim gives memory back until ctx ends.
func (h *Host) trim(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.trims:
		}
		for n := int64(-1); n != h.pauses.Load(); {
			n = h.pauses.Load()
			select {
			case <-ctx.Done():
				return
			case <-time.After(trimRest):
			}
		}
		h.mu.RLock()
		all := len(h.byID)
		h.mu.RUnlock()
		if h.pauses.Load() >= int64(all/trimPart) {
			h.pauses.Store(0)
			debug.FreeOSMemory()
		}
	}
}
