// Package delay waits within a context: for a duration, or with growing
// intervals while something fails.
//
// It is for loops that poll or retry. An event at a fixed time belongs to a
// deadline computed from facts, and waiting for a condition belongs to the code
// that can observe it.
package delay

import (
	"context"
	"math/rand/v2"
	"time"
)

// For waits for d. It returns early, with its cause, when ctx ends.
func For(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Backoff is how long to wait after so many failures in a row, the first being
// 0: least, doubled each time up to most, of which a random half is taken off,
// so that machines that lost their server together do not come back together.
func Backoff(failures int, least, most time.Duration) time.Duration {
	d := min(least<<min(max(failures, 0), 16), most)
	return d/2 + rand.N(d/2)
}
