package shimctl

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/unixsock"
)

// envelope is one message, sent as one line.
type envelope struct {
	ID    uint64          `json:"id,omitempty"`
	Verb  string          `json:"verb,omitempty"`
	Body  json.RawMessage `json:"body,omitempty"`
	Error *Error          `json:"error,omitempty"`
	FDs   int             `json:"fds,omitempty"`
}

// parseLine parses one line without its newline.
func parseLine(b []byte) (envelope, error) {
	var e envelope
	if err := json.Unmarshal(b, &e); err != nil {
		return e, fmt.Errorf("cannot read a message: %w", err)
	}
	if e.FDs < 0 || e.FDs > MaxFDs {
		return e, fmt.Errorf("cannot read a message: fds is %d, not between 0 and %d", e.FDs, MaxFDs)
	}
	return e, nil
}

// wire sends and receives messages on a stream socket. Only one goroutine may
// read; any may write.
type wire struct {
	c   *net.UnixConn
	buf []byte
	off int
	fds []int
	oob []byte

	mu sync.Mutex // held while writing
}

func newWire(c *net.UnixConn) *wire { return &wire{c: c, oob: make([]byte, unix.CmsgSpace(4*253))} }

// waitLimit bounds one write to a peer that does not read.
const waitLimit = 10 * time.Second

// write sends a message with descriptors. The caller still owns the descriptors.
func (w *wire) write(e envelope, fds []int) error {
	if len(fds) > MaxFDs {
		return fmt.Errorf("cannot send %d descriptors at once, at most %d", len(fds), MaxFDs)
	}
	e.FDs = len(fds)
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if len(b) >= MaxMessage {
		return fmt.Errorf("cannot send a message of %d bytes, at most %d", len(b), MaxMessage)
	}
	b = append(b, '\n')
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.c.SetWriteDeadline(time.Now().Add(waitLimit)); err != nil {
		return err
	}
	n, _, err := w.c.WriteMsgUnix(b, oob, nil)
	if err == nil && n < len(b) {
		_, err = w.c.Write(b[n:])
	}
	if err != nil {
		w.c.Close() // part of a line was sent, so the stream is unusable
	}
	return err
}

// read returns the next message and its descriptors, which the caller owns.
func (w *wire) read() (envelope, []int, error) {
	for {
		if i := bytes.IndexByte(w.buf[w.off:], '\n'); i >= 0 {
			line := w.buf[w.off : w.off+i]
			e, err := parseLine(line)
			w.off += i + 1
			if w.off == len(w.buf) {
				w.buf, w.off = w.buf[:0], 0
				if cap(w.buf) > 64<<10 {
					w.buf = nil
				}
			}
			if err != nil {
				return e, nil, err
			}
			if e.FDs > len(w.fds) {
				return e, nil, fmt.Errorf("cannot read a message: it announces %d descriptors, %d arrived", e.FDs, len(w.fds))
			}
			fds := append([]int(nil), w.fds[:e.FDs]...)
			w.fds = w.fds[e.FDs:]
			return e, fds, nil
		}
		if err := w.fill(); err != nil {
			return envelope{}, nil, err
		}
	}
}

func (w *wire) fill() error {
	if w.off > 0 {
		w.buf = append(w.buf[:0], w.buf[w.off:]...)
		w.off = 0
	}
	if len(w.buf) > MaxMessage {
		return fmt.Errorf("cannot read a message: more than %d bytes without an end", MaxMessage)
	}
	if cap(w.buf)-len(w.buf) < 4096 {
		w.buf = append(make([]byte, 0, max(2*cap(w.buf), 8192)), w.buf...)
	}
	n, oobn, flags, _, err := w.c.ReadMsgUnix(w.buf[len(w.buf):cap(w.buf)], w.oob)
	if oobn > 0 {
		if err := w.take(w.oob[:oobn]); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	if n == 0 {
		return net.ErrClosed
	}
	w.buf = w.buf[:len(w.buf)+n]
	if flags&unix.MSG_CTRUNC != 0 {
		return errors.New("cannot receive descriptors: some are missing (is the limit of open files reached?)")
	}
	if len(w.fds) > 4*MaxFDs {
		return fmt.Errorf("cannot read a message: %d unexpected descriptors", len(w.fds))
	}
	return nil
}

func (w *wire) take(oob []byte) error {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("cannot take descriptors: %w", err)
	}
	for _, m := range msgs {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fmt.Errorf("cannot take descriptors: %w", err)
		}
		w.fds = append(w.fds, fds...)
	}
	return nil
}

// close ends the stream and closes received descriptors that were not taken. It
// is called by the reader, after its last read.
func (w *wire) close() {
	w.c.Close()
	CloseAll(w.fds)
	w.fds = nil
}

// CloseAll closes descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // the descriptor is released even if close fails
	}
}

// Listen creates the shim's socket with mode 0600. It replaces a socket that an
// earlier shim left, so the caller must make sure that no other shim is running.
func Listen(path string) (*net.UnixListener, error) {
	short, done, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("cannot replace the socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("cannot protect the socket: %w", err)
	}
	return l, nil
}

// shorten returns a name for path that fits into a socket address (107 bytes),
// and a function that releases it.
func shorten(path string) (string, func(), error) {
	if len(path) < 108 {
		return path, func() {}, nil
	}
	fd, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, fmt.Errorf("cannot open %s: %w", filepath.Dir(path), err)
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", fd, filepath.Base(path)), func() { unix.Close(fd) }, nil
}

// trusted returns an error unless the peer runs as this process's user or as
// root.
func trusted(c *net.UnixConn) error {
	p, err := unixsock.PeerOf(c)
	if err != nil {
		return err
	}
	if p.UID != os.Geteuid() && p.UID != 0 {
		return fmt.Errorf("cannot connect to process %d: it belongs to user %d", p.PID, p.UID)
	}
	return nil
}
