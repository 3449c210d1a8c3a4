package shim

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// beat starts watching the daemon's heartbeat, and makes sure that something
// watches this shim.
func (s *Shim) beat(context.Context, *shimctl.Request) (shimctl.Answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.watchedLocked(); err != nil {
		s.log.Error("no watchdog; killing the daemon and the shim together would leave instances frozen", "err", err)
	}
	if !s.pulse.Mapped() {
		p, fd, err := shimctl.NewPulse()
		if err != nil {
			return shimctl.Answer{}, err
		}
		s.pulse, s.pulseFD = p, fd
	}
	s.pulse.Arm(true) // before watch is woken, which checks only an armed pulse
	fd, err := unix.FcntlInt(uintptr(s.pulseFD), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return shimctl.Answer{}, fmt.Errorf("pass the heartbeat's memory: %w", err)
	}
	s.note()
	return shimctl.Answer{FDs: []int{fd}, Close: true}, nil
}

// disarmLocked forgets the heartbeat of an earlier daemon. The caller holds mu.
func (s *Shim) disarmLocked() {
	if s.pulse.Mapped() {
		s.pulse.Arm(false)
	}
}

// lateWake is how late the shim itself may wake before it gives the daemon
// another chance. A later wake means that the whole machine was busy or
// suspended, not only the daemon.
const lateWake = 300 * time.Millisecond

// untilSilent returns how long until the daemon counts as silent; false while
// it has nothing frozen.
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

// hung treats a daemon whose heartbeat stopped like one that is gone:
// everything is thawed at once. Its connection ends, so that it adopts its
// instances when it runs again.
func (s *Shim) hung() {
	s.log.Warn("the daemon does not run", "silent for", s.pulse.Age().Round(time.Millisecond))
	s.mu.Lock()
	s.disarmLocked()
	if s.alone.IsZero() {
		s.alone = time.Now().Add(-s.cfg.Gone)
	}
	s.mu.Unlock()
	s.srv.Drop()
}
