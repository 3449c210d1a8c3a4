package shim

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// beat handles the request of the same name: it starts to watch the daemon's
// heartbeat, and starts the watchdog if none runs. It returns the heartbeat's
// memory as a descriptor.
func (s *Shim) beat(context.Context, *shimctl.Request) (shimctl.Answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.watchedLocked(); err != nil {
		s.log.Error("cannot start the watchdog; if the daemon and the shim are killed together, instances stay frozen", "err", err)
	}
	if !s.pulse.Mapped() {
		p, fd, err := shimctl.NewPulse()
		if err != nil {
			return shimctl.Answer{}, err
		}
		s.pulse, s.pulseFD = p, fd
	}
	s.pulse.Arm(true) // armed before watch is woken, because watch ignores a pulse that is not armed
	fd, err := unix.FcntlInt(uintptr(s.pulseFD), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return shimctl.Answer{}, fmt.Errorf("duplicate the heartbeat's descriptor: %w", err)
	}
	s.note()
	return shimctl.Answer{FDs: []int{fd}, Close: true}, nil
}

// disarmLocked stops watching the heartbeat of an earlier daemon. s.mu must be
// held.
func (s *Shim) disarmLocked() {
	if s.pulse.Mapped() {
		s.pulse.Arm(false)
	}
}

// lateWake is how late the shim's own timer may fire. If it fires later, the whole
// machine was busy or suspended, so the shim gives the daemon another beat interval.
const lateWake = 300 * time.Millisecond

// untilSilent returns the time until the daemon counts as silent. It returns false
// while the daemon has nothing frozen.
func (s *Shim) untilSilent() (time.Duration, bool) {
	s.mu.Lock()
	p := s.pulse
	s.mu.Unlock()
	if !p.Mapped() || !p.Armed() {
		return 0, false
	}
	left := shimctl.BeatLimit - p.Age()
	if now := time.Now(); left <= 0 && !s.silentAt.IsZero() && now.Sub(s.silentAt) > lateWake {
		s.silentAt = now.Add(shimctl.BeatEvery)
		return shimctl.BeatEvery, true
	}
	return left, true
}

// hung handles a daemon whose heartbeat has stopped, like one that has ended: it
// thaws everything at once. It closes the daemon's connection, so that the daemon
// adopts its instances again when it continues.
func (s *Shim) hung() {
	s.log.Warn("the daemon has stopped responding", "silent for", s.pulse.Age().Round(time.Millisecond))
	s.mu.Lock()
	s.disarmLocked()
	if s.alone.IsZero() {
		s.alone = time.Now().Add(-s.cfg.Gone)
	}
	s.mu.Unlock()
	s.srv.Drop()
}
