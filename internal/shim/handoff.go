package shim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lull/internal/link/shimctl"
)

// Bind handoff: the shim holds a listening socket at an exposed address whether
// or not the program runs, and puts it in the place of the program's own socket
// when the program binds that address. Connections that came before wait in the
// backlog, and the program accepts them itself.
//
// The program runs under a seccomp filter that reports bind(2) to a descriptor.
// The shim answers the reports; the daemon holds a duplicate of the descriptor,
// because a bind fails with ENOSYS once no holder is left. One goroutine serves
// the descriptors of all programs.

// filter is the descriptor that reports the binds of one run.
type filter struct {
	key
	fd     int
	handed map[uint64]bool // inodes of sockets that this run was given
}

// seccompNotif is struct seccomp_notif of the kernel.
type seccompNotif struct {
	id    uint64
	pid   uint32 // of the thread; 0 when it is not in our pid namespace
	flags uint32
	nr    int32
	arch  uint32
	ip    uint64
	args  [6]uint64
}

// seccompResponse is struct seccomp_notif_resp.
type seccompResponse struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

// seccompAddFD is struct seccomp_notif_addfd.
type seccompAddFD struct {
	id         uint64
	flags      uint32
	srcfd      uint32
	newfd      uint32
	newfdFlags uint32
}

// Requests on a reporting descriptor that package unix does not have.
const (
	notifIDValid = 0x40082102
	notifAddFD   = 0x40182103
)

// slot is the report that is being answered, in memory that is shared with a
// file: the kernel writes the report there, so that a shim that is killed before
// it has answered leaves it to the next one. The kernel gives a report to one
// reader only.
type slot struct {
	notif seccompNotif // id 0: none
	run   uint64
	idLen uint32
	id    [128]byte
}

func (s *slot) owner() key { return key{string(s.id[:min(int(s.idLen), len(s.id))]), s.run} }

// notifier reads reports.
type notifier struct {
	epfd int
	stop [2]int // a pipe; a byte in it ends the reader
	slot *slot
	left slot       // what a shim before this one had read and not answered
	mu   sync.Mutex // held while a report is answered
}

func newNotifier(path string) (*notifier, error) {
	n := &notifier{}
	var err error
	if n.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, err
	}
	if err := unix.Pipe2(n.stop[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	if err := n.watch(n.stop[0]); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := os.Getpagesize()
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("cannot map %s: %w", path, err)
	}
	n.slot = (*slot)(unsafe.Pointer(&b[0]))
	n.left = *n.slot
	return n, nil
}

func (n *notifier) watch(fd int) error {
	return unix.EpollCtl(n.epfd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

// addFilter takes fd, which reports the binds of a run.
func (s *Shim) addFilter(k key, fd int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.filterOf(k) != nil {
		unix.Close(fd)
		return nil
	}
	f := &filter{key: k, fd: fd, handed: map[uint64]bool{}}
	s.filters[fd] = f
	if err := s.notes.watch(fd); err != nil {
		delete(s.filters, fd)
		unix.Close(fd)
		return fmt.Errorf("cannot watch the binds of %s: %w", k.id, err)
	}
	return nil
}

// filterOf finds the filter of a run; the caller holds mu.
func (s *Shim) filterOf(k key) *filter {
	for _, f := range s.filters {
		if f.key == k {
			return f
		}
	}
	return nil
}

// dropFilter closes a descriptor that reports nothing any more.
func (s *Shim) dropFilter(fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.filters[fd] == nil {
		return
	}
	delete(s.filters, fd)
	// The daemon may have a duplicate, with which epoll would keep reporting the
	// end under a number that is another filter's by then.
	if err := unix.EpollCtl(s.notes.epfd, unix.EPOLL_CTL_DEL, fd, nil); err != nil {
		s.log.Error("cannot stop watching binds", "error", err)
	}
	unix.Close(fd)
}

// readBinds answers reports until ctx ends.
func (s *Shim) readBinds(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _, _ = unix.Write(s.notes.stop[1], []byte{0}) })
	defer stop()
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(s.notes.epfd, events, -1)
		if ctx.Err() != nil {
			return nil
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("cannot wait for binds: %w", err)
		}
		for _, e := range events[:n] {
			fd := int(e.Fd)
			switch {
			case fd == s.notes.stop[0]:
			case e.Events&unix.EPOLLIN != 0:
				s.readBind(fd)
			default: // every process under the filter has ended
				s.dropFilter(fd)
			}
		}
	}
}

