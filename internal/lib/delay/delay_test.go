package delay

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		if err := For(t.Context(), time.Hour); err != nil || time.Since(begun) != time.Hour {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		gone := errors.New("no client waits")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Minute, func() { cancel(gone) })
		begun = time.Now()
		if err := For(ctx, time.Hour); err != gone || time.Since(begun) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
		if err := For(ctx, -1); err != gone {
			t.Error(err)
		}
		if err := For(t.Context(), 0); err != nil {
			t.Error(err)
		}
	})
}

// TestBackoff checks that backoffs increase up to their limit and that they are
// random.
func TestBackoff(t *testing.T) {
	seen := map[time.Duration]bool{}
	for n := range 100 {
		d := Backoff(n, time.Second, 30*time.Second)
		if most := min(time.Second<<min(n, 10), 30*time.Second); d < most/2 || d > most {
			t.Errorf("after %d failures: %s", n, d)
		}
		seen[d] = true
	}
	if len(seen) < 50 {
		t.Errorf("only %d different waits of 100", len(seen))
	}
}
