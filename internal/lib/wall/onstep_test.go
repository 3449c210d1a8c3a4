package wall

import (
	"context"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/lib/waittest"
)

// TestOnStep sets the clock to its present time, which the kernel reports like
// any other step. It runs only on request.
func TestOnStep(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	told, ended := make(chan struct{}, 16), make(chan error, 1)
	go func() { ended <- OnStep(ctx, func() { told <- struct{}{} }) }()
	if os.Getenv("LULL_SET_CLOCK") != "" {
		for range 3 {
			waittest.Until(t, "a step is told", func() bool {
				var now unix.Timespec
				if err := unix.ClockGettime(unix.CLOCK_REALTIME, &now); err != nil {
					t.Fatal(err)
				}
				if err := unix.ClockSettime(unix.CLOCK_REALTIME, &now); err != nil {
					t.Fatalf("cannot set the clock: %v", err)
				}
				select {
				case <-told:
					return true
				default:
					return false
				}
			})
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
