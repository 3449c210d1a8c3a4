package shimctl

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"sync"
)

// Request is one request of the daemon.
type Request struct {
	Verb string
	FDs  []int // closed when the handler returns; the handler sets those that it keeps to -1
	body json.RawMessage
}

// Into decodes the body of the request into v.
func (r *Request) Into(v any) error {
	if err := json.Unmarshal(r.body, v); err != nil {
		return Errorf(CodeInvalid, "cannot read the request %s: %v", r.Verb, err)
	}
	return nil
}

// Answer is a result with descriptors. The handler still owns the descriptors
// unless Close is set.
type Answer struct {
	Body  any
	FDs   []int
	Close bool // close the descriptors once they are sent
}

// Server accepts connections of the daemon. Handle is called concurrently for
// each request after hello.
type Server struct {
	Handle  func(ctx context.Context, r *Request) (Answer, error)
	Welcome func() (Welcome, error) // returns the answer to hello; an error refuses the daemon
	Joined  func()                  // called when a daemon is connected and events may be sent
	Left    func()                  // called when the last daemon has disconnected
	Log     *slog.Logger

	mu     sync.Mutex
	now    *session
	begun  uint64 // number of connections that have sent hello
	newest uint64 // number of the latest one that became the daemon
}

type session struct {
	number  uint64 // in the order in which they sent hello
	w       *wire
	hello   bool
	greeted bool // Welcome was called for this connection
	tasks   chan struct{}
}

// parallel limits the number of concurrent requests.
const parallel = 16

// Run serves l until ctx ends, then closes l and all connections.
func (s *Server) Run(ctx context.Context, l *net.UnixListener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := context.AfterFunc(ctx, func() {
		l.Close()
		s.mu.Lock()
		if s.now != nil {
			s.now.w.c.Close()
		}
		s.mu.Unlock()
	})
	defer stop()
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return nil
		}
		if err != nil {
			l.Close()
			return fmt.Errorf("cannot accept a daemon: %w", err)
		}
		if err := trusted(c); err != nil {
			s.Log.Warn("refused a connection", "err", err)
			c.Close()
			continue
		}
		wg.Go(func() { s.serve(ctx, c) })
	}
}

func (s *Server) serve(ctx context.Context, c *net.UnixConn) {
	n := &session{w: newWire(c), tasks: make(chan struct{}, parallel)}
	var wg sync.WaitGroup
	for {
		e, fds, err := n.w.read()
		if err != nil {
			if ctx.Err() == nil && n.hello {
				s.Log.Info("the daemon has disconnected", "err", err)
			}
			break
		}
		if !n.hello {
			CloseAll(fds)
			if !s.greet(n, e) {
				break
			}
			continue
		}
		n.tasks <- struct{}{}
		wg.Go(func() {
			defer func() { <-n.tasks }()
			s.answer(ctx, n, e, fds)
		})
	}
	n.w.close()
	wg.Wait()
	s.mu.Lock()
	last := s.now == n || s.now == nil && n.greeted
	if s.now == n {
		s.now = nil
	}
	s.mu.Unlock()
	if last && s.Left != nil {
		s.Left()
	}
}

// greet answers hello and makes n the daemon, disconnecting the previous one. The
// latest hello wins, in whatever order the answers are sent. A daemon may
// therefore already have been replaced when it gets its answer.
func (s *Server) greet(n *session, e envelope) bool {
	var h Hello
	if e.Verb != VerbHello || json.Unmarshal(e.Body, &h) != nil {
		_ = n.w.write(envelope{ID: e.ID, Error: Errorf(CodeInvalid, "cannot begin with %q: want hello", e.Verb)}, nil)
		return false
	}
	n.greeted = true
	s.mu.Lock()
	s.begun++
	n.number = s.begun
	s.mu.Unlock()
	welcome, err := s.Welcome()
	if err != nil {
		_ = n.w.write(envelope{ID: e.ID, Error: asError(err)}, nil)
		return false
	}
	b, err := json.Marshal(welcome)
	if err == nil {
		err = n.w.write(envelope{ID: e.ID, Body: b}, nil)
	}
	if err != nil {
		return false
	}
	n.hello = true
	s.mu.Lock()
	if n.number < s.newest {
		s.mu.Unlock()
		return false
	}
	old := s.now
	s.now, s.newest = n, n.number
	s.mu.Unlock()
	if old != nil {
		old.w.c.Close()
	}
	if s.Joined != nil {
		s.Joined()
	}
	return true
}

func (s *Server) answer(ctx context.Context, n *session, e envelope, fds []int) {
	r := &Request{Verb: e.Verb, body: e.Body, FDs: fds}
	a, err := s.Handle(ctx, r)
	for _, fd := range r.FDs {
		if fd >= 0 {
			CloseAll([]int{fd})
		}
	}
	out := envelope{ID: e.ID}
	if err != nil {
		out.Error = asError(err)
	} else if a.Body != nil {
		if out.Body, err = json.Marshal(a.Body); err != nil {
			out.Error = asError(err)
		}
	}
	if err := n.w.write(out, a.FDs); err != nil {
		s.Log.Warn("cannot answer the daemon", "verb", e.Verb, "err", err)
		n.w.c.Close()
	}
	if a.Close {
		CloseAll(a.FDs)
	}
}

// Send sends an event to the daemon. If none is connected or the connection
// fails, the event is lost. Events that must arrive are sent again from Joined.
func (s *Server) Send(verb string, body any) {
	s.mu.Lock()
	n := s.now
	s.mu.Unlock()
	if n == nil {
		return
	}
	b, err := json.Marshal(body)
	if err == nil {
		err = n.w.write(envelope{Verb: verb, Body: b}, nil)
	}
	if err != nil {
		s.Log.Warn("cannot send an event", "event", verb, "err", err)
	}
}
