package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"lull/internal/store"
)

func testWatchWhole(t *testing.T, h Harness) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	base := put(t, h, "other", "x")
	batches := h.Store.Watch(ctx, store.Prefix(h.key("w/")), base+1)
	single := h.Store.Watch(ctx, store.Key(h.key("w/a")), base+1)
	res := commit(t, h, store.Txn{Then: []store.Op{
		store.Put(h.key("w/a"), []byte("1")), store.Put(h.key("x"), nil), store.Put(h.key("w/b"), []byte("1")),
	}})
	gone := commit(t, h, store.Txn{Then: []store.Op{store.Delete(h.key("w/a")), store.Put(h.key("w/b"), []byte("2"))}})
	b := next(t, batches)
	if b.Revision != res.Revision || len(b.Events) != 2 || b.Events[0].Value.Key != h.key("w/a") || b.Events[1].Value.Version != 1 {
		t.Errorf("first batch %+v, want both keys at %d", b, res.Revision)
	}
	b = next(t, batches)
	if b.Revision != gone.Revision || len(b.Events) != 2 {
		t.Fatalf("second batch %+v, want both keys at %d", b, gone.Revision)
	}
	for _, e := range b.Events {
		if e.Deleted != (e.Value.Key == h.key("w/a")) || e.Value.ModRevision != gone.Revision {
			t.Errorf("second batch has %+v", e)
		}
	}
	if b := next(t, single); len(b.Events) != 1 || b.Revision != res.Revision {
		t.Errorf("watch of one key got %+v", b)
	}
	if b := next(t, single); len(b.Events) != 1 || !b.Events[0].Deleted {
		t.Errorf("watch of one key got %+v, want its delete", b)
	}
}

// testWatchOrder has 8 writers that each write a pair of keys in one transaction. It
// checks the order and completeness of three watches, started before, during and
// after.
func testWatchOrder(t *testing.T, h Harness) {
	const writers, each = 8, 25
	base := put(t, h, "start", "x")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	early := h.Store.Watch(ctx, store.Prefix(h.key("o/")), base+1)
	var during <-chan store.Batch
	parallel(t, writers, func(w int) error {
		for i := range each {
			if w == 0 && i == each/2 {
				during = h.Other.Watch(ctx, store.Prefix(h.key("o/")), base+1)
			}
			data := fmt.Appendf(nil, "%d", i)
			_, err := h.Store.Commit(ctx, store.Txn{Then: []store.Op{
				store.Put(h.key(fmt.Sprintf("o/%d/l", w)), data),
				store.Put(h.key(fmt.Sprintf("o/%d/r", w)), data),
			}})
			if err != nil {
				return err
			}
		}
		return nil
	})
	late := h.Store.Watch(ctx, store.Prefix(h.key("o/")), base+1)
	for name, batches := range map[string]<-chan store.Batch{"early": early, "during": during, "late": late} {
		last, seen := base, map[string]int{}
		for range writers * each {
			b := next(t, batches)
			if b.Err != nil {
				t.Fatalf("%s: %v", name, b.Err)
			}
			if b.Revision <= last || len(b.Events) != 2 {
				t.Fatalf("%s: batch at %d after %d with %d events", name, b.Revision, last, len(b.Events))
			}
			last = b.Revision
			for _, e := range b.Events {
				if want := fmt.Sprint(seen[e.Value.Key]); string(e.Value.Data) != want {
					t.Fatalf("%s: %s is %s, want %s", name, e.Value.Key, e.Value.Data, want)
				}
				seen[e.Value.Key]++
			}
		}
	}
}

func testWatchFromNow(t *testing.T, h Harness) {
	put(t, h, "a", "before")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range 20 {
		batches := h.Store.Watch(ctx, store.Key(h.key("a")), 0)
		want := fmt.Sprint(i)
		put(t, h, "a", want)
		if b := next(t, batches); len(b.Events) != 1 || string(b.Events[0].Value.Data) != want {
			t.Fatalf("watch from now got %+v, want %s", b, want)
		}
	}
}