func (s *Shim) readBind(fd int) {
	s.mu.Lock()
	f := s.filters[fd]
	s.mu.Unlock()
	if f == nil {
		return
	}
	s.notes.mu.Lock()
	defer s.notes.mu.Unlock()
	slot := s.notes.slot
	slot.notif = seccompNotif{}
	slot.run, slot.idLen = f.run, uint32(copy(slot.id[:], f.id))
	err := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&slot.notif))
	if err == nil {
		s.answerBind(f, slot.notif)
	} else if err != unix.ENOENT && err != unix.EINTR { // the thread was interrupted, and calls again
		s.log.Error("cannot read a bind", "instance", f.id, "error", err)
	}
	slot.notif.id = 0
}

// resumeBind answers what an earlier shim had read and not answered.
func (s *Shim) resumeBind(f *filter) {
	s.notes.mu.Lock()
	defer s.notes.mu.Unlock()
	n := s.notes.left.notif
	if n.id == 0 || s.notes.left.owner() != f.key {
		return
	}
	s.notes.left.notif.id = 0
	if valid(f.fd, n.id) {
		s.log.Warn("answering a bind that the shim before this one had read", "instance", f.id)
		s.answerBind(f, n)
	}
}

func valid(fd int, id uint64) bool { return ioctl(fd, notifIDValid, unsafe.Pointer(&id)) == nil }

func ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	for {
		_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		switch e {
		case 0:
			return nil
		case unix.EINTR:
			continue
		}
		return e
	}
}

// answerBind hands the held socket over, or lets the call continue.
func (s *Shim) answerBind(f *filter, n seccompNotif) {
	handed, err := s.handOver(f, &n)
	if err != nil {
		s.log.Warn("a socket was not handed over", "instance", f.id, "error", err)
	}
	r := seccompResponse{id: n.id}
	if !handed {
		r.flags = unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
	}
	if err := ioctl(f.fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r)); err != nil && err != unix.ENOENT {
		s.log.Error("cannot answer a bind", "instance", f.id, "error", err)
	}
}

// bindCall is a bind as the program asked for it.
type bindCall struct {
	pid  int // of the process; its threads share their descriptors
	fd   int
	addr netip.AddrPort
}

// handOver puts the held socket in the place of the one that n binds, if it is
// one that is held, and reports whether the bind is done with that.
func (s *Shim) handOver(f *filter, n *seccompNotif) (bool, error) {
	if !s.holds(f.id) {
		return false, nil
	}
	c, ok, err := readCall(n)
	if err != nil || !ok {
		return false, err
	}
	h, ok := s.heldFor(f.id, c.addr)
	if !ok {
		return false, nil
	}
	own, err := socketOf(c.pid, c.fd)
	if err != nil {
		return false, err
	}
	defer unix.Close(own)
	// What was read is the caller's only if the call still stands. Nothing here
	// guards anything: the program could have bound the socket itself.
	if !valid(f.fd, n.id) {
		return false, nil
	}
	inode := inodeOf(h.fd)
	if inode != 0 && inodeOf(own) == inode { // handed over before the answer was lost
		return true, nil
	}
	if !replaceable(own, h.fd) {
		return false, nil
	}
	if on, _ := unix.GetsockoptInt(own, unix.SOL_SOCKET, unix.SO_REUSEPORT); on == 0 && f.handed[inode] && s.inUse(f, inode) {
		return false, nil // address in use, as without a handoff
	}
	want := form{ip: c.addr.Addr(), port: c.addr.Port()}
	if want.ip.Is6() && want.ip.IsUnspecified() {
		only, err := unix.GetsockoptInt(own, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		want.dual = err == nil && only == 0
	}
	if want != h.as {
		if h, err = s.reform(f, h, want, own); err != nil {
			return false, err
		}
		inode = inodeOf(h.fd)
	}
	carryOptions(own, h.fd)
	add := seccompAddFD{id: n.id, flags: unix.SECCOMP_ADDFD_FLAG_SETFD, srcfd: uint32(h.fd), newfd: uint32(c.fd)}
	if closesOnExec(c.pid, c.fd) {
		add.newfdFlags = unix.O_CLOEXEC
	}
	if err := ioctl(f.fd, notifAddFD, unsafe.Pointer(&add)); err != nil {
		return false, fmt.Errorf("cannot put the socket of %s into process %d: %w", h.as, c.pid, err)
	}
	f.handed[inode] = true
	return true, nil
}

func (s *Shim) holds(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held[id]) > 0
}

