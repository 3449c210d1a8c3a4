package shim

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
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

// A held unix socket is reached through a file. Programs remove that file before
// they bind and when they end, and a client that finds none is refused. So the
// filter of such a program also reports unlink(2), and the removal of the file
// is answered with success and not carried out.
//
// A unix socket cannot drop the first packet of a connection as TCP can. While a
// program ends, a new socket takes the place of the file instead (the door is
// shut), so that clients wait where the program accepts none. The former socket,
// the spare, is held too until the next program starts or the stop is called
// off.

// spare begins the address of a spare, which that of its socket follows.
const spare = "spare:"

func isSpare(addr string) bool { return strings.HasPrefix(addr, spare) }

// sparePath returns the path at which a socket is made before it is moved to
// path, and at which a spare stays.
func sparePath(path string) string {
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(path))
	return fmt.Sprintf("%s/.lull%08x", filepath.Dir(path), sum.Sum32())
}

// place returns the user and the path of a held unix socket; ok is false for any
// other.
func (h held) place() (user, path string, ok bool) {
	user, path, ok = shimctl.UnixAddr(strings.TrimPrefix(h.addr, spare))
	if ok && isSpare(h.addr) {
		path = sparePath(path)
	}
	return user, path, ok
}

// fileID identifies a file.
type fileID struct{ dev, ino uint64 }

func idOf(st *unix.Stat_t) fileID { return fileID{st.Dev, st.Ino} }

// fileAt identifies the file at path without following a link; zero for none.
func fileAt(path string) (fileID, uint32) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return fileID{}, 0
	}
	return idOf(&st), st.Mode & unix.S_IFMT
}

// identify sets the file of a held unix socket.
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

// boundFile opens the file that a unix socket is bound to, wherever that is now.
// It needs CAP_NET_ADMIN.
func boundFile(socket int) (int, error) {
	const siocUnixFile = 0x89e0
	fd, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), siocUnixFile, 0)
	if e != 0 {
		return -1, e
	}
	return int(fd), nil
}

// open opens the file of a held unix socket as O_PATH. A file that has taken its
// place is an error.
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

// reached reports whether clients of a held unix socket reach it.
func (h held) reached() bool {
	_, path, _ := h.place()
	id, _ := fileAt(path)
	return id == h.file && id != fileID{}
}

// asUser calls do with the rights of a user, as the program has them: its user may
// be able to exchange directories of the path. Empty is the shim's own.
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
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		// The raw calls change this thread only.
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

// listenUnix makes a socket that listens at path. The file of a socket that
// nothing listens on is replaced.
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
			at = sparePath(path)
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

// answers reports whether a program listens on the socket at path.
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

