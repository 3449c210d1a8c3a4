package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"lull/internal/store"
)

// shortTTL is the shortest possible TTL. longTTL outlasts any case.
const (
	shortTTL = time.Second
	longTTL  = 60 * time.Second
)

func testLeaseRevoked(t *testing.T, h Harness) {
	l := grant(t, h.Store, longTTL)
	if l.TTL() < longTTL || l.Remaining() <= 0 || l.Remaining() > l.TTL() || l.ID() == 0 {
		t.Errorf("new lease %x: TTL %v, remaining %v", l.ID(), l.TTL(), l.Remaining())
	}
	res := commit(t, h, store.Txn{Then: []store.Op{
		store.PutLeased(h.key("a"), []byte("1"), l.ID()),
		store.PutLeased(h.key("b"), []byte("1"), l.ID()),
		store.PutLeased(h.key("detached"), []byte("1"), l.ID()),
	}})
	put(t, h, "detached", "2")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	batches := h.Store.Watch(ctx, store.Prefix(h.key("")), res.Revision+2)
	end(t, l)
	await(t, "the lease to be lost", l.Lost())
	if b := next(t, batches); len(b.Events) != 2 || !b.Events[0].Deleted || !b.Events[1].Deleted {
		t.Errorf("revoking gave %+v, want both keys deleted at one revision", b)
	}
	if l.Remaining() != 0 || !get(t, h, "detached").Exists() {
		t.Errorf("after the end: remaining %v, detached key %+v", l.Remaining(), get(t, h, "detached"))
	}
	_, err := h.Store.Commit(t.Context(), store.Txn{Then: []store.Op{store.PutLeased(h.key("a"), nil, l.ID())}})
	wantKind(t, "put with a lease that ended", err, store.ErrLeaseLost)
	end(t, l)
}

// testLeaseExpired checks that a lease is kept well beyond its TTL, and that its
// owner loses it after the store has ended it silently.
func testLeaseExpired(t *testing.T, h Harness) {
	l := grant(t, h.Store, 3*shortTTL) // a renewal may be late on a busy machine
	defer end(t, l)
	o, err := store.Claim(t.Context(), h.Store, l, h.key("owner"), nil)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-l.Lost():
		t.Fatal("a lease that is renewed was lost")
	case <-time.After(3 * l.TTL()):
	}
	guarded := store.Txn{If: []store.Cond{o.Guard()}, Then: []store.Op{store.Put(h.key("a"), nil)}}
	if !commit(t, h, guarded).Succeeded {
		t.Error("a guarded write was refused while the lease was held")
	}
	if err := h.Expire(t.Context(), l.ID()); err != nil {
		t.Fatal(err)
	}
	if commit(t, h, guarded).Succeeded {
		t.Error("a guarded write was applied after the lease had ended")
	}
	awaitGone(t, h, "owner")
	await(t, "the owner to learn of it", l.Lost())
	_, err = store.Claim(t.Context(), h.Store, l, h.key("owner"), nil)
	wantKind(t, "claim with a lost lease", err, store.ErrLeaseLost)
}

// testLeaseExpiresInUpdate checks that an Update fails if the lease ends after its
// read and before its write.
func testLeaseExpiresInUpdate(t *testing.T, h Harness) {
	l := grant(t, h.Store, longTTL)
	defer end(t, l)
	o, err := store.Claim(t.Context(), h.Store, l, h.key("owner"), nil)
	if err != nil {
		t.Fatal(err)
	}
	set := func(expire bool) error {
		_, err := store.Update(t.Context(), h.Store, h.key("rec"), func(store.Value) ([]byte, []store.Op, error) {
			if expire {
				if err := h.Expire(t.Context(), l.ID()); err != nil {
					return nil, nil, err
				}
			}
			return fmt.Appendf(nil, `{"expired":%v}`, expire), nil, nil
		}, o.Guard())
		return err
	}
	if err := set(false); err != nil {
		t.Errorf("update by the owner: %v", err)
	}
	wantKind(t, "update after the lease had ended", set(true), store.ErrLeaseLost)
	if v := get(t, h, "rec"); v.Version != 1 {
		t.Errorf("the record was written: %s", v.Data)
	}
}