// heldFor finds the held socket for which a bind of addr is meant: the exposed
// address itself, or every address with its port.
func (s *Shim) heldFor(id string, addr netip.AddrPort) (held, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.held[id] {
		f, err := parseForm(h.addr)
		if err == nil && f.port == addr.Port() && meant(h.addr, f, addr.Addr()) {
			return h, true
		}
	}
	return held{}, false
}

func meant(text string, exposed form, bound netip.Addr) bool {
	switch {
	case bound.IsUnspecified():
		return bound.Is6() || exposed.ip.Unmap().Is4() || exposed.dual
	case exposed.ip.IsUnspecified():
		return false
	case strings.HasPrefix(text, "localhost:"):
		return bound.Unmap().IsLoopback()
	}
	return bound.Unmap() == exposed.ip.Unmap()
}

// readCall reads what a thread binds. It reports false for what is not TCP over
// IP, or cannot be such.
func readCall(n *seccompNotif) (bindCall, bool, error) {
	c := bindCall{}
	if n.pid == 0 {
		return c, false, nil
	}
	fd, at, size := n.args[0], n.args[1], n.args[2]
	if n.arch == archI386 && n.nr == socketcall {
		var b [12]byte
		if err := readMemory(int(n.pid), n.args[1], b[:]); err != nil {
			return c, false, err
		}
		word := func(i int) uint64 { return uint64(binary.NativeEndian.Uint32(b[4*i:])) }
		fd, at, size = word(0), word(1), word(2)
	}
	if size < unix.SizeofSockaddrInet4 {
		return c, false, nil
	}
	b := make([]byte, min(int(min(size, 128)), unix.SizeofSockaddrInet6))
	if err := readMemory(int(n.pid), at, b); err != nil {
		return c, false, err
	}
	port := binary.BigEndian.Uint16(b[2:])
	switch family := binary.NativeEndian.Uint16(b); {
	case family == unix.AF_INET:
		c.addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
	case family == unix.AF_INET6 && len(b) >= 24:
		c.addr = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])), port)
	default:
		return c, false, nil
	}
	if port == 0 {
		return c, false, nil
	}
	var err error
	c.fd = int(int32(uint32(fd)))
	c.pid, err = processOf(int(n.pid))
	return c, err == nil, err
}

func readMemory(tid int, at uint64, b []byte) error {
	local := []unix.Iovec{{Base: &b[0]}}
	local[0].SetLen(len(b))
	n, err := unix.ProcessVMReadv(tid, local, []unix.RemoteIovec{{Base: uintptr(at), Len: len(b)}}, 0)
	if err == nil && n < len(b) {
		err = unix.EFAULT
	}
	if err != nil {
		return fmt.Errorf("cannot read the address that thread %d binds: %w", tid, err)
	}
	return nil
}

// processOf is the process of a thread.
func processOf(tid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Tgid:"); ok {
			var pid int
			_, err := fmt.Sscan(v, &pid)
			return pid, err
		}
	}
	return 0, fmt.Errorf("cannot find the process of thread %d", tid)
}

// socketOf returns a duplicate of a process's descriptor.
func socketOf(pid, fd int) (int, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, fmt.Errorf("cannot open process %d: %w", pid, err)
	}
	defer unix.Close(pidfd)
	own, err := unix.PidfdGetfd(pidfd, fd, 0)
	if err != nil {
		return -1, fmt.Errorf("cannot duplicate descriptor %d of process %d: %w", fd, pid, err)
	}
	return own, nil
}

// inodeOf identifies a socket; 0 when it cannot be told.
func inodeOf(fd int) uint64 {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return 0
	}
	return st.Ino
}

