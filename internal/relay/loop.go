package relay

import (
	"container/heap"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// copyBuffer is the maximum size of one read, in bytes. A read that fills it
	// indicates a bulk transfer, for which splice is used from then on.
	copyBuffer = 64 << 10
	// turn is how many bytes one connection may transfer before the others are
	// served.
	turn = 1 << 20
	// yieldEvery is how long a loop that always has work may run before it lets the
	// daemon's other goroutines run.
	yieldEvery = 500 * time.Microsecond
	// edges are the events for which a connected socket is registered. Writability
	// is added only after a write did not fit into the socket's buffer.
	edges = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET&(1<<32-1)
)

// entry is the object that a descriptor of a loop refers to. By its generation the loop
// recognizes events that were meant for an earlier descriptor with the same number.
type entry struct {
	c    *conn
	l    *Listener
	gone *leaver
	gen  int32
}

// message is work that another goroutine passes to a loop.
type message struct {
	c   *conn
	err error
	fn  func()
}

// loop carries connections on one thread. Except post, listen and unlisten, its
// methods may be called only by the goroutine in run.
type loop struct {
	r      *Router
	ep, ev int
	now    int64 // time of the last return from the kernel, in unix nanoseconds
	buf    []byte
	again  []*conn // connections with more work than fits in one turn
	timers timers
	pipes  []*pipe
	done   bool

	leaving map[*leaver]struct{}

	tableMu sync.Mutex // needed to write, and by the loop also to read
	table   []entry
	gen     int32

	mu    sync.Mutex
	inbox []message
}

func newLoop(r *Router) (*loop, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	ev, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(ep)
		return nil, err
	}
	err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, ev, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(ev), Pad: -1})
	if err != nil {
		unix.Close(ep)
		unix.Close(ev)
		return nil, err
	}
	return &loop{r: r, ep: ep, ev: ev, buf: make([]byte, copyBuffer), leaving: map[*leaver]struct{}{}}, nil
}

func (lp *loop) free() {
	for _, p := range lp.pipes {
		p.close()
	}
	lp.pipes = nil
	for v := range lp.leaving {
		lp.gone(v)
	}
	unix.Close(lp.ep)
	unix.Close(lp.ev)
}

// set registers fd in the table and returns its generation.
func (lp *loop) set(fd int, e entry) int32 {
	lp.tableMu.Lock()
	defer lp.tableMu.Unlock()
	for fd >= len(lp.table) {
		lp.table = append(lp.table, make([]entry, max(64, len(lp.table)))...)
	}
	lp.gen = (lp.gen + 1) & (1<<30 - 1)
	e.gen = lp.gen
	lp.table[fd] = e
	return e.gen
}

func (lp *loop) get(fd int, gen int32) entry {
	lp.tableMu.Lock()
	defer lp.tableMu.Unlock()
	if fd >= len(lp.table) || lp.table[fd].gen != gen {
		return entry{}
	}
	return lp.table[fd]
}

func (lp *loop) clear(fd int) {
	lp.tableMu.Lock()
	defer lp.tableMu.Unlock()
	if fd < len(lp.table) {
		lp.table[fd] = entry{}
	}
}

// listen registers a listener. With EPOLLEXCLUSIVE the kernel wakes only one loop
// per arrival, and prefers the same one while it keeps up.
func (lp *loop) listen(l *Listener) error {
	gen := lp.set(l.fd, entry{l: l})
	return unix.EpollCtl(lp.ep, unix.EPOLL_CTL_ADD, l.fd,
		&unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLEXCLUSIVE, Fd: int32(l.fd), Pad: gen})
}

func (lp *loop) unlisten(fd int) {
	// fails with ENOENT if accepting was paused at this moment
	_ = unix.EpollCtl(lp.ep, unix.EPOLL_CTL_DEL, fd, nil)
	lp.clear(fd)
}

func (lp *loop) watch(fd int, c *conn, events uint32) error {
	return lp.register(fd, entry{c: c}, events)
}

