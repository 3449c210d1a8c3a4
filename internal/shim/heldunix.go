package shim

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// Clients reach a held unix socket through a file. Programs remove that file before
// they bind and when they end, and without it clients are refused. So the filter of
// such a program also reports unlink(2). The shim reports success for the removal
// of the file without carrying it out.
//
// A TCP listener can ignore the first packet of a connection, so that clients wait;
// a unix socket cannot. While a program ends, another socket therefore replaces the
// file: the door is shut, and clients wait in a socket on which no program accepts.
// The former socket, the spare, stays held too, until the next program starts or
// the stop is canceled.

// spare is the prefix of the address of a spare. The address of the socket that it
// belongs to follows.
const spare = "spare:"

func isSpare(addr string) bool { return strings.HasPrefix(addr, spare) }

// place returns the user and the path of a held unix socket. ok is false for other
// sockets.
func (h held) place() (user, path string, ok bool) {
	user, path, ok = shimctl.UnixAddr(strings.TrimPrefix(h.addr, spare))
	if ok && isSpare(h.addr) {
		path = shimctl.SparePath(path)
	}
	return user, path, ok
}

// fileID identifies a file.
type fileID struct{ dev, ino uint64 }

func idOf(st *unix.Stat_t) fileID { return fileID{st.Dev, st.Ino} }

// fileAt identifies the file at path, without following a link, and returns its
// type. The ID is zero if there is no file.
func fileAt(path string) (fileID, uint32) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return fileID{}, 0
	}
	return idOf(&st), st.Mode & unix.S_IFMT
}

// identify sets h.file to the file of a held unix socket.
func (h *held) identify() {
	_, path, ok := h.place()
	if !ok {
		return
	}
	h.file, _ = fileAt(path)
	if fd, err := boundFile(h.fd); err == nil {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil {
			h.file = idOf(&st)
		}
		unix.Close(fd)
	}
}

// boundFile opens the file of a unix socket, wherever the file is now. It requires
// CAP_NET_ADMIN.
func boundFile(socket int) (int, error) {
	const siocUnixFile = 0x89e0
	fd, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), siocUnixFile, 0)
	if e != 0 {
		return -1, e
	}
	return int(fd), nil
}

// open opens the file of a held unix socket with O_PATH. It fails if another file
// has replaced it.
func (h held) open() (int, error) {
	if fd, err := boundFile(h.fd); err == nil {
		return fd, nil
	}
	_, path, _ := h.place()
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && idOf(&st) != h.file {
		err = unix.ESTALE
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// reached reports whether clients that connect to the path reach the held unix
// socket.
func (h held) reached() bool {
	_, path, _ := h.place()
	id, _ := fileAt(path)
	return id == h.file && id != fileID{}
}

// asUser calls do with the privileges of a program's user, who may be able to
// replace directories of the path. An empty name means the shim's own user.
func asUser(who string, do func() error) error {
	if who == "" {
		return do()
	}
	uid, gid, groups, err := lookup(who)
	if err != nil {
		return err
	}
	return asIDs(uid, gid, groups, do)
}

func asIDs(uid, gid int, groups []int, do func() error) error {
	if uid == os.Geteuid() && gid == os.Getegid() {
		return do()
	}
	ids := make([]uint32, len(groups)+1)
	for n, g := range groups {
		ids[n] = uint32(g)
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not unlocked, so that the thread ends with this goroutine
		// Raw system calls change only this thread.
		_, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&ids[0])), 0)
		if e == 0 {
			_, _, e = unix.RawSyscall(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid))
		}
		if e == 0 {
			_, _, e = unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
		}
		if e != 0 {
			done <- fmt.Errorf("act as user %d: %w", uid, e)
			return
		}
		done <- do()
	}()
	return <-done
}