// replaceable reports whether own is a fresh TCP socket of our own network
// namespace, which kept can stand in for.
func replaceable(own, kept int) bool {
	opt := func(fd, name int) int { v, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, name); return v }
	if opt(own, unix.SO_TYPE) != unix.SOCK_STREAM || opt(own, unix.SO_ACCEPTCONN) != 0 {
		return false
	}
	// A multipath socket is given a plain one, which it falls back to anyway.
	if p := opt(own, unix.SO_PROTOCOL); p != unix.IPPROTO_TCP && p != unix.IPPROTO_MPTCP {
		return false
	}
	if device, err := unix.GetsockoptString(own, unix.SOL_SOCKET, unix.SO_BINDTODEVICE); err == nil && device != "" {
		return false
	}
	cookie := func(fd int) uint64 {
		v, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		if err != nil {
			return 0 // before Linux 5.14
		}
		return v
	}
	return cookie(own) == cookie(kept)
}

// inUse reports whether a process of the run still has the socket open. Not
// knowing is no.
func (s *Shim) inUse(f *filter, inode uint64) bool {
	s.mu.Lock()
	r := s.runs[f.id]
	s.mu.Unlock()
	if r == nil || r.Run.Run != f.run {
		return false
	}
	pids, err := s.proc.Tree(r.PID, Mark(r.ID), []int{os.Getpid(), 1})
	if err != nil {
		s.log.Warn("not all of an instance was searched for its socket", "instance", f.id, "error", err)
	}
	for _, pid := range pids {
		fds, err := s.proc.Sockets(pid)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if fd.Inode == inode {
				return true
			}
		}
	}
	return false
}

// closesOnExec reports whether a process's descriptor is closed by exec. A
// program that replaces itself relies on its own choice.
func closesOnExec(pid, fd int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "flags:"); ok {
			var flags int
			if _, err := fmt.Sscanf(strings.TrimSpace(v), "%o", &flags); err == nil {
				return flags&unix.O_CLOEXEC != 0
			}
		}
	}
	return true
}

// carried are options that a program sets before it binds.
var carried = []struct{ level, name int }{
	{unix.SOL_SOCKET, unix.SO_REUSEADDR}, {unix.SOL_SOCKET, unix.SO_REUSEPORT}, {unix.SOL_SOCKET, unix.SO_KEEPALIVE},
	{unix.SOL_SOCKET, unix.SO_OOBINLINE}, {unix.SOL_SOCKET, unix.SO_MARK}, {unix.SOL_SOCKET, unix.SO_PRIORITY},
	{unix.IPPROTO_TCP, unix.TCP_NODELAY}, {unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE},
	{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL}, {unix.IPPROTO_TCP, unix.TCP_KEEPCNT}, {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT},
	{unix.IPPROTO_TCP, unix.TCP_SYNCNT}, {unix.IPPROTO_TCP, unix.TCP_FASTOPEN},
}

// carryOptions gives kept the options of the program's own socket. Those that it
// had of an earlier run go with that.
func carryOptions(own, kept int) {
	for _, o := range carried {
		want, err := unix.GetsockoptInt(own, o.level, o.name)
		if err != nil {
			continue // not of this kind of socket
		}
		if has, err := unix.GetsockoptInt(kept, o.level, o.name); err == nil && has != want {
			_ = unix.SetsockoptInt(kept, o.level, o.name, want) // it works without
		}
	}
	for _, name := range []int{unix.SO_RCVBUF, unix.SO_SNDBUF} {
		want, err := unix.GetsockoptInt(own, unix.SOL_SOCKET, name)
		if has, herr := unix.GetsockoptInt(kept, unix.SOL_SOCKET, name); err == nil && herr == nil && has != want {
			_ = unix.SetsockoptInt(kept, unix.SOL_SOCKET, name, want/2) // the kernel doubles it
		}
	}
	flags, err := unix.FcntlInt(uintptr(own), unix.F_GETFL, 0)
	if err == nil {
		_ = unix.SetNonblock(kept, flags&unix.O_NONBLOCK != 0)
	}
}

// filter answers the verb of that name.
func (s *Shim) filter(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Filter
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validID(m.ID); err != nil || len(r.FDs) > 1 {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot use the filter of %q with %d descriptors: want an id and at most one", m.ID, len(r.FDs))
	}
	k := key{m.ID, m.Run}
	if len(r.FDs) == 1 {
		fd := r.FDs[0]
		r.FDs[0] = -1
		if err := s.addFilter(k, fd); err != nil {
			return shimctl.Answer{}, err
		}
		s.mu.Lock()
		f := s.filterOf(k)
		s.mu.Unlock()
		if f != nil {
			s.resumeBind(f)
		}
		return shimctl.Answer{}, nil
	}
	fd, err := s.dupFilter(k)
	if err != nil {
		return shimctl.Answer{}, err
	}
	return shimctl.Answer{FDs: []int{fd}, Close: true}, nil
}

