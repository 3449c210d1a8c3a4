// Package alarm waits for times with the kernel's timers.
//
// A timer of Go costs more: each time it fires, the runtime's monitor wakes too,
// and setting it wakes another thread of the runtime. A process that is woken
// often for very little work should use an alarm instead. An alarm has one open
// file.
package alarm

import (
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Alarm waits for a time. Create it with New. Set and Close may be called from
// any goroutine at any time, Wait from only one.
type Alarm struct {
	file *os.File
	conn syscall.RawConn
}

// New returns an alarm with no time set.
func New() (*Alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("cannot create a timer: %w", os.NewSyscallError("timerfd_create", err))
	}
	a := &Alarm{file: os.NewFile(uintptr(fd), "timerfd")}
	if a.conn, err = a.file.SyscallConn(); err != nil {
		a.file.Close()
		return nil, fmt.Errorf("cannot create a timer: %w", err)
	}
	return a, nil
}

// Set replaces the time of the alarm. The zero time means never. A time in the
// past is due at once.
func (a *Alarm) Set(at time.Time) {
	var spec unix.ItimerSpec
	if !at.IsZero() {
		spec.Value = unix.NsecToTimespec(max(int64(time.Until(at)), 1))
	}
	a.set(&spec)
}

// Every replaces the time with each multiple of d from now on.
func (a *Alarm) Every(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	a.set(&unix.ItimerSpec{Interval: t, Value: t})
}

func (a *Alarm) set(spec *unix.ItimerSpec) {
	// The call fails only if the alarm is closed.
	_ = a.conn.Control(func(fd uintptr) {
		_, _, _ = unix.RawSyscall6(unix.SYS_TIMERFD_SETTIME, fd, 0, uintptr(unsafe.Pointer(spec)), 0, 0, 0)
	})
}

// Wait returns when the time has come, or when the alarm is closed: once for each
// Set, and after Every once for all multiples that have passed. If Set replaces the
// time just as it comes, Wait may return early.
func (a *Alarm) Wait() {
	var count [8]byte
	_ = a.conn.Read(func(fd uintptr) bool {
		_, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&count[0])), uintptr(len(count)))
		return errno != unix.EAGAIN
	})
}

// Close ends the present and every later Wait, and frees the timer.
func (a *Alarm) Close() { _ = a.file.Close() }