func testWatchCompacted(t *testing.T, h Harness) {
	first := put(t, h, "a", "1")
	for i := range 5 {
		put(t, h, "a", fmt.Sprint(i))
	}
	last := put(t, h, "a", "last")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// The reader of this watch is slow but must miss nothing.
	slow := h.Store.Watch(ctx, h.all(), first)
	if b := next(t, slow); b.Revision != first {
		t.Fatalf("first batch at %d, want %d", b.Revision, first)
	}
	if err := h.Compact(ctx, last); err != nil {
		t.Fatal(err)
	}
	b := next(t, h.Store.Watch(ctx, h.all(), first))
	wantKind(t, "late watch", b.Err, store.ErrCompacted)
	var compacted *store.CompactedError
	if !errors.As(b.Err, &compacted) || compacted.Revision != last {
		t.Errorf("late watch says %v, want revision %d", b.Err, last)
	}
	if b := next(t, h.Store.Watch(ctx, h.all(), last)); b.Revision != last || string(b.Events[0].Value.Data) != "last" {
		t.Errorf("watch from the compact revision got %+v", b)
	}
}

func testWatchCancelled(t *testing.T, h Harness) {
	put(t, h, "a", "1")
	for _, read := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		batches := h.Store.Watch(ctx, h.all(), 0)
		for i := range 10 {
			put(t, h, "a", fmt.Sprint(i)) // fills any buffers
		}
		if read {
			next(t, batches)
		}
		cancel()
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			for range batches {
			}
		}()
		await(t, "a cancelled watch to close", closed)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for b := range h.Store.Watch(ctx, h.all(), 0) {
		if b.Err == nil && len(b.Events) > 0 {
			t.Errorf("a watch that was over before it began got %+v", b)
		}
	}
}

// testWatchProgress checks that a progress batch never precedes a change that it
// covers.
func testWatchProgress(t *testing.T, h Harness) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	batches := h.Store.Watch(ctx, h.all(), 0)
	var last int64
	for i := range 50 {
		want := put(t, h, "a", fmt.Sprint(i))
		deadline := time.After(waitLimit)
		for got := false; !got; {
			select {
			case b, ok := <-batches:
				if !ok || b.Err != nil {
					t.Fatalf("watch ended: %+v", b)
				}
				if b.Revision < last || (len(b.Events) > 0 && b.Revision == last && i > 0) {
					t.Fatalf("batch %+v after %d", b, last)
				}
				if len(b.Events) == 0 && b.Revision >= want {
					t.Fatalf("progress to %d before the change at %d", b.Revision, want)
				}
				last, got = b.Revision, len(b.Events) > 0
			case <-deadline:
				t.Fatal("no change")
			}
		}
	}
}

// testFollow checks that a mirror made with Follow stays correct while the history is
// compacted.
func testFollow(t *testing.T, h Harness) {
	put(t, h, "seed", "0")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	mirror := map[string]string{}
	resets := 0
	cut := errors.New("cut")
	follow := func(until string) error {
		return store.Follow(ctx, h.Store, h.all(), store.Follower{
			Reset: func(p store.Page) error {
				resets++
				clear(mirror)
				for _, v := range p.Values {
					mirror[v.Key] = string(v.Data)
				}
				if mirror[h.key("seed")] == until {
					return cut
				}
				return nil
			},
			Apply: func(b store.Batch) error {
				for _, e := range b.Events {
					if e.Deleted {
						delete(mirror, e.Value.Key)
					} else {
						mirror[e.Value.Key] = string(e.Value.Data)
					}
				}
				if mirror[h.key("seed")] == until {
					return cut
				}
				return nil
			},
		})
	}
	done := make(chan error, 1)
	go func() { done <- follow("end") }()
	for i := range 40 {
		r := put(t, h, fmt.Sprintf("k%d", i%7), fmt.Sprint(i))
		if i%10 == 9 {
			if err := h.Compact(ctx, r); err != nil {
				t.Fatal(err)
			}
		}
	}
	commit(t, h, store.Txn{Then: []store.Op{store.Delete(h.key("k0"))}})
	put(t, h, "seed", "end")
	select {
	case err := <-done:
		if !errors.Is(err, cut) {
			t.Fatal(err)
		}
	case <-time.After(waitLimit):
		t.Fatal("the end was never seen")
	}
	if resets < 1 || len(mirror) != 7 || mirror[h.key("k4")] != "39" {
		t.Errorf("after %d resets the mirror is %v", resets, mirror)
	}
}