// dupFilter duplicates what reports the binds of a run.
func (s *Shim) dupFilter(k key) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.filterOf(k)
	if f == nil {
		return -1, shimctl.Errorf(shimctl.CodeNotFound, "cannot give what reports the binds of %s: there is none", k.id)
	}
	fd, err := unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return -1, shimctl.Errorf(shimctl.CodeFailed, "cannot duplicate what reports the binds of %s: %w", k.id, err)
	}
	return fd, nil
}

// TryVerb is the argument with which lull-shim starts itself to try a handoff:
// the address to bind follows.
const TryVerb = "try-bind"

// Stage runs one of the parts that lull-shim plays between fork and program, or
// as its own watchdog. It reports false when args ask for none.
func Stage(args []string) (code int, ok bool) {
	switch {
	case len(args) == 2 && args[1] == StageVerb:
		return ExecStage(), true
	case len(args) == 3 && args[1] == TryVerb:
		return tryBind(args[2]), true
	case len(args) == 3 && args[1] == WatchVerb:
		return Watchdog(args[2]), true
	}
	return 0, false
}

// tryBind binds an address and says on standard output whether the socket that it
// has afterwards is one that listens.
func tryBind(addr string) int {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return 2
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()})
	}
	if err == nil && !listening(fd) {
		err = errors.New("it was given no socket")
	}
	if err != nil {
		fmt.Printf("bind: %v", err)
		return 1
	}
	fmt.Print(tried)
	return 0
}

const tried = "handed over"

// tryID is the id under which a handoff is tried. No instance has it.
const tryID = ".try"

// tryLimit bounds one trial of a handoff.
const tryLimit = 10 * time.Second

// checkHandoff answers whether a handoff works for programs that this shim
// starts. It is tried once, from end to end, because too much decides it: the
// kernel, its settings, and what this process may do.
func (s *Shim) checkHandoff(ctx context.Context, _ *shimctl.Request) (shimctl.Answer, error) {
	s.trying.Lock()
	defer s.trying.Unlock()
	if s.tried == nil {
		m, err := s.tryHandoff(ctx)
		if err != nil {
			m.Why = err.Error()
		}
		s.tried = &m
	}
	return shimctl.Answer{Body: *s.tried}, nil
}

func (s *Shim) tryHandoff(ctx context.Context) (m shimctl.HandoffCheck, err error) {
	fd, err := listen("127.0.0.1:0")
	if err != nil {
		return m, err
	}
	f, err := formOf(fd)
	if err != nil {
		unix.Close(fd)
		return m, err
	}
	k := key{tryID, 1}
	s.mu.Lock()
	s.held[tryID] = []held{{f.String(), f, fd}}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.held, tryID)
		s.mu.Unlock()
		unix.Close(fd)
	}()
	out, in, err := os.Pipe()
	if err != nil {
		return m, err
	}
	defer out.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		in.Close()
		return m, err
	}
	defer null.Close()
	work := forking{what: "try a handoff", stdio: [3]int{int(null.Fd()), int(in.Fd()), int(in.Fd())},
		spec:     stageSpec{Command: []string{s.cfg.Exe, TryVerb, f.String()}, Env: []string{"GOMAXPROCS=1"}, Dir: "/"},
		register: func(int, uint64) error { return nil }}
	work.filtered = func(w stageWords) error {
		m.NoNewPrivs = w.noPrivs
		return s.takeFilter(k, w)
	}
	err = s.fork(ctx, work)
	in.Close()
	if err != nil {
		return m, err
	}
	_ = out.SetReadDeadline(time.Now().Add(tryLimit))
	var b [256]byte
	n, err := out.Read(b[:])
	if said := string(b[:n]); said != tried {
		return m, fmt.Errorf("a socket could not be handed to a program: %s", said)
	}
	return m, nil
}

// takeFilter takes what the exec stage gave. Without a filter it is an error that
// names the step.
func (s *Shim) takeFilter(k key, w stageWords) error {
	if w.fd < 0 {
		return &shimctl.Error{Code: shimctl.CodeStage, Step: shimctl.StepHandoff, Message: "cannot hand sockets over: " + w.why}
	}
	return s.addFilter(k, w.fd)
}
