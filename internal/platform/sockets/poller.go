package sockets

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrClosed is returned by methods of a closed Poller.
var ErrClosed = errors.New("the poller is closed")

// Poller waits on the sockets of all guards of a host with one epoll instance
// and one goroutine (Run). Create it with NewPoller.
type Poller struct {
	epfd int
	file *os.File // owns epfd
	bell int      // eventfd that ends Run

	mu      sync.Mutex
	guards  map[uint64]*Guard
	last    uint64 // newest guard id; ids are never reused
	closed  bool
	running bool
	done    chan struct{} // closed when Run returns
}

// The 64 bits of an epoll event contain a guard's id and the index of the socket
// in it. Ids are never reused, so an event that was fetched before its guard was
// closed matches no guard, even if the descriptor's number is in use again.
const (
	placeBits = 20
	maxPlaces = 1 << placeBits
	bellKey   = 0 // the id 0 belongs to no guard
)

// NewPoller opens the epoll instance. The caller runs Run and finally calls
// Close.
func NewPoller() (*Poller, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err == nil {
		err = unix.SetNonblock(epfd, true) // otherwise Go's poller would not wait for it
	}
	if err != nil {
		return nil, fmt.Errorf("cannot open the poller: %w", failure("epoll_create1", err))
	}
	file := os.NewFile(uintptr(epfd), "epoll")
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		err = unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, bell, event(unix.EPOLLIN, bellKey))
	}
	if err != nil {
		_ = file.Close()
		if bell >= 0 {
			_ = unix.Close(bell)
		}
		return nil, fmt.Errorf("cannot open the poller: %w", failure("eventfd", err))
	}
	return &Poller{epfd: epfd, file: file, bell: bell, guards: map[uint64]*Guard{}, done: make(chan struct{})}, nil
}

func event(events uint32, key uint64) *unix.EpollEvent {
	return &unix.EpollEvent{Events: events, Fd: int32(uint32(key)), Pad: int32(uint32(key >> 32))}
}

func keyOf(ev *unix.EpollEvent) uint64 {
	return uint64(uint32(ev.Pad))<<32 | uint64(uint32(ev.Fd))
}

// Run waits for events and calls the guards' wake functions, one at a time, until
// ctx ends or Close is called; then it returns nil. It must be called only once.
// On a sleeping host it uses no CPU and no thread of its own.
//
// To react quickly, Run waits in Go's own poller, and makes the system calls up
// to a wake without the runtime. A thread that returns from a long wait in
// epoll_wait, and the first ordinary system call of a process that has been
// silent, first wake the runtime's monitor, which then competes with the program
// for the CPU.
func (p *Poller) Run(ctx context.Context) error {
	p.mu.Lock()
	if p.closed || p.running {
		p.mu.Unlock()
		return fmt.Errorf("cannot run the poller: %w", ErrClosed)
	}
	p.running = true
	p.mu.Unlock()
	defer close(p.done)
	stop := context.AfterFunc(ctx, p.ring)
	defer stop()
	conn, err := p.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("cannot wait for sockets: %w", err)
	}
	events := make([]unix.EpollEvent, 256)
	for {
		var n int
		var werr error
		err := conn.Read(func(uintptr) bool {
			n, werr = rawEpollWait(p.epfd, events)
			return n > 0 || werr != nil
		})
		if err = errors.Join(err, werr); err != nil {
			return fmt.Errorf("cannot wait for sockets: %w", failure("epoll_wait", err))
		}
		for i := range events[:n] {
			key := keyOf(&events[i])
			if key == bellKey {
				return nil
			}
			p.deliver(key, events[i].Events)
		}
	}
}

// ring makes Run return. The eventfd stays readable, so that a Run that starts
// later returns too.
func (p *Poller) ring() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bell < 0 {
		return
	}
	_, _ = unix.Write(p.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // fails only if it was already rung
}

func (p *Poller) deliver(key uint64, events uint32) {
	p.mu.Lock()
	g := p.guards[key>>placeBits]
	p.mu.Unlock()
	if g == nil {
		return
	}
	if reason := g.fire(int(key%maxPlaces), events); reason != "" {
		g.wake(reason)
		g.woken()
	}
}

// Len returns the number of open guards.
func (p *Poller) Len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.guards)
}

// Close closes every guard, ends Run, waits for it, and frees the epoll instance.
// It must not be called from a wake function. A second call does nothing.
func (p *Poller) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	open := make([]*Guard, 0, len(p.guards))
	for _, g := range p.guards {
		open = append(open, g)
	}
	running := p.running
	p.mu.Unlock()
	for _, g := range open {
		g.Close()
	}
	p.ring()
	if running {
		<-p.done
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	err := errors.Join(p.file.Close(), unix.Close(p.bell))
	p.epfd, p.bell = -1, -1
	return err
}
