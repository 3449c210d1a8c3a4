// Package delay waits within a context: for a duration, or for increasing
// intervals while something fails.
//
// It is for loops that poll or retry. To act at a certain time, use a deadline
// computed from facts. To wait for a condition, let the code that can observe the
// condition signal it.
package delay

import (
	"context"
	"math/rand/v2"
	"time"
)

// For waits for d. If ctx ends first, it returns the context's cause at once.
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

// Backoff returns how long to wait after the given number of consecutive
// failures: least, doubled for each failure up to most, minus a random part of up
// to half. The randomness prevents machines that lost their server at the same
// time from returning at the same time.
func Backoff(failures int, least, most time.Duration) time.Duration {
	d := min(least<<min(max(failures, 0), 16), most)
	return d/2 + rand.N(d/2)
}