// bindAt makes a unix socket at a path, with the calling thread's rights. What a
// killed shim left at a spare's path is removed.
func bindAt(at string, listens bool) (int, error) {
	if strings.HasPrefix(filepath.Base(at), ".lull") {
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

// another makes a socket beside h, at the spare's path, whose file has the owner
// and mode of h's.
func (h held) another(listens bool) (held, error) {
	who, path, _ := h.place()
	n := held{addr: spare + h.addr, fd: -1}
	err := asUser(who, func() (err error) {
		n.fd, err = bindAt(sparePath(path), listens)
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

// resemble gives the file of h the owner and mode of another's, if that exists.
func (h held) resemble(other held) error {
	from, err := other.open()
	if err != nil {
		return nil // it was removed
	}
	defer unix.Close(from)
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	return h.own(int(st.Uid), int(st.Gid), st.Mode)
}

// own sets owner and mode of the file of h, which no other file can stand in
// for.
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

// remove removes the file of a held unix socket, unless another has taken its
// place.
func (h held) remove() {
	if who, path, ok := h.place(); ok && h.reached() {
		_ = asUser(who, func() error { return unix.Unlink(path) }) // a file that stays refuses clients too
	}
}

// findLocked returns the index of a held socket, -1 if there is none.
func (s *Shim) findLocked(id, addr string) int {
	return slices.IndexFunc(s.held[id], func(h held) bool { return h.addr == addr })
}

// dropLocked closes sockets that are no longer held under id; now are those that
// are. Clients that wait in a spare are passed on.
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

// reachLocked makes sure that clients reach a held unix socket. Something else may
// have removed its file. The caller holds mu.
func (s *Shim) reachLocked(id string, h held) error {
	if _, _, ok := h.place(); !ok || isSpare(h.addr) || h.reached() {
		return nil
	}
	_, err := s.renewLocked(id, h, true)
	return err
}

// renewLocked replaces a held unix socket by a new one. The caller holds mu.
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
		err = asUser(who, func() error { return unix.Rename(sparePath(path), path) })
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

// bindUnix prepares a held unix socket for a program that binds its path: its
// file exists, with the owner and mode that bind(2) would give it.
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
	var ids [4]int // real, effective, saved, of the file system
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

// keepFile answers the removal of a file. It reports whether that is done: the
// file of a held unix socket stays, and that of one that was held is gone.
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
	if err != nil || given == "" {
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
			continue // another file
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

// readPath reads a path that a thread passes to the kernel.
func readPath(tid int, at uint64) (string, error) {
	var path []byte
	for len(path) < unix.PathMax {
		b := make([]byte, 256-at%256) // does not cross into a page that may be missing
		if err := readMemory(tid, at, b); err != nil {
			return "", err
		}
		if n := bytes.IndexByte(b, 0); n >= 0 {
			return string(append(path, b[:n]...)), nil
		}
		path, at = append(path, b...), at+uint64(len(b))
	}
	return "", nil // too long, which the kernel reports
}

// sameFile reports whether a path that a thread passes, relative to its
// descriptor dir, names the directory entry path.
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

// drainLimit is how long a program may take to accept the clients that came
// before the door is shut. For one that accepts none, because it is frozen or
// hangs, the door stays open: those clients call the stop off, or wait for the
// next run together with new ones.
const drainLimit = 500 * time.Millisecond

// door answers the request of the same name.
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
	s.notes.mu.Lock() // no socket may be handed over in the meantime
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
	for waiting(shut) && time.Now().Before(end) { // who came at the same instant
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

// waiting reports whether a client waits in one of the listeners. One that is
// closed meanwhile has none.
func waiting(listeners []int) bool {
	polls := make([]unix.PollFd, len(listeners))
	for n, fd := range listeners {
		polls[n] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	}
	_, _ = unix.Poll(polls, 0)
	return slices.ContainsFunc(polls, func(p unix.PollFd) bool { return p.Revents == unix.POLLIN })
}

// shutLocked puts a new socket in the place of h, which becomes the spare. At
// every instant a killed shim leaves both to the next one.
func (s *Shim) shutLocked(id string, h held) error {
	who, path, _ := h.place()
	if s.findLocked(id, spare+h.addr) >= 0 || !h.reached() || !listening(h.fd) || waiting([]int{h.fd}) {
		return nil
	}
	n, err := h.another(true)
	if err != nil {
		return fmt.Errorf("clients of %s are not made to wait: %w", path, err)
	}
	s.held[id] = append(s.held[id], n)
	s.mirrorLocked(id)
	if err := exchange(who, path); err != nil {
		s.held[id] = s.held[id][:len(s.held[id])-1]
		s.mirrorLocked(id)
		n.remove()
		unix.Close(n.fd)
		return fmt.Errorf("clients of %s are not made to wait: %w", path, err)
	}
	s.sortSparesLocked(id)
	s.mirrorLocked(id)
	return s.saveHeldLocked(id)
}

func exchange(who, path string) error {
	return asUser(who, func() error {
		return unix.Renameat2(unix.AT_FDCWD, sparePath(path), unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	})
}

// openLocked undoes shutLocked. Clients that came in the meantime are passed on.
func (s *Shim) openLocked(id string, h held) error {
	n := s.findLocked(id, spare+h.addr)
	if n < 0 {
		return nil
	}
	who, path, _ := h.place()
	if err := exchange(who, path); err != nil {
		return fmt.Errorf("clients of %s wait for another start: %w", path, err)
	}
	s.sortSparesLocked(id)
	n = s.findLocked(id, spare+h.addr)
	drop := s.held[id][n]
	s.held[id] = slices.Delete(s.held[id], n, n+1)
	s.dropLocked(id, s.held[id], []held{drop})
	s.mirrorLocked(id)
	return s.saveHeldLocked(id)
}

// sortSparesLocked gives each pair of a socket and its spare the addresses that
// their files have.
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

// forward passes the clients that wait in a listener, which no program has, to
// the socket at path, and closes the listener. Each is connected with its own
// rights, which the program may ask for.
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

// dialAs connects to path with the rights of a process, or with fewer if that was
// root's and this one is not.
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
