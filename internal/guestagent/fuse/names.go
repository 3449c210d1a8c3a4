package fuse

import (
	"strconv"
	"syscall"

	"lull/internal/protocol/guest/files"
)

// remove removes a name. If the file is open, it is renamed to a hidden name until
// it is closed, because the host knows files only by name.
func (s *Server) remove(dir uint64, name string, isDir bool) syscall.Errno {
	s.tree.order.Lock()
	defer s.tree.order.Unlock()
	path, errno := s.tree.below(dir, name)
	if errno != 0 {
		return errno
	}
	n := s.tree.kid(dir, name)
	if s.tree.isOpen(n) {
		return s.hide(n, path)
	}
	op := files.Remove
	if isDir {
		op = files.RemoveDir
	}
	if _, errno = s.host.ask(files.Request{Op: op, Path: path}); errno == 0 {
		s.tree.unname(n)
	}
	return errno
}

// hide renames an open file to a hidden name.
func (s *Server) hide(n *node, path string) syscall.Errno {
	for {
		s.mu.Lock()
		s.hides++
		name := files.Hidden + s.mark + "-" + strconv.Itoa(s.hides)
		s.mu.Unlock()
		_, errno := s.host.ask(files.Request{Op: files.Rename, Path: path, Ino: n.ino, To: name, Mask: files.KeepTarget})
		switch errno {
		case syscall.EEXIST: // a clone of this guest has used the name
			continue
		case 0:
			s.tree.move(n, rootID, name)
			s.tree.hidden(n, true)
		}
		return errno
	}
}

// release handles the close of an open file. After the last close it removes the
// file if only the hidden name is left.
func (s *Server) release(id uint64) {
	n, last := s.tree.closed(id)
	if !last {
		return
	}
	_, _ = s.on(id, files.Request{Op: files.Close}) // if the file is missing, it counts as closed
	if !s.tree.wasRemoved(id) {
		return
	}
	s.tree.order.Lock()
	defer s.tree.order.Unlock()
	path, _, errno := s.tree.where(id)
	if errno == 0 {
		_, _ = s.host.ask(files.Request{Op: files.Remove, Path: path}) // no caller waits for the result
	}
	s.tree.unname(n)
}

func (s *Server) rename(from uint64, name string, to uint64, as string, flags uint32) syscall.Errno {
	if flags&^renameNoRepl != 0 {
		return syscall.EINVAL
	}
	if isHidden(to, as) {
		return syscall.EPERM
	}
	s.tree.order.Lock()
	defer s.tree.order.Unlock()
	r := files.Request{Op: files.Rename}
	var errno syscall.Errno
	if r.Path, errno = s.tree.below(from, name); errno != 0 {
		return errno
	}
	if r.To, errno = s.tree.below(to, as); errno != 0 {
		return errno
	}
	n, was := s.tree.kid(from, name), s.tree.kid(to, as)
	if n != nil {
		r.Ino = n.ino
	}
	if flags&renameNoRepl != 0 {
		r.Mask = files.KeepTarget
	} else if s.tree.isOpen(was) && n != nil && n.ino != was.ino {
		if errno := s.hide(was, r.To); errno != 0 {
			return errno
		}
	}
	if _, errno = s.host.ask(r); errno == 0 {
		s.tree.move(n, to, as)
	}
	return errno
}

func (s *Server) link(q *request, name string) ([]byte, syscall.Errno) {
	s.tree.order.RLock()
	defer s.tree.order.RUnlock()
	r := files.Request{Op: files.Link}
	var errno syscall.Errno
	if r.Path, r.Ino, errno = s.tree.where(q.u64(0)); errno != 0 {
		return nil, errno
	}
	if r.To, errno = s.tree.below(q.node, name); errno != 0 {
		return nil, errno
	}
	a, errno := s.host.ask(r)
	if errno != 0 {
		return nil, errno
	}
	id, errno := s.tree.found(q.node, name, &a.Attr)
	if errno != 0 {
		return nil, errno
	}
	s.invalidate(q.u64(0)) // the kernel has added one to the cached link count, which included the new link already
	return appendEntry(nil, id, &a.Attr, s.owner), 0
}

// handle returns a new number for an open directory.
func (s *Server) handle() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	return s.next
}

// maxList is the maximum number of entries of a directory that the guest can list.
// The entries are in the guest's memory during the listing.
const maxList = 1 << 20

// list returns the next entries of an open directory. It reads the whole directory
// at the first call, so that later removals do not shift the entries.
func (s *Server) list(q *request) ([]byte, syscall.Errno) {
	if !q.need(headOfRead) {
		return nil, syscall.EIO
	}
	handle, at, room := q.u64(0), q.u64(8), int(q.u32(16))
	s.mu.Lock()
	all := s.lists[handle]
	s.mu.Unlock()
	if at == 0 {
		var errno syscall.Errno
		if all, errno = s.entries(q.node); errno != 0 {
			return nil, errno
		}
		s.mu.Lock()
		s.lists[handle] = all
		s.mu.Unlock()
	}
	var b []byte
	for fits := true; at < uint64(len(all)); at++ {
		if b, fits = appendDirent(b, &all[at], at+1, room); !fits {
			break
		}
	}
	return b, 0
}

// entries reads all entries of a directory.
func (s *Server) entries(id uint64) ([]files.Entry, syscall.Errno) {
	all := []files.Entry{{Ino: id, Type: syscall.DT_DIR, Name: "."}, {Ino: id, Type: syscall.DT_DIR, Name: ".."}}
	for at := int64(0); ; {
		a, errno := s.on(id, files.Request{Op: files.List, Off: at})
		if errno != 0 {
			return nil, errno
		}
		part, err := files.ParseEntries(a.Data)
		if err != nil || len(all)+len(part) > maxList {
			return nil, syscall.EIO
		}
		if len(part) == 0 {
			return all, 0
		}
		all = append(all, part...)
		at = part[len(part)-1].Next
	}
}

func (s *Server) closeList(q *request) ([]byte, syscall.Errno) {
	if !q.need(8) {
		return nil, syscall.EIO
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.lists, q.u64(0))
	return nil, 0
}
