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

// ringSize is the capacity of the buffer for output that the host has not read, in
// bytes.
const ringSize = 256 << 10

// Limits on the times that are kept for buffered output.
const (
	agePrecision = 100 * time.Millisecond
	maxMarks     = 4096
)

// mark says that the output from the offset from on was printed at the time at.
// Offsets count all output since the start.
type mark struct {
	from uint64
	at   time.Time
}

// ring buffers output until it is sent. Writes never block. If the buffer is full,
// the oldest bytes are dropped and counted.
type ring struct {
	mu      sync.Mutex
	b       []byte
	begin   uint64 // offset of b in all output
	marks   []mark // marks of b, oldest first
	size    int
	timed   atomic.Bool // whether to send the times of output
	dropped uint64      // bytes dropped since the last take
	total   uint64      // bytes dropped in total
	some    chan struct{}
	empty   chan struct{} // closed while nothing is buffered and nothing is being sent
	sending bool
	taken   time.Time // when the chunk that is being sent was printed
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

// take removes the next chunk and returns it. The caller must then call sent.
func (r *ring) take() (guest.LogNote, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.b) == 0 {
		return guest.LogNote{}, false
	}
	n := min(len(r.b), guest.MaxChunk)
	if len(r.marks) > 1 { // a note has one age, so it ends at the next mark
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

// cut removes the first n bytes. r.mu must be held.
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

// sent must be called after take, with the chunk and whether it was sent. A chunk
// that was not sent is put back. Nothing reaches the host twice, because it ignores
// an incomplete line.
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

// putBack puts a chunk before the output that has been printed since take. r.mu
// must be held.
func (r *ring) putBack(note guest.LogNote) {
	r.b = append(note.Data, r.b...)
	r.begin -= uint64(len(note.Data))
	if len(r.marks) == 0 || r.marks[0].from > r.begin {
		r.marks = slices.Insert(r.marks, 0, mark{r.begin, r.taken})
	}
	r.dropped += note.Dropped
	r.dropOver()
}

// dropOver drops the oldest bytes that exceed the capacity. r.mu must be held.
func (r *ring) dropOver() {
	if over := len(r.b) - r.size; over > 0 {
		r.cut(over)
		r.dropped += uint64(over)
		r.total += uint64(over)
	}
}

// lost returns the number of bytes dropped in total.
func (r *ring) lost() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.total
}

// drained waits until everything has been sent, but no longer than d.
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