// listenUnix returns a socket that listens at path. It replaces the file of a
// socket on which nothing listens.
func listenUnix(who, path string) (fd int, err error) {
	err = asUser(who, func() error {
		at := path
		switch id, kind := fileAt(path); {
		case id == fileID{}:
		case kind != unix.S_IFSOCK:
			return fmt.Errorf("a file that is not a socket is in the way: %w", unix.EADDRINUSE)
		default:
			live, err := answers(path)
			if err != nil {
				return fmt.Errorf("cannot determine whether another program listens there: %w", err)
			}
			if live {
				return fmt.Errorf("another program listens there: %w", unix.EADDRINUSE)
			}
			at = shimctl.SparePath(path)
		}
		var err error
		if fd, err = bindAt(at, true); err == nil && at != path {
			if err = unix.Rename(at, path); err != nil {
				unix.Close(fd)
			}
		}
		return err
	})
	if err != nil {
		return -1, shimctl.Errorf(shimctl.CodeFailed, "cannot hold %s: %w", path, err)
	}
	return fd, nil
}

// answers reports whether a socket listens at path.
func answers(path string) (bool, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	switch err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err {
	case nil, unix.EAGAIN, unix.EPROTOTYPE:
		return true, nil
	case unix.ECONNREFUSED, unix.ENOENT:
		return false, nil
	default:
		return false, err
	}
}