func testLostRenewals(t *testing.T, h Harness) {
	l := grant(t, h.Store, shortTTL)
	defer end(t, l)
	commit(t, h, store.Txn{Then: []store.Op{store.PutLeased(h.key("a"), nil, l.ID())}})
	h.DropRenewals()
	await(t, "the lease to be lost", l.Lost())
	if l.Remaining() != 0 {
		t.Errorf("a lost lease has %v remaining", l.Remaining())
	}
	awaitGone(t, h, "a")
}

// testHandover checks that a key passes to the next owner after the previous one
// resigns, revokes its lease or lets it expire.
func testHandover(t *testing.T, h Harness) {
	key := h.key("leader")
	l := grant(t, h.Store, longTTL)
	o, err := store.Claim(t.Context(), h.Store, l, key, []byte("0"))
	if err != nil {
		t.Fatal(err)
	}
	if again, err := store.Claim(t.Context(), h.Store, l, key, nil); err != nil || again.Revision != o.Revision {
		t.Errorf("claim by the holder: %+v, %v", again, err)
	}
	for i, leave := range []func() error{
		func() error { return o.Resign(t.Context()) },
		func() error { return l.Revoke(t.Context()) },
		func() error { return h.Expire(t.Context(), l.ID()) },
	} {
		l2 := grant(t, h.Other, longTTL)
		_, err := store.Claim(t.Context(), h.Other, l2, key, nil)
		var held *store.HeldError
		if !errors.As(err, &held) || held.Holder.Lease != l.ID() || !errors.Is(err, store.ErrConflict) {
			t.Fatalf("claim of a held key: %v", err)
		}
		won := make(chan *store.Ownership, 1)
		failed := make(chan error, 1)
		go func() {
			o2, err := store.Campaign(t.Context(), h.Other, l2, key, fmt.Append(nil, i+1))
			if err != nil {
				failed <- err
				return
			}
			won <- o2
		}()
		if err := leave(); err != nil {
			t.Fatal(err)
		}
		select {
		case o2 := <-won:
			if o2.Revision <= o.Revision {
				t.Errorf("owner %d has revision %d after %d", i+1, o2.Revision, o.Revision)
			}
			if commit(t, h, store.Txn{If: []store.Cond{o.Guard()}}).Succeeded {
				t.Errorf("the guard of owner %d still holds", i)
			}
			end(t, l)
			o, l = o2, l2
		case err := <-failed:
			t.Fatal(err)
		case <-time.After(waitLimit):
			t.Fatalf("owner %d never came", i+1)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	l2 := grant(t, h.Other, longTTL)
	if _, err := store.Campaign(ctx, h.Other, l2, key, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("campaign that was called off: %v", err)
	}
	end(t, l2)
	if _, err := store.Campaign(t.Context(), h.Other, l2, key, nil); !errors.Is(err, store.ErrLeaseLost) {
		t.Errorf("campaign with a lost lease: %v", err)
	}
	end(t, l)
}

// testOneOwner has 8 candidates own a key in turn. Each counts itself in and out, to
// check that there is only one at a time.
func testOneOwner(t *testing.T, h Harness) {
	var inside, turns atomic.Int32
	parallel(t, 8, func(i int) error {
		l, err := h.Store.Grant(t.Context(), longTTL)
		if err != nil {
			return err
		}
		for range 3 {
			o, err := store.Campaign(t.Context(), h.Store, l, h.key("leader"), nil)
			if err != nil {
				return err
			}
			if n := inside.Add(1); n != 1 {
				return fmt.Errorf("%d owners at once", n)
			}
			turns.Add(1)
			inside.Add(-1)
			if err := o.Resign(t.Context()); err != nil {
				return err
			}
		}
		return l.Revoke(t.Context())
	})
	if turns.Load() != 24 {
		t.Errorf("%d turns, want 24", turns.Load())
	}
}
