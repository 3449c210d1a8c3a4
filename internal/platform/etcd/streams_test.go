package etcd

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"lull/internal/lib/scaletest"
	"lull/internal/store"
)

// TestCanceledWatches starts and cancels many watches at once during writes, and
// checks that the remaining watches still receive events.
func TestCanceledWatches(t *testing.T) {
	s := openTest(t, EmbeddedConfig{})
	for round := range scaletest.Count(t, "LULL_CANCELED_WATCHES", 20) {
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range 40 {
			watch := s.Watch(ctx, store.Prefix("w/"), 1)
			all.Go(func() {
				for range watch {
				}
			})
		}
		for n := range 20 {
			if _, err := s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("w/a", []byte(fmt.Sprint(round, n)))}}); err != nil {
				t.Fatal(err)
			}
		}
		cancel()
		all.Wait()
		res, err := s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("w/a", []byte("last"))}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		for b := range s.Watch(ctx, store.Prefix("w/"), res.Revision) {
			if b.Err != nil || b.Revision != res.Revision {
				t.Fatalf("round %d: a new watch from %d got %+v", round, res.Revision, b)
			}
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("round %d: a new watch got nothing", round)
		}
		cancel()
	}
}