// bindAt returns a unix socket bound to the path at, created with the calling
// thread's privileges. It first removes a spare that a killed shim has left there.
func bindAt(at string, listens bool) (int, error) {
	if strings.HasPrefix(filepath.Base(at), shimctl.SpareName) {
		if err := unix.Unlink(at); err != nil && err != unix.ENOENT {
			return -1, err
		}
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.Bind(fd, &unix.SockaddrUnix{Name: at}); err == nil && listens {
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// another returns a new socket at the path of h's spare, with the owner and mode of
// h's file.
func (h held) another(listens bool) (held, error) {
	who, path, _ := h.place()
	n := held{addr: spare + h.addr, fd: -1}
	err := asUser(who, func() (err error) {
		n.fd, err = bindAt(shimctl.SparePath(path), listens)
		return err
	})
	if err != nil {
		return n, err
	}
	if n.as, err = formOf(n.fd); err == nil {
		n.identify()
		err = n.resemble(h)
	}
	if err != nil {
		n.remove()
		unix.Close(n.fd)
	}
	return n, err
}

// resemble gives the file of h the owner and mode of other's file, if that exists.
func (h held) resemble(other held) error {
	from, err := other.open()
	if err != nil {
		return nil // other's file was removed
	}
	defer unix.Close(from)
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	return h.own(int(st.Uid), int(st.Gid), st.Mode)
}

// own sets the owner and mode of the file of h. It cannot be tricked into changing
// another file.
func (h held) own(uid, gid int, mode uint32) error {
	fd, err := h.open()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if int(st.Uid) != uid || int(st.Gid) != gid {
		if err := unix.Fchownat(fd, "", uid, gid, unix.AT_EMPTY_PATH); err != nil {
			return err
		}
	}
	if (st.Mode^mode)&0o7777 == 0 {
		return nil
	}
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), mode&0o7777)
}

// remove removes the file of a held unix socket, unless another file has replaced
// it.
func (h held) remove() {
	if who, path, ok := h.place(); ok && h.reached() {
		_ = asUser(who, func() error { return unix.Unlink(path) }) // if this fails, clients are refused all the same
	}
}

// findLocked returns the index of a held socket, or -1. s.mu must be held.
func (s *Shim) findLocked(id, addr string) int {
	return slices.IndexFunc(s.held[id], func(h held) bool { return h.addr == addr })
}

// dropLocked closes drop, the sockets that are no longer held under id, and
// forwards the clients that wait in a spare. now are the sockets that are still
// held. s.mu must be held.
func (s *Shim) dropLocked(id string, now, drop []held) {
	if len(now) > 0 {
		delete(s.dropped, id)
	}
	for _, h := range drop {
		_, path, ok := h.place()
		h.remove()
		switch {
		case ok && isSpare(h.addr) && slices.ContainsFunc(now, func(n held) bool { return spare+n.addr == h.addr }):
			_, path, _ = shimctl.UnixAddr(strings.TrimPrefix(h.addr, spare))
			go s.forward(id, h.fd, path)
			continue
		case ok && len(now) == 0:
			s.dropped[id] = append(s.dropped[id], path, h.as.path)
		}
		unix.Close(h.fd)
	}
}

// reachLocked replaces a held unix socket that clients no longer reach, because
// something has removed its file. s.mu must be held.
func (s *Shim) reachLocked(id string, h held) error {
	if _, _, ok := h.place(); !ok || isSpare(h.addr) || h.reached() {
		return nil
	}
	_, err := s.renewLocked(id, h, true)
	return err
}

// renewLocked replaces a held unix socket with a new one and returns it. s.mu must
// be held.
func (s *Shim) renewLocked(id string, h held, listens bool) (held, error) {
	who, path, _ := h.place()
	if at, kind := fileAt(path); at != h.file && at != (fileID{}) {
		if kind != unix.S_IFSOCK {
			return h, fmt.Errorf("cannot hold %s: a file that is not a socket is in the way", path)
		}
		var live bool
		err := asUser(who, func() (err error) { live, err = answers(path); return err })
		if err != nil || live {
			return h, fmt.Errorf("cannot hold %s: another program listens there: %w", path, cmp.Or(err, error(unix.EADDRINUSE)))
		}
	}
	n, err := h.another(listens)
	if err == nil {
		err = asUser(who, func() error { return unix.Rename(shimctl.SparePath(path), path) })
	}
	if err != nil {
		return h, fmt.Errorf("cannot hold %s: %w", path, err)
	}
	n.addr = h.addr
	if at := s.findLocked(id, h.addr); at >= 0 {
		s.held[id][at] = n
	}
	err = s.saveHeldLocked(id)
	s.mirrorLocked(id)
	s.srv.Send(shimctl.VerbHeld, shimctl.HeldChanged{ID: id})
	if listens {
		go s.forward(id, h.fd, path)
	} else {
		unix.Close(h.fd)
	}
	return n, err
}

// bindUnix prepares h for a program that binds its path: afterwards clients reach
// it, and its file has the owner and mode that bind(2) would give it.
func (s *Shim) bindUnix(f *filter, h held, c bindCall, own int) (held, error) {
	s.mu.Lock()
	err := s.reachLocked(f.id, h)
	if at := s.findLocked(f.id, h.addr); at >= 0 {
		h = s.held[f.id][at]
	}
	s.mu.Unlock()
	if err != nil {
		return h, err
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.tid))
	if err != nil {
		return h, err
	}
	var umask uint32
	var ids [4]int // real, effective, saved and file system ID
	uid, gid := -1, -1
	for line := range bytes.Lines(b) {
		name, v, _ := bytes.Cut(line, []byte(":"))
		switch string(name) {
		case "Umask":
			_, err = fmt.Sscanf(string(v), "%o", &umask)
		case "Uid":
			_, err = fmt.Sscan(string(v), &ids[0], &ids[1], &ids[2], &ids[3])
			uid = ids[3]
		case "Gid":
			_, err = fmt.Sscan(string(v), &ids[0], &ids[1], &ids[2], &ids[3])
			gid = ids[3]
		}
		if err != nil {
			return h, err
		}
	}
	var st, dir unix.Stat_t
	if err := unix.Fstat(own, &st); err != nil {
		return h, err
	}
	_, path, _ := h.place()
	if unix.Stat(filepath.Dir(path), &dir) == nil && dir.Mode&unix.S_ISGID != 0 {
		gid = int(dir.Gid)
	}
	if err := h.own(uid, gid, st.Mode&0o777&^umask); err != nil {
		s.log.Warn("a unix socket keeps its owner and mode", "instance", f.id, "path", path, "err", err)
	}
	return h, nil
}

