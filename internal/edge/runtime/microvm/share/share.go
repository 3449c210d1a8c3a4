// Package share gives the guest of a microVM the files of one directory: its
// workspace. It answers what the guest asks (package files) on one connection
// at a time, one request after the other, as the user who owns the directory;
// a host that is not root's answers as its own user.
//
// It guarantees that nothing outside the directory is read or changed, whatever
// the guest asks: every path is resolved by the kernel below the directory,
// without following any symbolic link and without going into another file
// system. A guest can do what the directory's owner can, and less: it makes no
// device, no setuid file, and writes to none. A request that fails is an errno
// for the guest, never silence, also while there is no directory.
//
// It keeps nothing that a guest depends on. The files that it holds open are at
// most maxOpen and can be closed at any time.
package share

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"lull/internal/base/thread"
	"lull/internal/link/guest/files"
)

// How fast a guest may ask: bytes per second, and at once, of requests and
// answers together, each of which counts for some more.
const (
	askRate  = 256 << 20
	askBurst = 32 << 20
	askCost  = 4 << 10
)

// lookAgain is the time between two looks for a directory that is not there,
// while the guest asks for nothing.
const lookAgain = time.Second

// Server answers one guest. Make it with New.
type Server struct {
	dir      string
	readOnly bool
	slow     *rate.Limiter
	turn     chan struct{} // held by the connection that is served
	written  atomic.Uint64

	mu   sync.Mutex
	open chan struct{} // closed while requests are begun
	busy bool          // a request was begun and its answer is not out
	met  bool          // the guest has repeated on this connection what it waits for
	conn net.Conn
	lack error // why the directory could not be opened; nil when it is
}

// New answers for dir, which it opens when it is first asked for.
func New(dir string, readOnly bool) *Server {
	s := &Server{dir: dir, readOnly: readOnly, slow: rate.NewLimiter(askRate, askBurst), turn: make(chan struct{}, 1), open: make(chan struct{})}
	close(s.open)
	return s
}

// syncCost is what a file that is made durable counts for in Written: a page.
const syncCost = 4096

// Written is how many bytes the guest has written to the directory, with a page
// for each file that it made durable.
func (s *Server) Written() uint64 { return s.written.Load() }

// ReadOnly says whether the guest may change nothing.
func (s *Server) ReadOnly() bool { return s.readOnly }

// Fault says why every request of the guest fails, for people. It is empty for
// nothing, and before the first connection.
func (s *Server) Fault() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lack == nil {
		return ""
	}
	return s.lack.Error()
}

// Check says why a directory cannot be shared.
func Check(dir string) error {
	r, err := openRoot(dir)
	if err != nil {
		return err
	}
	return r.close()
}

// Hold begins no request from now on, until Release. One that was begun is
// served to its end.
func (s *Server) Hold() {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.open:
		s.open = make(chan struct{})
	default:
	}
}

// Release undoes Hold.
func (s *Server) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.open:
	default:
		close(s.open)
	}
}

// Pending is what of the guest's is in hand: a request that has arrived and was
// not answered. It is empty for nothing.
func (s *Server) Pending() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy || waits(s.conn) {
		return "it waits for a file of its workspace"
	}
	return ""
}

// Met reports whether the guest has announced itself on the present connection.
// Until then it may wait for the answer to a request of an earlier one.
func (s *Server) Met() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.met
}

// waits says whether something can be read from a connection.
func waits(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	n := 0
	if err == nil {
		_ = raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // of a closed one n is 0
	}
	return n > 0
}

// Serve answers on c until it ends or ctx does, and closes it. It begins once
// the connection before it has none of its requests under way any more: one
// that hung must not come after those of the next. ready is called when it has
// begun, before anything is read.
func (s *Server) Serve(ctx context.Context, c net.Conn, k files.Key, ready func() error) error {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := ready(); err != nil {
		<-s.turn
		return err
	}
	s.set(c, false)
	done := make(chan error, 1)
	go func() { // it may be in the kernel for long; who waits for it is the next connection
		defer func() {
			s.set(nil, false)
			<-s.turn
		}()
		thread.Own(func() { done <- s.serve(ctx, c, k) })
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return nil
	}
}

