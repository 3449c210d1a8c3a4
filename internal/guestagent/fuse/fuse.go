// Package fuse provides a guest's workspace: a file system whose files are those of
// a host directory. It answers the guest's kernel (FUSE) with what it gets from the
// host (package files). The host knows files only by path, so it can restart, and
// the guest can be saved and restored, while files are open.
//
// Every request is answered: by the host, or with EIO if the host does not answer
// for too long. The kernel caches names and attributes for one second, and file
// content until the file is opened again. Locks and special files are local to the
// guest; extended attributes and device files are not supported.
//
// It must run in its own process. A guest agent that served the workspace itself
// would wait for itself when it starts a program there.
package fuse

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/guest/files"
)

// Server answers the kernel's requests. Create it with New.
type Server struct {
	dev   int // descriptor of /dev/fuse
	host  *Host
	owner owner
	tree  *tree
	mark  string // part of every hidden name

	mu    sync.Mutex
	next  uint64
	lists map[uint64][]files.Entry // entries of open directories
	hides int
}

// New returns a server for the open device dev. Files appear to be owned by uid and
// gid.
func New(dev int, h *Host, uid, gid uint32) *Server {
	var b [6]byte
	rand.Read(b[:])
	return &Server{dev: dev, host: h, owner: owner{uid, gid}, tree: newTree(), mark: hex.EncodeToString(b[:]), lists: map[uint64][]files.Entry{}}
}

// Run serves requests until the file system is unmounted.
func (s *Server) Run() error {
	for {
		b := make([]byte, roomForAll)
		n, err := unix.Read(s.dev, b)
		switch {
		case err == unix.EINTR || err == unix.EAGAIN || err == unix.ENOENT: // ENOENT means that the request was interrupted
			continue
		case err == unix.ENODEV:
			return nil
		case err != nil:
			return fmt.Errorf("cannot read a request of the kernel: %w", err)
		}
		q, ok := parse(b[:n])
		if !ok {
			return fmt.Errorf("cannot read a request of the kernel: %d bytes", n)
		}
		switch q.op {
		case opForget, opBatchForget:
			s.forget(&q)
		case opInterrupt: // ignored, because every request is answered in limited time
		default:
			go s.serve(q)
		}
	}
}

func (s *Server) forget(q *request) {
	if q.op == opForget {
		if q.need(8) {
			s.tree.forget(q.node, q.u64(0))
		}
		return
	}
	for at := 8; q.need(at + 16); at += 16 {
		s.tree.forget(q.u64(at), q.u64(at+8))
	}
}

func (s *Server) serve(q request) {
	body, errno := s.answer(&q)
	if errno != 0 {
		body = nil
	}
	b := make([]byte, 0, outHead+len(body))
	b = ne.AppendUint32(b, uint32(outHead+len(body)))
	b = ne.AppendUint32(b, uint32(-int32(errno)))
	b = ne.AppendUint64(b, q.unique)
	// If the caller was killed, the kernel rejects the answer.
	_, _ = unix.Write(s.dev, append(b, body...))
}

// invalidate makes the kernel drop the cached attributes of a node.
func (s *Server) invalidate(node uint64) {
	b := ne.AppendUint32(nil, outHead+24)
	b = ne.AppendUint32(b, notifyInvalInode)
	for _, v := range []uint64{0, node, math.MaxUint64, 0} { // request 0 is a notification; offset -1 means attributes only
		b = ne.AppendUint64(b, v)
	}
	_, _ = unix.Write(s.dev, b) // fails with ENOENT if the kernel has forgotten the node
}

// sizes maps each operation to the size of the fixed part of its body, which
// precedes any names.
var sizes = map[uint32]int{opLookup: 0, opSymlink: 0, opMknod: 16, opMkdir: 8, opUnlink: 0, opRmdir: 0, opRename: 8, opLink: 8,
	opCreate: 16, opRename2: 16}

