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

// TestQueue sets, moves and removes deadlines at random while several callers
// wait. Each item is returned once, exactly at its last deadline, unless that was
// removed.
func TestQueue(t *testing.T) {
	rnd := scaletest.Random(t)
	synctest.Test(t, func(t *testing.T) {
		q := New[int]()
		entries := make([]*Entry[int], 100)
		want := make([]time.Time, len(entries)) // zero for none
		for n := range entries {
			entries[n] = NewEntry(n)
		}
		for range 1000 {
			n, in := rnd.IntN(len(entries)), time.Duration(1+rnd.IntN(3*3600))*time.Second
			if want[n] = time.Now().Add(in); rnd.IntN(4) == 0 {
				want[n] = time.Time{}
				q.Remove(entries[n])
				continue
			}
			q.Set(entries[n], want[n])
		}
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Hour)
		defer cancel()
		var mu sync.Mutex
		got := make([]time.Time, len(entries))
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for n, ok := q.Next(ctx); ok; n, ok = q.Next(ctx) {
					mu.Lock()
					if !got[n].IsZero() {
						t.Errorf("%d was returned twice", n)
					}
					got[n] = time.Now()
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if !slices.EqualFunc(got, want, time.Time.Equal) {
			t.Errorf("due at %v, returned at %v", want, got)
		}
	})
}

// TestNextSeesAnEarlierDeadline checks that a deadline that becomes the first
// while Next waits is returned in time.
func TestNextSeesAnEarlierDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New[string]()
		q.Set(NewEntry("late"), time.Now().Add(time.Minute))
		go func() {
			time.Sleep(time.Second)
			q.Set(NewEntry("early"), time.Now().Add(time.Second))
		}()
		began := time.Now()
		if got, ok := q.Next(t.Context()); got != "early" || !ok || time.Since(began) != 2*time.Second {
			t.Errorf("%q, %t after %s", got, ok, time.Since(began))
		}
	})
}