func (s *Server) set(c net.Conn, busy bool) {
	s.mu.Lock()
	s.conn, s.busy = c, busy
	s.met = s.met && c != nil
	s.mu.Unlock()
}

// meet notes that the guest has announced itself.
func (s *Server) meet() {
	s.mu.Lock()
	s.met = true
	s.mu.Unlock()
}

// serve owns its thread, which is the directory's owner from when that is there.
func (s *Server) serve(ctx context.Context, c net.Conn, k files.Key) (err error) {
	root, lack := s.enter(nil)
	defer func() {
		if root != nil {
			err = errors.Join(err, root.close())
		}
	}()
	var in files.Stream
	in.Reset(k)
	buf, out := make([]byte, 64<<10), []byte(nil)
	for {
		body, err := in.Next()
		if err != nil {
			return err
		}
		if body == nil {
			s.set(c, in.Begun())
			n, err := s.read(c, buf, root == nil)
			if n > 0 {
				in.Feed(buf[:n])
				continue
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				root, lack = s.enter(root)
				continue
			}
			if err == nil || errors.Is(err, io.EOF) || ctx.Err() != nil {
				return nil
			}
			return err
		}
		s.set(c, true)
		q, err := files.ParseRequest(body)
		if err != nil {
			return err
		}
		if q.ID == files.HelloID {
			s.meet()
		}
		if err := s.admit(ctx, askCost+len(body)+int(q.Size)); err != nil {
			return nil // the guest asks again
		}
		root, lack = s.enter(root)
		a := root.answer(&q, lack)
		switch {
		case a.Errno != 0:
		case q.Op == files.Write:
			s.written.Add(uint64(len(q.Data)))
		case q.Op == files.Sync:
			s.written.Add(syncCost)
		}
		if a.Errno == uint32(unix.ENOENT) && root != nil && root.removed() {
			return nil // the guest asks again, of a thread that is nobody yet and can open what has taken its place
		}
		out = files.AppendAnswer(out[:0], k, &a)
		if _, err := c.Write(out); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("cannot answer the guest: %w", err)
		}
	}
}

// enter opens the directory and makes this thread its owner, unless r is it
// already. Without one it says why.
func (s *Server) enter(r *root) (*root, error) {
	if r != nil {
		return r, nil
	}
	r, err := openRoot(s.dir)
	if err == nil {
		r.readOnly = s.readOnly
		if err = r.become(); err != nil {
			err = errors.Join(err, r.close())
			r = nil
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lack = err
	return r, err
}

// read waits for more of the guest, not long where the directory is to be looked
// for meanwhile.
func (s *Server) read(c net.Conn, buf []byte, look bool) (int, error) {
	var until time.Time
	if look {
		until = time.Now().Add(lookAgain)
	}
	if err := c.SetReadDeadline(until); err != nil {
		return 0, err
	}
	return c.Read(buf)
}

// admit waits until a request may be begun.
func (s *Server) admit(ctx context.Context, cost int) error {
	if err := s.slow.WaitN(ctx, cost); err != nil {
		return err
	}
	for {
		s.mu.Lock()
		open := s.open
		s.mu.Unlock()
		select {
		case <-open:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// answer does what is asked, unless it is known why that cannot be.
func (r *root) answer(q *files.Request, err error) files.Answer {
	a := files.Answer{ID: q.ID}
	if err == nil {
		err = r.do(q, &a)
	}
	if err == nil {
		return a
	}
	errno := unix.EIO
	var no syscall.Errno
	if errors.As(err, &no) && no != 0 {
		errno = no
	}
	return files.Answer{ID: q.ID, Errno: uint32(errno)}
}

// openRoot opens a directory that is to be shared.
func openRoot(dir string) (*root, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot use workspace %s: %w", dir, err)
	}
	r := &root{fd: fd, files: map[uint64]*held{}}
	if err := unix.Fstat(fd, &r.st); err != nil {
		return nil, errors.Join(fmt.Errorf("cannot use workspace %s: %w", dir, err), r.close())
	}
	if _, err := unix.Openat2(fd, ".", &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: resolve}); err == unix.ENOSYS {
		return nil, errors.Join(fmt.Errorf("cannot use workspace %s: the kernel cannot keep a path below it (openat2, Linux 5.6)", dir), r.close())
	}
	return r, nil
}
