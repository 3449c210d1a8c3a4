package sockets

import (
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Kind is the kind of a guarded socket, which determines the events that
// matter.
type Kind uint8

// The kinds of a guarded socket.
const (
	Listener   Kind = iota + 1 // a stream listener: fires on a connection in the backlog
	Stream                     // an established connection: fires on data, on a close by the peer and on an error
	HalfClosed                 // a connection whose peer was already seen to have closed: fires on a reset or an error only
	Datagram                   // a UDP socket: fires on a datagram and on an error
)

// Dup is one duplicate to be guarded.
type Dup struct {
	FD   int
	Kind Kind
	Name string // names the socket in reasons, such as "tcp 127.0.0.1:80"; used as long as the guard exists
}

// events returns the epoll bits of a kind; they are the same in poll(2).
// EPOLLERR and EPOLLHUP are always reported.
func (k Kind) events() (uint32, bool) {
	switch k {
	case Listener, Datagram:
		return unix.EPOLLIN, true
	case Stream:
		return unix.EPOLLIN | unix.EPOLLRDHUP, true
	case HalfClosed:
		return 0, true
	}
	return 0, false
}

// Prefixes of the reasons for a wake.
const (
	connectionWaiting = "connection waiting on " // of a listener
	dataWaiting       = "data on "
	closed            = "closed by the client: "
	broken            = "error on "
)

// Ended reports whether the reason of a wake is that a connection was closed or
// broke, so that no client is waiting for an answer.
func Ended(reason string) bool {
	return strings.HasPrefix(reason, closed) || strings.HasPrefix(reason, broken)
}

// reason describes events; "" for none.
func (k Kind) reason(events uint32) string {
	switch {
	case k == Listener:
		if events&unix.EPOLLIN != 0 {
			return connectionWaiting
		}
	case events&unix.EPOLLERR != 0:
		return broken
	case events&(unix.EPOLLRDHUP|unix.EPOLLHUP) != 0:
		return closed
	case k == Datagram && events&unix.EPOLLIN != 0:
		return "datagram on "
	case events&unix.EPOLLIN != 0:
		return dataWaiting
	}
	return ""
}

// Guard watches the sockets of one frozen program. It owns the duplicates until
// Close. Its methods may be called from any goroutine, even from within wake.
type Guard struct {
	poller *Poller
	id     uint64
	wake   func(reason string)

	mu     sync.Mutex
	socks  []watched // nil once closed
	closed bool
	waking bool      // wake is being called
	later  []watched // sockets of a guard that was closed during a call of wake; woken closes the listeners among them
}

type watched struct {
	name  string // for a listener: the end of text
	text  string // for a listener: the reason, built before it is needed
	fd    int32
	kind  Kind
	fired bool
}

// because returns the reason for a wake by events on the socket.
func (s *watched) because(events uint32) string {
	switch reason := s.kind.reason(events); reason {
	case "":
		return "event on " + s.name // a needless wake is harmless, a missed one is not
	case connectionWaiting:
		return s.text
	case closed: // unless unread data, perhaps a request, came before the close
		if n, err := unix.IoctlGetInt(int(s.fd), unix.TIOCINQ); err == nil && n > 0 {
			reason = dataWaiting
		}
		return reason + s.name
	default:
		return reason + s.name
	}
}

// Guard registers dups. Run's goroutine calls wake with a reason when something
// happens on one of them, or at once if it already had. Each socket fires at most
// once until Rearm, so a busy one costs nothing more, but a guard of several
// sockets may wake several times. wake must not block. It may be called before
// Guard has returned.
//
// The guard takes ownership of the duplicates. If Guard returns an error, they
// are all closed.
func (p *Poller) Guard(dups []Dup, wake func(reason string)) (*Guard, error) {
	g := &Guard{poller: p, wake: wake, socks: make([]watched, len(dups))}
	for i, d := range dups {
		if _, ok := d.Kind.events(); !ok || d.FD < 0 || len(dups) > maxPlaces {
			closeAll(dups)
			return nil, fmt.Errorf("cannot guard socket %s (descriptor %d): not a kind of socket that can be watched", d.Name, d.FD)
		}
		g.socks[i] = watched{name: d.Name, fd: int32(d.FD), kind: d.Kind}
		if d.Kind == Listener {
			text := connectionWaiting + d.Name
			g.socks[i].text, g.socks[i].name = text, text[len(connectionWaiting):]
		}
	}
	// Held until everything is registered; fire waits for it.
	g.mu.Lock()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		g.mu.Unlock()
		closeAll(dups)
		return nil, fmt.Errorf("cannot guard %d sockets: %w", len(dups), ErrClosed)
	}
	p.last++
	g.id = p.last
	p.guards[g.id] = g
	p.mu.Unlock()
	for i, s := range g.socks {
		if err := g.control(unix.EPOLL_CTL_ADD, i); err != nil {
			g.remove(i)
			closeAll(dups)
			g.socks, g.closed = nil, true
			g.mu.Unlock()
			p.forget(g.id)
			return nil, fmt.Errorf("cannot guard socket %s (descriptor %d): %w", s.name, s.fd, failure("epoll_ctl", err))
		}
	}
	g.mu.Unlock()
	return g, nil
}