func (s *Server) answer(q *request) ([]byte, syscall.Errno) {
	if at, named := sizes[q.op]; named {
		names := q.names(at)
		want := 1
		if q.op == opSymlink || q.op == opRename || q.op == opRename2 {
			want = 2
		}
		if len(names) < want {
			return nil, syscall.EIO
		}
		return s.named(q, names)
	}
	switch q.op {
	case opInit:
		return hello(q)
	case opDestroy:
		return nil, 0
	case opGetattr:
		return s.attr(q)
	case opSetattr:
		return s.change(q)
	case opReadlink:
		a, errno := s.on(q.node, files.Request{Op: files.ReadLink})
		return a.Data, errno
	case opOpen:
		return s.open(q)
	case opRead:
		return s.read(q)
	case opWrite:
		return s.write(q)
	case opRelease:
		s.release(q.node)
		return nil, 0
	case opFsync, opFsyncdir:
		_, errno := s.on(q.node, files.Request{Op: files.Sync})
		return nil, errno
	case opStatfs:
		return s.space()
	case opOpendir:
		return appendOpen(nil, s.handle()), 0
	case opReaddir:
		return s.list(q)
	case opReleasedir:
		return s.closeList(q)
	}
	return nil, syscall.ENOSYS
}

// named handles requests about a directory entry, given by name.
func (s *Server) named(q *request, names []string) ([]byte, syscall.Errno) {
	if isHidden(q.node, names[0]) {
		if q.op == opLookup {
			return nil, syscall.ENOENT
		}
		return nil, syscall.EPERM
	}
	switch q.op {
	case opLookup:
		return s.make(q.node, names[0], files.Request{Op: files.Stat})
	case opSymlink:
		return s.make(q.node, names[0], files.Request{Op: files.Symlink, To: names[1]})
	case opMkdir:
		return s.make(q.node, names[0], files.Request{Op: files.Mkdir, Mode: q.u32(0)})
	case opMknod:
		if q.u32(0)&syscall.S_IFMT != syscall.S_IFREG {
			return nil, syscall.EPERM
		}
		return s.make(q.node, names[0], files.Request{Op: files.Create, Mode: q.u32(0) &^ syscall.S_IFMT})
	case opCreate:
		return s.create(q, names[0])
	case opLink:
		return s.link(q, names[0])
	case opUnlink, opRmdir:
		return nil, s.remove(q.node, names[0], q.op == opRmdir)
	case opRename:
		return nil, s.rename(q.node, names[0], q.u64(0), names[1], 0)
	case opRename2:
		return nil, s.rename(q.node, names[0], q.u64(0), names[1], q.u32(8))
	}
	return nil, syscall.ENOSYS
}

// on sends the host a request about the file with a node number.
func (s *Server) on(id uint64, r files.Request) (files.Answer, syscall.Errno) {
	s.tree.order.RLock()
	defer s.tree.order.RUnlock()
	var errno syscall.Errno
	if r.Path, r.Ino, errno = s.tree.where(id); errno != 0 {
		return files.Answer{}, errno
	}
	return s.host.ask(r)
}

// lookup sends the host a request about a directory entry, which may create the
// entry, and records the file that it returns.
func (s *Server) lookup(dir uint64, name string, r files.Request) (id uint64, a files.Answer, errno syscall.Errno) {
	s.tree.order.RLock()
	defer s.tree.order.RUnlock()
	if r.Path, errno = s.tree.below(dir, name); errno != 0 {
		return 0, a, errno
	}
	if a, errno = s.host.ask(r); errno != 0 {
		return 0, a, errno
	}
	id, errno = s.tree.found(dir, name, &a.Attr)
	return id, a, errno
}

func (s *Server) make(dir uint64, name string, r files.Request) ([]byte, syscall.Errno) {
	id, a, errno := s.lookup(dir, name, r)
	if errno != 0 {
		return nil, errno
	}
	return appendEntry(nil, id, &a.Attr, s.owner), 0
}

func (s *Server) attr(q *request) ([]byte, syscall.Errno) {
	a, errno := s.on(q.node, files.Request{Op: files.Stat})
	if errno != 0 {
		return nil, errno
	}
	return appendAttrOut(nil, &a.Attr, s.owner, s.tree.wasRemoved(q.node)), 0
}

