package share

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/guest/files"
)

// maxOpen limits the files held open for a guest.
const maxOpen = 64

// resolve keeps the lookup of a guest's path below the directory, on one file
// system and without symbolic links.
const resolve = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// special are the mode bits that a guest must not set: setuid, setgid and sticky.
const special = unix.S_ISUID | unix.S_ISGID | unix.S_ISVTX

// root is an open shared directory. Only one thread may use it.
type root struct {
	fd       int
	st       unix.Stat_t
	readOnly bool
	files    map[uint64]*held // by inode
	clock    uint64           // counts uses
	list     []byte           // buffer for directory entries
}

// held is an open file.
type held struct {
	fd       int
	writable bool
	used     uint64
}

func (r *root) close() error {
	errs := []error{unix.Close(r.fd)}
	for ino := range r.files {
		errs = append(errs, r.drop(ino))
	}
	return errors.Join(errs...)
}

// removed reports whether the directory has been deleted.
func (r *root) removed() bool {
	var st unix.Stat_t
	return unix.Fstat(r.fd, &st) == nil && st.Nlink == 0
}

// do executes one request and fills in the answer. Every error wraps an errno.
func (r *root) do(q *files.Request, a *files.Answer) error {
	if r.readOnly && changes(q) {
		return unix.EROFS
	}
	switch q.Op {
	case files.Stat:
		return r.attr(q.Path, q.Ino, &a.Attr)
	case files.Change:
		return r.change(q, a)
	case files.ReadLink:
		return r.readLink(q, a)
	case files.Symlink:
		return r.symlink(q, a)
	case files.Mkdir:
		return r.mkdir(q, a)
	case files.Remove, files.RemoveDir:
		return r.remove(q)
	case files.Rename:
		return r.rename(q)
	case files.Link:
		return r.link(q, a)
	case files.Create:
		return r.create(q, a)
	case files.Open:
		_, err := r.file(q.Path, q.Ino, q.Mask&files.ForWriting != 0, false)
		return err
	case files.Read:
		return r.read(q, a)
	case files.Write:
		return r.write(q, a)
	case files.Sync:
		return r.sync(q)
	case files.List:
		return r.entries(q, a)
	case files.Space:
		return r.space(a)
	case files.Close:
		return r.drop(q.Ino)
	}
	return unix.ENOSYS
}

// changes reports whether a request would modify anything.
func changes(q *files.Request) bool {
	switch q.Op {
	case files.Change, files.Symlink, files.Mkdir, files.Remove, files.RemoveDir, files.Rename, files.Link, files.Create, files.Write:
		return true
	case files.Open:
		return q.Mask&files.ForWriting != 0
	}
	return false
}

// at opens a path with O_PATH: devices and pipes are not touched and symbolic
// links are not followed.
func (r *root) at(path string) (int, error) {
	if path == "" {
		path = "."
	}
	return unix.Openat2(r.fd, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: resolve})
}

// parent opens the directory of a path and returns the last element.
func (r *root) parent(path string) (fd int, name string, err error) {
	if path == "" {
		return -1, "", unix.EBUSY
	}
	dir, name := "", path
	if n := strings.LastIndexByte(path, '/'); n >= 0 {
		dir, name = path[:n], path[n+1:]
	}
	fd, err = r.at(dir)
	return fd, name, err
}

// in calls do with the directory of a path.
func (r *root) in(path string, do func(dir int, name string) error) error {
	fd, name, err := r.parent(path)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return do(fd, name)
}

