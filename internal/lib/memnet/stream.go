package memnet

import (
	"io"
	"sync"
	"time"
)

// signal wakes all goroutines that wait for a change. Its owner's mutex guards
// it; the wait itself is on a channel, without the mutex.
type signal struct{ ch chan struct{} }

// wait returns a channel that the next notify closes.
func (s *signal) wait() <-chan struct{} {
	if s.ch == nil {
		s.ch = make(chan struct{})
	}
	return s.ch
}

func (s *signal) notify() {
	if s.ch != nil {
		close(s.ch)
		s.ch = nil
	}
}

// chunk is the data of one Write in flight.
type chunk struct {
	data []byte
	at   time.Time // arrival time; zero means immediately
}

// stream is one direction of a connection.
type stream struct {
	mu      sync.Mutex
	chunks  []chunk
	size    int // bytes in chunks
	ended   bool
	endAt   time.Time // arrival of the end
	gone    bool      // the reader has closed
	err     error     // after a reset
	changed signal
}

// take moves arrived bytes to p. If there are none, it returns the end, the
// error, or what to wait for: a change, or the arrival of data in flight.
func (s *stream) take(p []byte, now time.Time) (n int, err error, wait <-chan struct{}, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n < len(p) && len(s.chunks) > 0 && !s.chunks[0].at.After(now) {
		c := &s.chunks[0]
		k := copy(p[n:], c.data)
		n += k
		c.data = c.data[k:]
		if len(c.data) == 0 {
			s.chunks = s.chunks[1:]
		}
	}
	if n > 0 {
		s.size -= n
		s.changed.notify()
		return n, nil, nil, time.Time{}
	}
	if len(s.chunks) > 0 {
		return 0, nil, s.changed.wait(), s.chunks[0].at
	}
	if s.err != nil {
		return 0, s.err, nil, time.Time{}
	}
	if s.ended && !s.endAt.After(now) {
		return 0, io.EOF, nil, time.Time{}
	}
	return 0, nil, s.changed.wait(), s.endAt
}

// put takes as much of p as fits. If nothing fits, it returns a channel to wait
// for.
func (s *stream) put(p []byte, at time.Time) (int, error, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != nil:
		return 0, s.err, nil
	case s.ended || s.gone:
		return 0, errPipe, nil
	}
	n := min(len(p), DefaultBuffer-s.size)
	if n == 0 {
		return 0, nil, s.changed.wait()
	}
	// Bytes never overtake those sent before, even when the latency shrinks.
	if last := len(s.chunks); last > 0 && s.chunks[last-1].at.After(at) {
		at = s.chunks[last-1].at
	}
	s.chunks = append(s.chunks, chunk{data: append([]byte(nil), p[:n]...), at: at})
	s.size += n
	s.changed.notify()
	return n, nil, nil
}

// finish ends the stream from the writer's side.
func (s *stream) finish(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended, s.endAt = true, at
		s.changed.notify()
	}
}

// abandon is the reader's Close: later data is not wanted.
func (s *stream) abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone, s.chunks, s.size = true, nil, 0
	s.changed.notify()
}

// reset discards data in flight and fails both sides.
func (s *stream) reset(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range s.chunks {
		if c.at.After(now) {
			s.chunks = s.chunks[:i]
			break
		}
	}
	s.size = s.arrived(now)
	if s.err == nil && !s.gone {
		s.err = errReset
	}
	s.changed.notify()
}

// arrived returns the number of bytes that a read would get. The caller holds
// s.mu.
func (s *stream) arrived(now time.Time) int {
	n := 0
	for _, c := range s.chunks {
		if c.at.After(now) {
			break
		}
		n += len(c.data)
	}
	return n
}

// deadline is a channel that closes at a time that can be changed.
type deadline struct {
	mu     sync.Mutex
	ch     chan struct{}
	closed bool
	timer  *time.Timer
	turn   uint64 // counts calls of set, so that an earlier timer does nothing
}

func (d *deadline) init() { d.ch = make(chan struct{}) }

func (d *deadline) passed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ch
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.turn++
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if d.closed {
		d.ch, d.closed = make(chan struct{}), false
	}
	if t.IsZero() {
		return
	}
	left := time.Until(t)
	if left <= 0 {
		close(d.ch)
		d.closed = true
		return
	}
	turn := d.turn
	d.timer = time.AfterFunc(left, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.turn == turn && !d.closed {
			close(d.ch)
			d.closed = true
		}
	})
}
