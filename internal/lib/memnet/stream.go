package memnet

import (
	"io"
	"sync"
	"time"
)

// signal wakes all goroutines that wait for a change. The owner's mutex guards
// it, but is not held while waiting on the channel.
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
	endAt   time.Time // when the end of the stream arrives
	gone    bool      // the reader has closed
	err     error     // after a reset
	changed signal
}

// take moves bytes that have arrived to p. If there are none, it returns io.EOF,
// an error, or what to wait for: a channel for a change, and the arrival time of
// data in flight.
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

// put buffers as much of p as fits. If nothing fits, it returns a channel that is
// closed when that may have changed.
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
	// Bytes never overtake earlier ones, even if the latency decreases.
	if last := len(s.chunks); last > 0 && s.chunks[last-1].at.After(at) {
		at = s.chunks[last-1].at
	}
	s.chunks = append(s.chunks, chunk{data: append([]byte(nil), p[:n]...), at: at})
	s.size += n
	s.changed.notify()
	return n, nil, nil
}

// finish ends the stream from the writer's side. The end arrives at at.
func (s *stream) finish(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended, s.endAt = true, at
		s.changed.notify()
	}
}

// abandon ends the stream from the reader's side: buffered data is dropped and
// later writes fail.
func (s *stream) abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone, s.chunks, s.size = true, nil, 0
	s.changed.notify()
}

// reset drops data in flight and makes both sides fail.
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

// arrived returns the number of bytes that can be read at now. The caller holds
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

// deadline is a channel that is closed at a time that can be changed.
type deadline struct {
	mu     sync.Mutex
	ch     chan struct{}
	closed bool
	timer  *time.Timer
	turn   uint64 // number of calls of set; an outdated timer sees that it changed
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