// stat opens a path and fills in st. It fails unless the file has the inode number
// ino.
func (r *root) stat(path string, ino uint64, st *unix.Stat_t) (fd int, err error) {
	fd, err = r.at(path)
	if err != nil {
		return -1, err
	}
	if err = unix.Fstat(fd, st); err == nil && ino != 0 && r.inode(st) != ino {
		err = unix.ESTALE
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// attr fills in the attributes of a path, which must have the inode number ino.
func (r *root) attr(path string, ino uint64, out *files.Attr) error {
	var st unix.Stat_t
	fd, err := r.stat(path, ino, &st)
	if err != nil {
		return err
	}
	r.fill(out, &st)
	return unix.Close(fd)
}

// inode returns a unique inode number: a file system may span several devices that
// use the same numbers.
func (r *root) inode(st *unix.Stat_t) uint64 { return st.Ino ^ (st.Dev^r.st.Dev)*0x9E3779B97F4A7C15 }

func (r *root) fill(a *files.Attr, st *unix.Stat_t) {
	*a = files.Attr{Ino: r.inode(st), Size: st.Size, Blocks: st.Blocks, Mode: st.Mode, Links: uint32(st.Nlink),
		Atime: st.Atim.Nano(), Mtime: st.Mtim.Nano(), Ctime: st.Ctim.Nano()}
}

// self returns a path by which an open file can be reopened.
func self(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// file opens a regular file, or returns it if it is already open. before is set if
// the guest had opened the file earlier; then a later change of its mode does not
// matter, because the directory's owner could change the mode back.
func (r *root) file(path string, ino uint64, write, before bool) (int, error) {
	if h := r.files[ino]; h != nil && (h.writable || !write) && before {
		r.clock++
		h.used = r.clock
		return h.fd, nil
	}
	var st unix.Stat_t
	at, err := r.stat(path, ino, &st)
	if err != nil {
		return -1, err
	}
	defer unix.Close(at)
	switch {
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return -1, unix.EISDIR
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return -1, unix.EPERM
	case write && st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0: // a write by root would not clear these bits
		return -1, unix.EPERM
	}
	flags := unix.O_RDONLY
	if write {
		flags = unix.O_RDWR
	}
	fd, err := unix.Open(self(at), flags|unix.O_CLOEXEC, 0)
	if err == unix.EACCES && write && !before { // the file can be written but not read
		fd, err = unix.Open(self(at), unix.O_WRONLY|unix.O_CLOEXEC, 0)
	}
	if err == unix.EACCES && before && unix.Chmod(self(at), st.Mode&0o7777|0o600) == nil {
		fd, err = unix.Open(self(at), flags|unix.O_CLOEXEC, 0)
		if cerr := unix.Chmod(self(at), st.Mode&0o7777); err == nil && cerr != nil {
			err = errors.Join(cerr, unix.Close(fd))
		}
	}
	if err != nil {
		return -1, err
	}
	r.hold(r.inode(&st), fd, write)
	return fd, nil
}

// hold keeps an open file for later requests, and closes the least recently used
// one if there are too many.
func (r *root) hold(ino uint64, fd int, writable bool) {
	_ = r.drop(ino) // earlier writes have already reported errors
	if len(r.files) >= maxOpen {
		oldest, at := uint64(0), ^uint64(0)
		for i, h := range r.files {
			if h.used < at {
				oldest, at = i, h.used
			}
		}
		_ = r.drop(oldest)
	}
	r.clock++
	r.files[ino] = &held{fd: fd, writable: writable, used: r.clock}
}

func (r *root) drop(ino uint64) error {
	h := r.files[ino]
	if h == nil {
		return nil
	}
	delete(r.files, ino)
	return unix.Close(h.fd)
}

func (r *root) read(q *files.Request, a *files.Answer) error {
	fd, err := r.file(q.Path, q.Ino, false, true)
	if err != nil {
		return err
	}
	a.Data = make([]byte, q.Size)
	n, err := unix.Pread(fd, a.Data, q.Off)
	if err == unix.EBADF { // the file was opened for writing only
		_ = r.drop(q.Ino)
		if fd, err = r.file(q.Path, q.Ino, false, true); err != nil {
			return err
		}
		n, err = unix.Pread(fd, a.Data, q.Off)
	}
	if err != nil {
		return err
	}
	a.Data = a.Data[:n]
	return nil
}

func (r *root) write(q *files.Request, a *files.Answer) error {
	fd, err := r.file(q.Path, q.Ino, true, true)
	if err != nil {
		return err
	}
	for done := 0; done < len(q.Data); {
		n, err := unix.Pwrite(fd, q.Data[done:], q.Off+int64(done))
		if err != nil {
			return err
		}
		done += n
	}
	a.Attr.Size = int64(len(q.Data))
	return nil
}

// sync makes a file or directory durable.
func (r *root) sync(q *files.Request) error {
	if h := r.files[q.Ino]; h != nil {
		return unix.Fsync(h.fd)
	}
	var st unix.Stat_t
	at, err := r.stat(q.Path, q.Ino, &st)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		fd, err := r.file(q.Path, q.Ino, false, true)
		if err != nil {
			return err
		}
		return unix.Fsync(fd)
	}
	fd, err := unix.Open(self(at), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsync(fd)
}

func (r *root) change(q *files.Request, a *files.Answer) error {
	var st unix.Stat_t
	at, err := r.stat(q.Path, q.Ino, &st)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	link := st.Mode&unix.S_IFMT == unix.S_IFLNK
	if q.Mask&files.SetMode != 0 {
		if link || q.Mode&special&^st.Mode != 0 {
			return unix.EPERM
		}
		if err := unix.Chmod(self(at), q.Mode&0o777|st.Mode&special); err != nil {
			return err
		}
	}
	if q.Mask&files.SetSize != 0 {
		h := r.files[q.Ino]
		fd, err := r.file(q.Path, q.Ino, true, h != nil && h.writable)
		if err != nil {
			return err
		}
		if err := unix.Ftruncate(fd, q.Off); err != nil {
			return err
		}
	}
	if err := setTimes(at, q); err != nil {
		return err
	}
	if err := unix.Fstat(at, &st); err != nil {
		return err
	}
	r.fill(&a.Attr, &st)
	return nil
}

func setTimes(at int, q *files.Request) error {
	one := func(set, now uint32, ns int64) unix.Timespec {
		switch {
		case q.Mask&now != 0:
			return unix.Timespec{Nsec: unix.UTIME_NOW}
		case q.Mask&set != 0:
			return unix.NsecToTimespec(ns)
		}
		return unix.Timespec{Nsec: unix.UTIME_OMIT}
	}
	if q.Mask&(files.SetAtime|files.SetMtime|files.SetAtimeNow|files.SetMtimeNow) == 0 {
		return nil
	}
	ts := []unix.Timespec{one(files.SetAtime, files.SetAtimeNow, q.Atime), one(files.SetMtime, files.SetMtimeNow, q.Mtime)}
	return unix.UtimesNanoAt(at, "", ts, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
}

func (r *root) readLink(q *files.Request, a *files.Answer) error {
	return r.in(q.Path, func(dir int, name string) error {
		b := make([]byte, files.MaxPath+1)
		n, err := unix.Readlinkat(dir, name, b)
		a.Data = b[:max(n, 0)]
		return err
	})
}

// done decides whether a repeated request that failed with EEXIST has succeeded
// earlier: is reports whether the existing file is the wanted one. On success it
// fills in the file's attributes.
func (r *root) done(q *files.Request, err error, path string, a *files.Answer, is func(*files.Attr) bool) error {
	if err == nil || q.Again && err == unix.EEXIST {
		var now files.Attr
		if aerr := r.attr(path, 0, &now); aerr != nil {
			return aerr
		}
		if err == nil || is(&now) {
			a.Attr = now
			return nil
		}
	}
	return err
}

func (r *root) symlink(q *files.Request, a *files.Answer) error {
	err := r.in(q.Path, func(dir int, name string) error { return unix.Symlinkat(q.To, dir, name) })
	return r.done(q, err, q.Path, a, func(*files.Attr) bool {
		var there files.Answer
		return r.readLink(q, &there) == nil && string(there.Data) == q.To
	})
}

func (r *root) mkdir(q *files.Request, a *files.Answer) error {
	if q.Mode&special != 0 {
		return unix.EPERM
	}
	err := r.in(q.Path, func(dir int, name string) error { return unix.Mkdirat(dir, name, q.Mode&0o777) })
	return r.done(q, err, q.Path, a, func(at *files.Attr) bool { return at.Mode&unix.S_IFMT == unix.S_IFDIR })
}

func (r *root) remove(q *files.Request) error {
	flag := 0
	if q.Op == files.RemoveDir {
		flag = unix.AT_REMOVEDIR
	}
	err := r.in(q.Path, func(dir int, name string) error { return unix.Unlinkat(dir, name, flag) })
	if err == unix.ENOENT && q.Again {
		return nil
	}
	return err
}

func (r *root) rename(q *files.Request) error {
	flags := uint(0)
	if q.Mask&files.KeepTarget != 0 {
		flags = unix.RENAME_NOREPLACE
	}
	err := r.in(q.Path, func(from int, name string) error {
		return r.in(q.To, func(to int, as string) error { return unix.Renameat2(from, name, to, as, flags) })
	})
	if q.Again && q.Ino != 0 && (err == unix.ENOENT || err == unix.EEXIST) {
		var now files.Attr
		if r.attr(q.To, 0, &now) == nil && now.Ino == q.Ino {
			return nil
		}
	}
	return err
}

func (r *root) link(q *files.Request, a *files.Answer) error {
	err := r.in(q.Path, func(from int, name string) error {
		return r.in(q.To, func(to int, as string) error { return unix.Linkat(from, name, to, as, 0) })
	})
	return r.done(q, err, q.To, a, func(at *files.Attr) bool { return at.Ino == q.Ino })
}

func (r *root) create(q *files.Request, a *files.Answer) error {
	if q.Mode&special != 0 {
		return unix.EPERM
	}
	var fd int
	err := r.in(q.Path, func(dir int, name string) (err error) {
		fd, err = unix.Openat(dir, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, q.Mode&0o777)
		return err
	})
	if err != nil {
		return r.done(q, err, q.Path, a, func(at *files.Attr) bool { return at.Mode&unix.S_IFMT == unix.S_IFREG && at.Size == 0 })
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	r.hold(r.inode(&st), fd, true)
	r.fill(&a.Attr, &st)
	return nil
}

// entries lists a directory from the kernel's cursor in q, as many entries as fit.
func (r *root) entries(q *files.Request, a *files.Answer) error {
	var st unix.Stat_t
	at, err := r.stat(q.Path, q.Ino, &st)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	fd, err := unix.Open(self(at), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if _, err := unix.Seek(fd, q.Off, 0); err != nil {
		return err
	}
	if r.list == nil {
		r.list = make([]byte, 32<<10) // an entry is larger here than in a response
	}
	for len(a.Data) == 0 { // a batch may contain only names that are hidden from the guest
		n, err := unix.Getdents(fd, r.list)
		if err != nil || n <= 0 {
			return err
		}
		for b := r.list[:n]; len(b) > 0; {
			e, size, ok := entry(b)
			if !ok {
				return unix.EIO
			}
			b = b[size:]
			if e.Name != "." && e.Name != ".." && (q.Path != "" || !strings.HasPrefix(e.Name, files.Hidden)) {
				a.Data = files.AppendEntry(a.Data, e)
			}
		}
	}
	return nil
}

// entry parses the first entry of b, which is in the kernel's format.
func entry(b []byte) (e files.Entry, size int, ok bool) {
	const head = 19
	if len(b) < head {
		return e, 0, false
	}
	size = int(binary.NativeEndian.Uint16(b[16:]))
	if size < head || size > len(b) {
		return e, 0, false
	}
	name, _, _ := bytes.Cut(b[head:size], []byte{0})
	return files.Entry{Ino: binary.NativeEndian.Uint64(b), Next: int64(binary.NativeEndian.Uint64(b[8:])), Type: b[18], Name: string(name)},
		size, len(name) <= files.MaxName
}

func (r *root) space(a *files.Answer) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(r.fd, &st); err != nil {
		return err
	}
	const unit = 4096
	scale := func(n uint64) int64 { return int64(n * uint64(st.Bsize) / unit) }
	a.Attr.Size, a.Attr.Blocks = scale(st.Blocks), scale(st.Bavail)
	a.Attr.Ino = st.Ffree
	return nil
}