func (lp *loop) register(fd int, e entry, events uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: int32(fd), Pad: lp.set(fd, e)}
	_, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(lp.ep), unix.EPOLL_CTL_ADD, uintptr(fd),
		uintptr(unsafe.Pointer(&ev)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// rewatch changes the events for which fd is registered. The kernel then reports
// again an edge that is already present.
func (lp *loop) rewatch(fd int, events uint32) {
	lp.tableMu.Lock()
	gen := lp.table[fd].gen
	lp.tableMu.Unlock()
	ev := unix.EpollEvent{Events: events, Fd: int32(fd), Pad: gen}
	if err := unix.EpollCtl(lp.ep, unix.EPOLL_CTL_MOD, fd, &ev); err != nil {
		lp.r.log.Error("cannot watch a connection", "err", err)
	}
}

// post passes work to the loop. The loop is woken once per batch.
func (lp *loop) post(m message) {
	lp.mu.Lock()
	lp.inbox = append(lp.inbox, m)
	first := len(lp.inbox) == 1
	lp.mu.Unlock()
	if first {
		one := [8]byte{1}
		_, _ = unix.Write(lp.ev, one[:])
	}
}

func (lp *loop) stop() { lp.post(message{fn: func() { lp.done = true }}) }

func (lp *loop) run() error {
	events := make([]unix.EpollEvent, 128)
	yielded := int64(0)
	for !lp.done {
		// Under load, events are already pending, and the Go scheduler need not be
		// told of a wait.
		n := sysPoll(lp.ep, events)
		if n == 0 {
			var err error
			if n, err = unix.EpollWait(lp.ep, events, lp.timeout()); err != nil && err != unix.EINTR {
				return fmt.Errorf("cannot wait for connections: %w", err)
			}
		}
		lp.now = time.Now().UnixNano()
		if lp.now-yielded > int64(yieldEvery) {
			yielded = lp.now
			runtime.Gosched()
		}
		for i := range max(n, 0) {
			lp.event(&events[i])
		}
		lp.takeInbox()
		again := lp.again
		lp.again = nil
		for _, c := range again {
			lp.guard(c, c.takeTurn)
		}
		for len(lp.timers) > 0 && lp.timers[0].at <= lp.now {
			t := heap.Pop(&lp.timers).(timer)
			lp.guard(nil, t.fn)
		}
	}
	return nil
}

func (lp *loop) event(ev *unix.EpollEvent) {
	if ev.Pad == -1 {
		var b [8]byte
		_, _ = unix.Read(lp.ev, b[:])
		return
	}
	e := lp.get(int(ev.Fd), ev.Pad)
	switch {
	case e.c != nil:
		lp.guardEvent(e.c, int(ev.Fd), ev.Events)
	case e.l != nil:
		lp.accept(e.l)
	case e.gone != nil:
		lp.drain(e.gone)
	}
}

func (lp *loop) takeInbox() {
	lp.mu.Lock()
	in := lp.inbox
	lp.inbox = nil
	lp.mu.Unlock()
	for _, m := range in {
		if m.c != nil {
			lp.guard(m.c, func() { m.c.resumed(m.err) })
		} else {
			lp.guard(nil, m.fn)
		}
	}
}

func (lp *loop) guardEvent(c *conn, fd int, events uint32) {
	defer lp.rescue(c)
	c.event(fd, events)
}

func (lp *loop) guard(c *conn, fn func()) {
	defer lp.rescue(c)
	fn()
}

// rescue closes the connection whose handling has panicked.
func (lp *loop) rescue(c *conn) {
	p := recover()
	if p == nil {
		return
	}
	lp.r.log.Error("connection panicked", "panic", p, "stack", string(debug.Stack()))
	if c != nil {
		c.in.stats.panics.Add(1)
		c.drop()
	}
}

// at makes the loop call fn at the time ns, in unix nanoseconds. Timers cannot be
// canceled, so fn must check whether it still applies.
func (lp *loop) at(ns int64, fn func()) { heap.Push(&lp.timers, timer{ns, fn}) }

func (lp *loop) timeout() int {
	if len(lp.again) > 0 {
		return 0
	}
	if len(lp.timers) == 0 {
		return -1
	}
	d := lp.timers[0].at - time.Now().UnixNano()
	return int(max(0, min((d+999_999)/1_000_000, 60_000)))
}

type timer struct {
	at int64
	fn func()
}

type timers []timer

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].at < t[j].at }
func (t timers) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *timers) Push(x any)        { *t = append(*t, x.(timer)) }
func (t *timers) Pop() any {
	old := *t
	last := old[len(old)-1]
	old[len(old)-1] = timer{}
	*t = old[:len(old)-1]
	return last
}
