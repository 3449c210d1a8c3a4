package harness

import (
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/link/guest"
)

// stream carries what a command prints to the host. A host that is slow makes
// the command wait, as a slow reader of a pipe does.
type stream struct {
	to   *guest.Peer
	note guest.OutputNote // its data is what was not sent yet
	sent int
	cut  bool // some of it is lost
}

// readFrom reads to the end of f, or until its deadline and then what lies in
// the pipe: to send what was read before may have taken longer.
func (s *stream) readFrom(f *os.File) {
	if _, err := io.Copy(s, f); err == nil {
		return
	}
	left := 0
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { left, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // none where it does not say
	}
	if err := f.SetReadDeadline(time.Now().Add(lastWords)); err == nil {
		_, _ = io.CopyN(s, f, int64(left)) // what lies there is read at once
	}
}

// Write implements io.Writer. It takes everything; what cannot be carried is
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
