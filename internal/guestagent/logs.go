package guestagent

import (
	"context"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/protocol/guest"
)

// ringSize is the capacity for output that waits for the host.
const ringSize = 256 << 10

// Limits of the times of buffered output.
const (
	agePrecision = 100 * time.Millisecond
	maxMarks     = 4096
)

// mark is where in all output something printed at a time begins.
type mark struct {
	from uint64
	at   time.Time
}

// ring buffers output until it is sent. Writing never blocks: the oldest bytes
// are dropped and counted.
type ring struct {
	mu      sync.Mutex
	b       []byte
	begin   uint64 // where in all output b begins
	marks   []mark // of b, oldest first
	size    int
	timed   atomic.Bool // report times
	dropped uint64      // since the last take
	total   uint64      // ever dropped
	some    chan struct{}
	empty   chan struct{} // closed while nothing is buffered or being sent
	sending bool
	taken   time.Time // of the chunk that is being sent, when it was printed
}

func newRing(size int) *ring {
	r := &ring{size: size, some: make(chan struct{}, 1), empty: make(chan struct{})}
	close(r.empty)
	return r
}

// Write implements io.Writer.
func (r *ring) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.b) == 0 && !r.sending && len(p) > 0 {
		r.empty = make(chan struct{})
	}
	if n, now := len(r.marks), time.Now(); n == 0 || n < maxMarks && now.Sub(r.marks[n-1].at) >= agePrecision {
		r.marks = append(r.marks, mark{r.begin + uint64(len(r.b)), now})
	}
	r.b = append(r.b, p...)
	r.dropOver()
	select {
	case r.some <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (r *ring) readFrom(f *os.File) {
	buf := make([]byte, 32<<10)
	for {
		n, err := f.Read(buf)
		if n > 0 {
			_, _ = r.Write(buf[:n]) // never fails
		}
		if err != nil {
			return
		}
	}
}

// take removes the next chunk. The caller must call sent afterwards.
func (r *ring) take() (guest.LogNote, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.b) == 0 {
		return guest.LogNote{}, false
	}
	n := min(len(r.b), guest.MaxChunk)
	if len(r.marks) > 1 { // one age for each note
		n = min(n, int(r.marks[1].from-r.begin))
	}
	note := guest.LogNote{Data: append([]byte(nil), r.b[:n]...), Dropped: r.dropped}
	if r.taken = r.marks[0].at; r.timed.Load() {
		note.Age, note.At = time.Since(r.taken).Milliseconds(), r.taken.UnixMilli()
	}
	r.cut(n)
	r.dropped, r.sending = 0, true
	return note, true
}

// cut removes the first n bytes. The caller holds mu.
func (r *ring) cut(n int) {
	r.b = append(r.b[:0], r.b[n:]...)
	r.begin += uint64(n)
	for len(r.marks) > 1 && r.marks[1].from <= r.begin {
		r.marks = slices.Delete(r.marks, 0, 1)
	}
	if len(r.b) == 0 {
		r.marks = r.marks[:0]
	}
}

// sent completes a take. A chunk that was not sent is kept: the host ignores a line
// that did not reach it whole, so nothing is sent twice.
func (r *ring) sent(note guest.LogNote, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sending = false
	if !ok {
		r.putBack(note)
	}
	if len(r.b) == 0 {
		close(r.empty)
	}
}

// putBack puts a chunk before what was printed since. The caller holds mu.
func (r *ring) putBack(note guest.LogNote) {
	r.b = append(note.Data, r.b...)
	r.begin -= uint64(len(note.Data))
	if len(r.marks) == 0 || r.marks[0].from > r.begin {
		r.marks = slices.Insert(r.marks, 0, mark{r.begin, r.taken})
	}
	r.dropped += note.Dropped
	r.dropOver()
}

// dropOver drops the oldest bytes of what exceeds the capacity. The caller holds mu.
func (r *ring) dropOver() {
	if over := len(r.b) - r.size; over > 0 {
		r.cut(over)
		r.dropped += uint64(over)
		r.total += uint64(over)
	}
}

// lost returns the number of dropped bytes.
func (r *ring) lost() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.total
}

// drained waits until everything has been sent, at most for d.
func (r *ring) drained(d time.Duration) {
	r.mu.Lock()
	e := r.empty
	r.mu.Unlock()
	select {
	case <-e:
	case <-time.After(d):
	}
}

// sendLogs sends buffered output to the host.
func (h *Harness) sendLogs(ctx context.Context) {
	for {
		for {
			note, ok := h.logs.take()
			if !ok {
				break
			}
			err := h.host().Notify(guest.Log, note)
			h.logs.sent(note, err == nil)
			if err != nil {
				select {
				case <-time.After(retryRead):
				case <-ctx.Done():
					return
				}
			}
		}
		select {
		case <-h.logs.some:
		case <-ctx.Done():
			return
		}
	}
}

var _ io.Writer = (*ring)(nil)
