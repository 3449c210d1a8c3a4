// Package share serves the files of one directory, the workspace, to the guest
// of a microVM. It answers the guest's requests (package files) on one
// connection at a time, one after another, as the user who owns the directory;
// a host without root privileges answers as its own user.
//
// Nothing outside the directory is read or changed, whatever the guest
// requests: the kernel resolves every path below the directory, without
// following any symbolic link or entering another file system. A guest may do
// less than the directory's owner: it cannot create devices or setuid files,
// nor write to existing ones. A failed request returns an errno to the guest,
// even while the directory is missing; it is never left unanswered.
//
// The package keeps no state that a guest depends on. It holds at most maxOpen
// files open, and any of them can be closed at any time.
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

	"lull/internal/lib/thread"
	"lull/internal/protocol/guest/files"
)

// Rate limits for a guest's requests and answers together, in bytes per second and
// per burst. Each request also has a fixed cost.
const (
	askRate  = 256 << 20
	askBurst = 32 << 20
	askCost  = 4 << 10
)

// checkInterval is the interval between checks whether the directory still exists,
// while the guest requests nothing.
const checkInterval = time.Second

// Server answers one guest. Create it with New.
type Server struct {
	dir      string
	readOnly bool
	slow     *rate.Limiter
	turn     chan struct{} // held for the connection being served
	written  atomic.Uint64

	mu   sync.Mutex
	open chan struct{} // closed while requests may start
	busy bool          // a request has been started and not answered
	met  bool          // the guest has announced itself on this connection
	conn net.Conn
	lack error // why the directory could not be opened; nil when it is open
}

// New returns a server for dir, which is opened by the first request.
func New(dir string, readOnly bool) *Server {
	s := &Server{dir: dir, readOnly: readOnly, slow: rate.NewLimiter(askRate, askBurst), turn: make(chan struct{}, 1), open: make(chan struct{})}
	close(s.open)
	return s
}

// syncCost is the number of bytes that each sync of a file adds to Written: one
// page.
const syncCost = 4096

// Written returns the bytes that the guest has written to the directory, plus
// one page for each sync.
func (s *Server) Written() uint64 { return s.written.Load() }

// ReadOnly reports whether the directory is read-only for the guest.
func (s *Server) ReadOnly() bool { return s.readOnly }

// Fault returns why every request of the guest fails, for display, or "". It is ""
// before the first connection.
func (s *Server) Fault() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lack == nil {
		return ""
	}
	return s.lack.Error()
}

// Check returns why a directory cannot be shared, or nil.
func Check(dir string) error {
	r, err := openRoot(dir)
	if err != nil {
		return err
	}
	return r.close()
}

// Hold stops starting requests until Release. A request in progress completes.
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

// Pending describes a request that has arrived and has not been answered, or
// returns "".
func (s *Server) Pending() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy || waits(s.conn) {
		return "it waits for a file of its workspace"
	}
	return ""
}

// Met reports whether the guest has announced itself on the present connection.
// Until then it may still wait for an answer from an earlier connection.
func (s *Server) Met() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.met
}

// waits reports whether data can be read from a connection.
func waits(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	n := 0
	if err == nil {
		_ = raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // 0 for a closed one
	}
	return n > 0
}

// Serve answers requests on c until c or ctx ends, and closes c. It begins once no
// request of the previous connection is in progress, so that a request that hung
// cannot take effect after later ones. It calls ready before it reads anything.
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
	go func() { // serve may block in the kernel for a long time; the next connection waits for it
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

// serve answers requests on c. It must run on its own thread, which becomes the
// directory's owner once the directory exists.
func (s *Server) serve(ctx context.Context, c net.Conn, k files.Key) (err error) {
	root, _ := s.enter(nil)
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
				root, _ = s.enter(root)
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
			return nil // the guest repeats the request
		}
		var lack error
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
			return nil // end this thread, whose owner is that of the old directory; the guest repeats the request to a new one
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

// enter opens the directory and makes this thread act as its owner. If r already is
// that directory, it returns r. It fails if the directory is missing.
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

// read waits for data from the guest. If look is set it waits only briefly, so that
// the directory can be checked.
func (s *Server) read(c net.Conn, buf []byte, look bool) (int, error) {
	var until time.Time
	if look {
		until = time.Now().Add(checkInterval)
	}
	if err := c.SetReadDeadline(until); err != nil {
		return 0, err
	}
	return c.Read(buf)
}

// admit waits until a request with this cost may start.
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

// answer executes a request, or answers it with err if err is not nil.
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

// openRoot opens a directory to be shared.
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
		return nil, errors.Join(fmt.Errorf("cannot use workspace %s: the kernel has no openat2 (Linux 5.6) to keep paths inside it", dir), r.close())
	}
	return r, nil
}
