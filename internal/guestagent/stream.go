package guestagent

import (
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/guest"
)

// stream sends a command's output to the host. A slow host slows down the
// command, as a slow reader of a pipe does.
type stream struct {
	to   *guest.Peer
	note guest.OutputNote // its data has not been sent yet
	sent int
	cut  bool // some output was lost
}

// readFrom reads f to its end or its deadline. After the deadline it still
// reads what is in the pipe, because sending may have taken longer.
func (s *stream) readFrom(f *os.File) {
	if _, err := io.Copy(s, f); err == nil {
		return
	}
	left := 0
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { left, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // 0 if unsupported
	}
	if err := f.SetReadDeadline(time.Now().Add(lastWords)); err == nil {
		_, _ = io.CopyN(s, f, int64(left)) // available without blocking
	}
}

// Write implements io.Writer. It accepts everything; what cannot be sent is
// lost.
func (s *stream) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 && !s.cut {
		if len(s.note.Data) == guest.MaxOutput {
			s.flush()
			continue
		}
		part := p[:min(len(p), guest.MaxOutput-len(s.note.Data))]
		s.note.Data = append(s.note.Data, part...)
		p = p[len(part):]
	}
	return n, nil
}

func (s *stream) flush() {
	if s.note.Number == 0 || s.sent+len(s.note.Data) > guest.MaxPrinted || s.to.Notify(guest.Output, s.note) != nil {
		s.cut = true
		return
	}
	s.sent += len(s.note.Data)
	s.note.Data = s.note.Data[:0]
}
