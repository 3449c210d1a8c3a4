package images

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/instance"
)

// shelf is an in-memory image cache.
type shelf struct {
	mu   sync.Mutex
	list []instance.Image
}

func (s *shelf) put(l ...instance.Image) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, l...)
}

func (s *shelf) Images(context.Context) ([]instance.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list), nil
}

func (s *shelf) RemoveImage(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id == "stuck" {
		return errors.New("cannot remove image stuck")
	}
	for n, i := range s.list {
		if i.ID == id {
			s.list = append(s.list[:n:n], s.list[n+1:]...)
			return nil
		}
	}
	return errors.New("there is no such image")
}

func (s *shelf) names() (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range s.list {
		out = append(out, i.ID)
	}
	return out
}

// over runs f with the caches c, whose only keeper is s, while their Run runs.
func over(t *testing.T, s *shelf, c Caches, f func(c *Caches)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c.Keepers, c.Log = map[string]instance.ImageKeeper{"images": s}, slog.New(slog.DiscardHandler)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { c.Run(ctx) })
		f(&c)
		cancel()
		wg.Wait()
	})
}

func unused(instance.Image) []string { return nil }
func never() bool                    { return false }

// TestImageSpace checks that unused images are removed if the cache is too large,
// the least recently used first and no more than needed.
func TestImageSpace(t *testing.T) {
	s := &shelf{}
	over(t, s, Caches{MaxSize: 100, UsersOf: unused, Halted: never}, func(*Caches) {
		at := func(h int) time.Time { return time.Now().Add(time.Duration(h) * time.Hour) }
		s.put(instance.Image{ID: "older", Bytes: 30, MadeAt: at(-9), UsedAt: at(-1)}, instance.Image{ID: "old", Bytes: 30, MadeAt: at(-5)},
			instance.Image{ID: "runs", Bytes: 60, MadeAt: at(-20), InUse: true}, instance.Image{ID: "lost", Kind: "guest", Bytes: 1000, MadeAt: at(-30)})
		time.Sleep(90 * time.Minute)
		synctest.Wait()
		if d := cmp.Diff([]string{"older", "runs", "lost"}, s.names()); d != "" {
			t.Errorf("after an hour: %s", d)
		}
		s.put(instance.Image{ID: "large", Bytes: 200, MadeAt: at(0), InUse: true})
		time.Sleep(time.Hour)
		synctest.Wait()
		if d := cmp.Diff([]string{"runs", "lost", "large"}, s.names()); d != "" {
			t.Errorf("where what is in use is too much: %s", d)
		}
	})
}

// TestPrune checks that old images are removed automatically and unused ones on
// request, and that an image from which an instance was made is never removed.
func TestPrune(t *testing.T) {
	s := &shelf{}
	const id = "a"
	var halted atomic.Bool
	users := func(i instance.Image) []string {
		if i.ID == id {
			return []string{"web"}
		}
		return nil
	}
	over(t, s, Caches{MaxAge: 48 * time.Hour, UsersOf: users, Halted: halted.Load}, func(c *Caches) {
		old, now := time.Now(), time.Now().Add(72*time.Hour)
		s.put(instance.Image{ID: "old", MadeAt: old}, instance.Image{ID: "new", MadeAt: now}, instance.Image{ID: "runs", MadeAt: old, InUse: true},
			instance.Image{ID: id, Kind: "guest", MadeAt: old}, instance.Image{ID: "lost", Kind: "guest", MadeAt: old})
		halted.Store(true)
		time.Sleep(49*time.Hour + 30*time.Minute)
		if d := cmp.Diff([]string{"old", "new", "runs", id, "lost"}, s.names()); d != "" {
			t.Errorf("during a halt: %s", d)
		}
		halted.Store(false)
		time.Sleep(time.Hour)
		synctest.Wait()
		if d := cmp.Diff([]string{"new", "runs", id, "lost"}, s.names()); d != "" {
			t.Errorf("after two days: %s", d)
		}
		s.put(instance.Image{ID: "stuck"})
		gone, err := c.Prune(t.Context(), time.Time{})
		if err == nil || len(gone) != 2 {
			t.Errorf("%d removed, %v", len(gone), err)
		}
		if d := cmp.Diff([]string{"runs", id, "stuck"}, s.names()); d != "" {
			t.Errorf("after a prune: %s", d)
		}
	})
}
