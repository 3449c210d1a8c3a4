package guestagent

import (
	"context"

	"lull/internal/protocol/guest"
)

// stream sends a command's output to the host. A slow host slows down the
// command, as a slow reader of a pipe does.
type stream struct {
	to     *guest.Peer
	note   guest.OutputNote // its data has not been sent yet
	credit *credit          // nil if the host does not acknowledge what it receives
	live   context.Context  // of the command
	sent   int
	cut    bool // some output was lost
}

// Write implements io.Writer. It accepts everything; what cannot be sent is
// lost.
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
