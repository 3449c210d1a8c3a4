package shimctl

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// VerbBeat asks the shim to watch the daemon's heartbeat. The answer carries the
// descriptor of a Pulse.
const VerbBeat = "beat"

// Times of the heartbeat. A daemon without a heartbeat for BeatLimit is not
// running, or is too slow to be of use.
const (
	BeatEvery = 600 * time.Millisecond
	BeatLimit = 1600 * time.Millisecond
)

// Pulse is memory shared by the daemon and the shim. It contains whether the
// daemon has anything frozen, and when the daemon last ran. A beat makes one short
// system call.
type Pulse struct{ words *[2]atomic.Int64 }

const pulseSize = 4096

// NewPulse creates a Pulse. The caller owns the returned descriptor of its
// memory.
func NewPulse() (Pulse, int, error) {
	fd, err := unix.MemfdCreate("lull-pulse", unix.MFD_CLOEXEC)
	if err != nil {
		return Pulse{}, -1, fmt.Errorf("make the heartbeat's memory: %w", err)
	}
	if err = unix.Ftruncate(fd, pulseSize); err == nil {
		var p Pulse
		if p, err = OpenPulse(fd); err == nil {
			return p, fd, nil
		}
	}
	unix.Close(fd)
	return Pulse{}, -1, fmt.Errorf("make the heartbeat's memory: %w", err)
}

// OpenPulse maps the memory behind fd. The caller still owns fd.
func OpenPulse(fd int) (Pulse, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Pulse{}, fmt.Errorf("map the heartbeat's memory: %w", err)
	}
	if st.Size < pulseSize { // access beyond its end would kill this process
		return Pulse{}, fmt.Errorf("map the heartbeat's memory: it has %d bytes", st.Size)
	}
	b, err := unix.Mmap(fd, 0, pulseSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return Pulse{}, fmt.Errorf("map the heartbeat's memory: %w", err)
	}
	return Pulse{(*[2]atomic.Int64)(unsafe.Pointer(&b[0]))}, nil
}

// Close unmaps the memory. p must not be used afterwards.
func (p Pulse) Close() {
	if p.words != nil {
		_ = unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(p.words)), pulseSize))
	}
}

// Mapped reports whether p has memory.
func (p Pulse) Mapped() bool { return p.words != nil }

// monotonic returns CLOCK_MONOTONIC, which stops while the machine is suspended. It
// bypasses the runtime of Go, whose monitor would otherwise wake for each beat.
func monotonic() int64 {
	var t unix.Timespec
	_, _, _ = unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&t)), 0)
	return t.Nano()
}

// Beat records that the daemon runs.
func (p Pulse) Beat() { p.words[1].Store(monotonic()) }

// Arm sets whether the daemon has anything frozen.
func (p Pulse) Arm(on bool) {
	if on {
		p.Beat()
		p.words[0].Store(1)
		return
	}
	p.words[0].Store(0)
}

// Armed reports whether the daemon has something frozen.
func (p Pulse) Armed() bool { return p.words[0].Load() != 0 }

// Age returns the time since the daemon's last beat.
func (p Pulse) Age() time.Duration { return time.Duration(monotonic() - p.words[1].Load()) }

// Beat makes the shim watch this daemon's heartbeat. It returns the descriptor of
// the Pulse to beat in, which the caller owns.
func (c *Client) Beat(ctx context.Context) (int, error) {
	fds, err := c.exchange(ctx, VerbBeat, struct{}{}, nil, nil)
	if err == nil && len(fds) != 1 {
		err = fmt.Errorf("watch the heartbeat: got %d descriptors, want one", len(fds))
	}
	if err != nil {
		CloseAll(fds)
		return -1, err
	}
	return fds[0], nil
}

// Drop closes the connection to the daemon, if there is one.
func (s *Server) Drop() {
	s.mu.Lock()
	n := s.now
	s.mu.Unlock()
	if n != nil {
		n.w.c.Close()
	}
}