// keepFile answers the removal of a file. It returns true if the shim must report
// success without the kernel removing anything: for the file of a held unix socket,
// which stays, and for that of a socket no longer held, which is already gone.
func (s *Shim) keepFile(f *filter, n *seccompNotif) (bool, error) {
	s.mu.Lock()
	hs, gone := slices.Clone(s.held[f.id]), slices.Clone(s.dropped[f.id])
	s.mu.Unlock()
	dir, at := unix.AT_FDCWD, n.args[0]
	if trappedUnlinks[trapped{n.arch, uint32(n.nr)}] {
		dir, at = int(int32(uint32(n.args[0]))), n.args[1]
		if n.args[2]&unix.AT_REMOVEDIR != 0 {
			return false, nil
		}
	}
	given, err := readPath(int(n.pid), at)
	if err != nil || given == "" || !s.belongs(f.id, int(n.pid)) {
		return false, err
	}
	same := func(path string) bool { return sameFile(int(n.pid), dir, given, path) }
	for _, h := range hs {
		_, path, ok := h.place()
		its := ok && same(path)
		switch {
		case !its && (!ok || !same(h.as.path)), !valid(f.fd, n.id):
			continue
		case its && !isSpare(h.addr) && !h.reached():
			continue // another file has replaced the socket's
		case its && !isSpare(h.addr):
			s.mu.Lock()
			f.removed[h.addr] = true
			s.mu.Unlock()
		}
		return true, nil
	}
	for _, path := range gone {
		if id, _ := fileAt(path); id == (fileID{}) && same(path) {
			return valid(f.fd, n.id), nil
		}
	}
	return false, nil
}

// readPath reads a path from the memory of a thread.
func readPath(tid int, at uint64) (string, error) {
	var path []byte
	for len(path) < unix.PathMax {
		b := make([]byte, 256-at%256) // do not read beyond the page, because the next may not be mapped
		if err := readMemory(tid, at, b); err != nil {
			return "", err
		}
		if n := bytes.IndexByte(b, 0); n >= 0 {
			return string(append(path, b[:n]...)), nil
		}
		path, at = append(path, b...), at+uint64(len(b))
	}
	return "", nil // too long; the kernel will report that
}

// sameFile reports whether given, which a thread passes to the kernel relative to
// its descriptor dir, names the directory entry path.
func sameFile(tid, dir int, given, path string) bool {
	if given == "" || filepath.Base(given) != filepath.Base(path) || strings.HasSuffix(given, "/") {
		return false
	}
	from := fmt.Sprintf("/proc/%d/cwd/", tid)
	switch {
	case given[0] == '/':
		from = fmt.Sprintf("/proc/%d/root", tid)
	case dir != unix.AT_FDCWD:
		from = fmt.Sprintf("/proc/%d/fd/%d/", tid, dir)
	}
	var a, b unix.Stat_t
	err := cmp.Or(unix.Stat(from+given[:strings.LastIndexByte(given, '/')+1], &a), unix.Stat(filepath.Dir(path), &b))
	return err == nil && idOf(&a) == idOf(&b)
}

// drainLimit is how long a program gets to accept the clients that came before the
// door was shut. If it accepts none, because it is frozen or hangs, those clients
// stay in the spare, where they cause the stop to be canceled or wait for the next
// run.
const drainLimit = 500 * time.Millisecond

// door handles the request of the same name.
func (s *Shim) door(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Door
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validID(m.ID); err != nil {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot let clients wait: %v", err)
	}
	end := time.Now().Add(drainLimit)
	for m.Shut && s.crowded(m.ID) && time.Now().Before(end) {
		time.Sleep(time.Millisecond)
	}
	s.notes.mu.Lock() // no socket may be handed over meanwhile
	s.mu.Lock()
	var errs []error
	var shut []int
	for _, h := range slices.Clone(s.held[m.ID]) {
		if _, _, ok := h.place(); !ok || isSpare(h.addr) {
			continue
		}
		turn := s.openLocked
		if m.Shut {
			turn = s.shutLocked
		}
		if err := turn(m.ID, h); err != nil {
			errs = append(errs, err)
		}
		if n := s.findLocked(m.ID, spare+h.addr); n >= 0 {
			shut = append(shut, s.held[m.ID][n].fd)
		}
	}
	s.mu.Unlock()
	s.notes.mu.Unlock()
	for waiting(shut) && time.Now().Before(end) { // for clients that came while the door was being shut
		time.Sleep(time.Millisecond)
	}
	if err := errors.Join(errs...); err != nil {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeFailed, "%w", err)
	}
	return shimctl.Answer{}, nil
}

// crowded reports whether a client waits in a unix socket that is held under id.
func (s *Shim) crowded(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.held[id], func(h held) bool { return h.as.path != "" && waiting([]int{h.fd}) })
}

