package wall

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// OnStep calls f each time the wall clock is set, and after each suspend of the
// machine, until ctx ends; then it returns nil. It returns an error if the kernel
// cannot report this.
func OnStep(ctx context.Context, f func()) error {
	fd, err := unix.TimerfdCreate(unix.CLOCK_REALTIME, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("cannot watch the clock: %w", err)
	}
	timer := os.NewFile(uintptr(fd), "timerfd")
	defer timer.Close()
	defer context.AfterFunc(ctx, func() { timer.Close() })()
	far := unix.ItimerSpec{Value: unix.Timespec{Sec: math.MaxInt32 * 64}}
	for {
		// A timer that never expires is canceled by the kernel when the clock is
		// set.
		if err := unix.TimerfdSettime(fd, unix.TFD_TIMER_ABSTIME|unix.TFD_TIMER_CANCEL_ON_SET, &far, nil); err != nil && ctx.Err() == nil {
			return fmt.Errorf("cannot watch the clock: %w", err)
		}
		_, err := timer.Read(make([]byte, 8))
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ECANCELED):
			f()
		case err != nil:
			return fmt.Errorf("cannot watch the clock: %w", err)
		}
	}
}
