package deadlines

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/scaletest"
)

// TestQueue sets, moves and removes deadlines at random, before Run and during it.
// It checks that each item is handled once, exactly at its last deadline unless
// that was removed, and that no more than width items are handled concurrently.
func TestQueue(t *testing.T) {
	const width = 4
	rnd := scaletest.Random(t)
	synctest.Test(t, func(t *testing.T) {
		q := New[int](nil)
		entries := make([]*Entry[int], 100)
		want := make([]time.Time, len(entries)) // zero for none
		for n := range entries {
			entries[n] = NewEntry(n)
		}
		change := func(from int) {
			n, in := rnd.IntN(len(entries)), time.Duration(from+rnd.IntN(3*3600))*time.Second
			if want[n] = time.Now().Add(in); rnd.IntN(4) == 0 {
				want[n] = time.Time{}
				q.Remove(entries[n])
				return
			}
			q.Set(entries[n], want[n])
		}
		for range 500 {
			change(1000)
		}
		var mu sync.Mutex
		got := make([]time.Time, len(entries))
		var wg sync.WaitGroup
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Hour)
		defer cancel()
		wg.Go(func() {
			q.Run(ctx, width, func(n int, _ func()) {
				mu.Lock()
				defer mu.Unlock()
				if !got[n].IsZero() {
					t.Errorf("%d was handled twice", n)
				}
				got[n] = time.Now()
			})
		})
		for range 500 {
			time.Sleep(time.Second)
			change(1000 - 500)
		}
		wg.Wait()
		if !slices.EqualFunc(got, want, time.Time.Equal) {
			t.Errorf("due at %v, handled at %v", want, got)
		}
	})
}

// TestWidth handles items that take long. It checks that as many as allowed are
// handled concurrently, whether they call yield or not, and that Run waits for them
// when it ends.
func TestWidth(t *testing.T) {
	const width, items = 3, 10
	for _, yields := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			q := New[int](nil)
			began := time.Now()
			ctx, cancel := context.WithCancel(t.Context())
			var mu sync.Mutex
			running, handled := 0, 0
			for n := range items {
				q.Set(NewEntry(n), began.Add(time.Second))
			}
			time.AfterFunc(time.Second+3*time.Minute+time.Second, cancel) // while the last one is being handled
			q.Run(ctx, width, func(_ int, yield func()) {
				if yields {
					yield()
					yield() // a second call has no effect
				}
				mu.Lock()
				if running++; running > width {
					t.Errorf("%d items at once", running)
				}
				mu.Unlock()
				time.Sleep(time.Minute)
				mu.Lock()
				running--
				handled++
				mu.Unlock()
			})
			lost := time.Duration(0)
			if !yields {
				lost = (width - 1) * patience
			}
			if took := time.Since(began); handled != items || took < time.Second+4*time.Minute || took > time.Second+4*time.Minute+lost {
				t.Errorf("%d of %d in %s", handled, items, took)
			}
		})
	}
}

// TestEarlierDeadline checks that a deadline that becomes the first one during a
// wait is handled in time, and that a later Run handles what an earlier one has
// left.
func TestEarlierDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New[string](nil)
		began := time.Now()
		q.Set(NewEntry("late"), began.Add(time.Minute))
		for _, want := range []struct {
			item string
			at   time.Duration
		}{{"early", 2 * time.Second}, {"late", time.Minute}} {
			ctx, cancel := context.WithCancel(t.Context())
			if want.item == "early" {
				time.AfterFunc(time.Second, func() { q.Set(NewEntry("early"), time.Now().Add(time.Second)) })
			}
			q.Run(ctx, 2, func(got string, _ func()) {
				if got != want.item || time.Since(began) != want.at {
					t.Errorf("%q after %s, want %q after %s", got, time.Since(began), want.item, want.at)
				}
				cancel()
			})
		}
	})
}
