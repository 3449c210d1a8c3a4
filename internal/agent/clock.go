package agent

import (
	"time"

	"lull/internal/lib/wall"
)

// steady turns clock readings into a time that follows the wall clock without its
// jumps and continues during a suspend.
type steady struct {
	at0    wall.Reading
	events wall.Detector
}

// noise is the smallest suspend or step that counts.
const noise = 2 * time.Second

func (s *steady) start(r wall.Reading) {
	s.at0 = r
	s.events = wall.Detector{Tolerance: noise}
	s.events.Observe(r)
}

func (s *steady) at(r wall.Reading) time.Time { return s.at0.Wall.Add(r.Since(s.at0)).Round(0) }

// read returns what happened since the previous reading: for how long the machine was
// suspended, and by how much its wall clock was set. From then on, times are in the
// new wall clock, so the caller must shift its stored times by jump.
func (s *steady) read(r wall.Reading) (slept, jump time.Duration) {
	for _, e := range s.events.Observe(r) {
		if e.Kind == wall.Suspended {
			slept += e.By
		} else {
			jump += e.By
		}
	}
	if jump != 0 {
		s.at0 = r
	}
	return slept, jump
}