func (p *Poller) forget(id uint64) {
	p.mu.Lock()
	delete(p.guards, id)
	p.mu.Unlock()
}

// control registers the socket at index i with epoll. The caller holds mu.
func (g *Guard) control(op, i int) error {
	s := &g.socks[i]
	if op == unix.EPOLL_CTL_DEL {
		return rawEpollDelete(g.poller.epfd, int(s.fd))
	}
	events, _ := s.kind.events()
	return unix.EpollCtl(g.poller.epfd, op, int(s.fd), event(events|unix.EPOLLONESHOT, g.id<<placeBits|uint64(i)))
}

// fire records an event on socket i and returns the reason to pass to wake, or ""
// if the guard is closed or the socket has already fired.
func (g *Guard) fire(i int, events uint32) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || i >= len(g.socks) || g.socks[i].fired {
		return ""
	}
	s := &g.socks[i]
	s.fired, g.waking = true, true
	return s.because(events)
}

// woken ends a call of wake. If the guard was closed during the call, it closes the
// listeners that Close has kept open.
func (g *Guard) woken() {
	g.mu.Lock()
	g.waking = false
	left := g.later
	g.later = nil
	for n := range left {
		if s := &left[n]; s.kind == Listener {
			_ = rawEpollDelete(g.poller.epfd, int(s.fd))
			rawClose(int(s.fd))
		}
	}
	g.mu.Unlock()
	if left != nil {
		g.poller.forget(g.id)
	}
}

// Rearm lets the sockets that have fired fire again. A socket on which something
// is still pending fires at once. It is for a caller that did not act on a wake.
func (g *Guard) Rearm() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range g.socks {
		s := &g.socks[i]
		if !s.fired {
			continue
		}
		s.fired = false
		if err := g.control(unix.EPOLL_CTL_MOD, i); err != nil {
			s.fired = true
			return fmt.Errorf("cannot watch socket %s again: %w", s.name, failure("epoll_ctl", err))
		}
	}
	return nil
}

// Pending checks every socket now, without blocking, and returns what is waiting;
// "" for nothing. It does not depend on which sockets have fired. If a check
// fails, Pending returns the failure as its reason, so that it is not mistaken
// for nothing. A closed guard returns "".
func (g *Guard) Pending() string {
	var few [16]unix.PollFd
	g.mu.Lock()
	defer g.mu.Unlock()
	fds := few[:0]
	for i := range g.socks {
		s := &g.socks[i]
		events, _ := s.kind.events()
		fds = append(fds, unix.PollFd{Fd: s.fd, Events: int16(events)})
	}
	if len(fds) == 0 {
		return ""
	}
	n, err := unix.Poll(fds, 0)
	for err == unix.EINTR {
		n, err = unix.Poll(fds, 0)
	}
	if err != nil {
		return fmt.Sprintf("cannot poll %d sockets: %v", len(fds), err)
	}
	if n == 0 {
		return ""
	}
	for i, fd := range fds {
		if fd.Revents == 0 {
			continue
		}
		return g.socks[i].because(uint32(fd.Revents))
	}
	return ""
}

// Close removes every socket from the poll set and closes it. When Close returns,
// all duplicates are closed. The exception is a Close during a call of wake:
// listeners then stay open until wake returns. The program can be thawed
// meanwhile, because a duplicate of a listener delays nothing, and a client waits
// for the thaw. A call of wake that Run has already begun may still run; no later
// one does. Close may be called twice, and from within wake.
//
// Sockets are removed from the poll set before they are closed: while the program
// has the same socket open, closing the duplicate alone would leave it
// registered.
func (g *Guard) Close() {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return
	}
	for i := range g.socks {
		if s := &g.socks[i]; s.kind == Listener && g.waking {
			continue
		}
		_ = g.control(unix.EPOLL_CTL_DEL, i) // fails only if it is not registered
		rawClose(int(g.socks[i].fd))
	}
	later := g.waking
	if later {
		g.later = g.socks
	}
	g.socks, g.closed = nil, true
	g.mu.Unlock()
	if !later {
		g.poller.forget(g.id)
	}
}

// remove removes the first n sockets from the poll set. The caller holds mu.
func (g *Guard) remove(n int) {
	for i := range n {
		_ = g.control(unix.EPOLL_CTL_DEL, i) // fails only if it is not registered
	}
}

// closeAll closes the duplicates of a guard that could not be created. A
// descriptor that occurs twice is closed once.
func closeAll(dups []Dup) {
	seen := map[int]bool{}
	for _, d := range dups {
		if d.FD >= 0 && !seen[d.FD] {
			seen[d.FD] = true
			_ = unix.Close(d.FD)
		}
	}
}