func (s *Server) change(q *request) ([]byte, syscall.Errno) {
	if !q.need(sizeOfSetattr) {
		return nil, syscall.EIO
	}
	valid := q.u32(0)
	if valid&setattrUID != 0 && q.u32(76) != s.owner.uid || valid&setattrGID != 0 && q.u32(80) != s.owner.gid {
		return nil, syscall.EPERM // on the host, every file belongs to the directory's owner
	}
	stamp := func(sec, nsec int) int64 { return int64(q.u64(sec))*1e9 + int64(q.u32(nsec)) }
	r := files.Request{Op: files.Change, Mode: q.u32(68) &^ syscall.S_IFMT, Atime: stamp(32, 56), Mtime: stamp(40, 60)}
	if r.Off = int64(q.u64(16)); r.Off < 0 {
		return nil, syscall.EFBIG
	}
	for _, m := range []struct{ is, mask uint32 }{{setattrMode, files.SetMode}, {setattrSize, files.SetSize}, {setattrAtime, files.SetAtime},
		{setattrMtime, files.SetMtime}, {setattrANow, files.SetAtimeNow}, {setattrMNow, files.SetMtimeNow}} {
		if valid&m.is != 0 {
			r.Mask |= m.mask
		}
	}
	a, errno := s.on(q.node, r)
	if errno != 0 {
		return nil, errno
	}
	return appendAttrOut(nil, &a.Attr, s.owner, s.tree.wasRemoved(q.node)), 0
}

// access converts open flags to access bits.
func access(flags uint32) uint32 {
	switch flags & openAccMode {
	case syscall.O_WRONLY:
		return files.ForWriting
	case syscall.O_RDWR:
		return files.ForReading | files.ForWriting
	}
	return files.ForReading
}

func (s *Server) open(q *request) ([]byte, syscall.Errno) {
	if !q.need(8) {
		return nil, syscall.EIO
	}
	if _, errno := s.on(q.node, files.Request{Op: files.Open, Mask: access(q.u32(0))}); errno != 0 {
		return nil, errno
	}
	s.tree.opened(q.node)
	return appendOpen(nil, 0), 0
}

func (s *Server) create(q *request, name string) ([]byte, syscall.Errno) {
	flags := q.u32(0)
	id, a, errno := s.lookup(q.node, name, files.Request{Op: files.Create, Mode: q.u32(4) &^ syscall.S_IFMT})
	if errno == syscall.EEXIST && flags&syscall.O_EXCL == 0 {
		id, a, errno = s.take(q.node, name, flags)
	}
	if errno != 0 {
		return nil, errno
	}
	s.tree.opened(id)
	return appendOpen(appendEntry(nil, id, &a.Attr, s.owner), 0), 0
}

// take opens a file that the host has created since the kernel's lookup found none.
func (s *Server) take(dir uint64, name string, flags uint32) (id uint64, a files.Answer, errno syscall.Errno) {
	if id, a, errno = s.lookup(dir, name, files.Request{Op: files.Stat}); errno != 0 {
		return 0, a, errno
	}
	if a.Attr.Mode&syscall.S_IFMT != syscall.S_IFREG {
		errno = syscall.ESTALE // makes the kernel look the name up again
	} else {
		_, errno = s.on(id, files.Request{Op: files.Open, Mask: access(flags)})
	}
	if errno == 0 && flags&syscall.O_TRUNC != 0 {
		a, errno = s.on(id, files.Request{Op: files.Change, Mask: files.SetSize})
	}
	if errno != 0 {
		s.tree.forget(id, 1)
	}
	return id, a, errno
}

func (s *Server) read(q *request) ([]byte, syscall.Errno) {
	if !q.need(headOfRead) {
		return nil, syscall.EIO
	}
	a, errno := s.on(q.node, files.Request{Op: files.Read, Off: int64(q.u64(8)), Size: min(q.u32(16), files.MaxData)})
	return a.Data, errno
}

func (s *Server) write(q *request) ([]byte, syscall.Errno) {
	if !q.need(headOfWrite) || !q.need(headOfWrite+int(q.u32(16))) || q.u32(16) > files.MaxData {
		return nil, syscall.EIO
	}
	_, errno := s.on(q.node, files.Request{Op: files.Write, Off: int64(q.u64(8)), Data: q.body[headOfWrite : headOfWrite+int(q.u32(16))]})
	return ne.AppendUint64(nil, uint64(q.u32(16))), errno
}

func (s *Server) space() ([]byte, syscall.Errno) {
	a, errno := s.host.ask(files.Request{Op: files.Space})
	var b []byte
	for _, v := range []uint64{uint64(a.Attr.Size), uint64(a.Attr.Blocks), uint64(a.Attr.Blocks), a.Attr.Ino, a.Attr.Ino} {
		b = ne.AppendUint64(b, v)
	}
	for _, v := range []uint32{shownBlock, files.MaxName, shownBlock, 0} {
		b = ne.AppendUint32(b, v)
	}
	return append(b, make([]byte, 24)...), errno
}
