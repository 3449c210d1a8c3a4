package guestagent

import (
	"context"

	"lull/internal/protocol/guest"
)

// stream sends a command's output to the host. If the host is slow, the command has
// to wait, as on a pipe whose reader is slow.
type stream struct {
	to     *guest.Peer
	note   guest.OutputNote // output that has not been sent yet
	credit *credit          // nil if the host does not acknowledge output
	live   context.Context  // canceled when the command is
	sent   int
	cut    bool // some output could not be sent
}

// Write implements io.Writer. It never fails. Output that cannot be sent is lost.
func (s *stream) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 && !s.cut && s.credit != nil {
		part := s.credit.take(s.live, min(len(p), guest.MaxOutput))
		s.note.Data = p[:part]
		s.cut = part == 0 || s.to.Notify(guest.Output, s.note) != nil
		s.note.Data = nil
		p = p[part:]
	}
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
