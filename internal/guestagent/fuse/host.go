package fuse

import (
	"cmp"
	"io"
	"maps"
	"slices"
	"sync"
	"syscall"
	"time"

	"lull/internal/protocol/guest/files"
)

// Limits of the connection to the host.
const (
	// waitLimit is how long a request waits for its answer, not counting time in
	// which the guest is paused. A host that restarts takes far less.
	waitLimit = 2 * time.Minute
	again     = 100 * time.Millisecond // delay between reads of a disconnected port
)

// Host is a client of the host's file server. It repeats unanswered requests on the
// next connection. Create it with NewHost.
type Host struct {
	port      io.ReadWriter
	waitLimit time.Duration

	mu    sync.Mutex
	key   files.Key
	state state
	in    files.Stream
	next  uint64
	calls map[uint64]*call // requests without an answer
	queue []*call          // requests not sent yet
	kick  chan struct{}
}

type state int

const (
	waiting state = iota // until the first connection
	open
	refused // the host has said that this guest has no workspace
)

type call struct {
	q    files.Request
	sent bool
	done chan files.Answer
}

// NewHost returns a client on port. Reads of port must return io.EOF while the host
// is disconnected. Run must be called to exchange messages.
func NewHost(port io.ReadWriter) *Host {
	return &Host{port: port, waitLimit: waitLimit, calls: map[uint64]*call{}, kick: make(chan struct{}, 1)}
}

// Connect starts a new connection. The messages of this connection carry key k.
func (h *Host) Connect(k files.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.key, h.state = k, open
	h.in.Reset(k)
	for _, c := range h.calls {
		c.q.Again = c.sent
	}
	hello := &call{q: files.Request{ID: files.HelloID, Op: files.Stat}} // sent to announce the guest; the answer is ignored
	h.queue = append(slices.SortedFunc(maps.Values(h.calls), func(a, b *call) int { return cmp.Compare(a.q.ID, b.q.ID) }), hello)
	h.wake()
}

// Refuse makes every request fail from now on.
func (h *Host) Refuse() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state, h.queue = refused, nil
	for id, c := range h.calls {
		delete(h.calls, id)
		c.done <- files.Answer{Errno: uint32(syscall.EIO)}
	}
}

func (h *Host) wake() {
	select {
	case h.kick <- struct{}{}:
	default:
	}
}

// ask sends a request and waits for the answer.
func (h *Host) ask(q files.Request) (files.Answer, syscall.Errno) {
	c := &call{q: q, done: make(chan files.Answer, 1)}
	h.mu.Lock()
	if h.state == refused {
		h.mu.Unlock()
		return files.Answer{}, syscall.EIO
	}
	h.next++
	c.q.ID = h.next
	h.calls[c.q.ID] = c
	h.queue = append(h.queue, c)
	h.wake()
	h.mu.Unlock()
	late := time.NewTimer(h.waitLimit)
	defer late.Stop()
	select {
	case a := <-c.done:
		return a, syscall.Errno(a.Errno)
	case <-late.C:
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.calls, c.q.ID)
	h.queue = slices.DeleteFunc(h.queue, func(o *call) bool { return o == c })
	return files.Answer{}, syscall.EIO
}

// Run exchanges messages with the host. It never returns.
func (h *Host) Run() {
	go h.send()
	buf := make([]byte, 64<<10)
	for {
		n, err := h.port.Read(buf)
		if n > 0 {
			h.take(buf[:n])
		}
		if n == 0 || err != nil {
			time.Sleep(again)
		}
	}
}

// take passes received answers to their callers.
func (h *Host) take(b []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state != open {
		return
	}
	h.in.Feed(b)
	for {
		body, err := h.in.Next()
		if err != nil {
			h.in.Reset(h.key)
			continue
		}
		if body == nil {
			return
		}
		a, err := files.ParseAnswer(body)
		if err != nil {
			continue
		}
		if c := h.calls[a.ID]; c != nil {
			delete(h.calls, a.ID)
			c.done <- a
		}
	}
}

// send writes requests in order. If a new connection interrupts a message, the
// whole message is sent again on the new connection.
func (h *Host) send() {
	var buf []byte
	for range h.kick {
		for {
			h.mu.Lock()
			if h.state != open || len(h.queue) == 0 {
				h.mu.Unlock()
				break
			}
			c := h.queue[0]
			h.queue = h.queue[1:]
			if c.q.ID != files.HelloID && h.calls[c.q.ID] != c { // already answered or abandoned
				h.mu.Unlock()
				continue
			}
			c.sent = true
			buf = files.AppendRequest(buf[:0], h.key, &c.q)
			h.mu.Unlock()
			for len(buf) > 0 {
				n, err := h.port.Write(buf)
				buf = buf[n:]
				if err != nil {
					time.Sleep(again)
				}
			}
		}
	}
}