// waiting reports whether a client waits in one of listeners. A descriptor that has
// been closed meanwhile does not count.
func waiting(listeners []int) bool {
	polls := make([]unix.PollFd, len(listeners))
	for n, fd := range listeners {
		polls[n] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	}
	_, _ = unix.Poll(polls, 0)
	return slices.ContainsFunc(polls, func(p unix.PollFd) bool { return p.Revents == unix.POLLIN })
}

// shutLocked puts a new socket in the place of h, and makes h the spare. If the
// shim is killed at any moment, the next one finds both. s.mu must be held.
func (s *Shim) shutLocked(id string, h held) error {
	who, path, _ := h.place()
	if s.findLocked(id, spare+h.addr) >= 0 || !h.reached() || !listening(h.fd) || waiting([]int{h.fd}) {
		return nil
	}
	n, err := h.another(true)
	if err != nil {
		return fmt.Errorf("cannot make clients of %s wait: %w", path, err)
	}
	s.held[id] = append(s.held[id], n)
	s.mirrorLocked(id)
	if err := exchange(who, path); err != nil {
		s.held[id] = s.held[id][:len(s.held[id])-1]
		s.mirrorLocked(id)
		n.remove()
		unix.Close(n.fd)
		return fmt.Errorf("cannot make clients of %s wait: %w", path, err)
	}
	s.sortSparesLocked(id)
	s.mirrorLocked(id)
	return s.saveHeldLocked(id)
}

func exchange(who, path string) error {
	return asUser(who, func() error {
		return unix.Renameat2(unix.AT_FDCWD, shimctl.SparePath(path), unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	})
}

// openLocked undoes shutLocked. It forwards the clients that came in between. s.mu
// must be held.
func (s *Shim) openLocked(id string, h held) error {
	n := s.findLocked(id, spare+h.addr)
	if n < 0 {
		return nil
	}
	who, path, _ := h.place()
	if err := exchange(who, path); err != nil {
		return fmt.Errorf("clients of %s have to wait for the next start: %w", path, err)
	}
	s.sortSparesLocked(id)
	n = s.findLocked(id, spare+h.addr)
	drop := s.held[id][n]
	s.held[id] = slices.Delete(s.held[id], n, n+1)
	s.dropLocked(id, s.held[id], []held{drop})
	s.mirrorLocked(id)
	return s.saveHeldLocked(id)
}

// sortSparesLocked corrects which socket of each pair is the spare, according to
// their files. s.mu must be held.
func (s *Shim) sortSparesLocked(id string) {
	hs := s.held[id]
	for n := range hs {
		m := s.findLocked(id, spare+hs[n].addr)
		if m < 0 {
			continue
		}
		if _, path, ok := hs[n].place(); ok {
			if at, _ := fileAt(path); at == hs[m].file && at != hs[n].file {
				hs[n].addr, hs[m].addr = hs[m].addr, hs[n].addr
			}
		}
	}
}

// forward connects the clients that wait in listener, on which no program accepts,
// to the socket at path, and closes listener. It connects each with the client's
// own user, which the program may query.
func (s *Shim) forward(id string, listener int, path string) {
	defer unix.Close(listener)
	if unix.SetNonblock(listener, true) != nil {
		return
	}
	for _, client := range acceptAll(listener) {
		peer, err := unix.GetsockoptUcred(client, unix.SOL_SOCKET, unix.SO_PEERCRED)
		s.pass(id, client, func() (net.Conn, error) {
			if err != nil {
				return nil, err
			}
			return dialAs(peer, path)
		})
	}
}

// dialAs connects to path with the user and group of a peer. If that is root and
// the shim is not, it uses the shim's own.
func dialAs(who *unix.Ucred, path string) (net.Conn, error) {
	uid, gid := int(who.Uid), int(who.Gid)
	if uid == 0 && os.Geteuid() != 0 {
		uid, gid = os.Geteuid(), os.Getegid()
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "program")
	defer file.Close()
	if err := asIDs(uid, gid, nil, func() error { return unix.Connect(fd, &unix.SockaddrUnix{Name: path}) }); err != nil {
		return nil, err
	}
	return net.FileConn(file)
}
