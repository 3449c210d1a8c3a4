package idempotency_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/server/idempotency"
	"lull/internal/store"
	"lull/internal/store/mem"
)

func open(t *testing.T, db *mem.DB) (*idempotency.Log, store.Lease, store.Store) {
	c := db.Client()
	lease, err := c.Grant(t.Context(), 15*time.Second)
	errtest.None(t, err)
	t.Cleanup(func() { _ = lease.Revoke(context.Background()); c.Close() })
	return idempotency.New(c, lease), lease, c
}

func TestSecondCallGetsFirstAnswer(t *testing.T) {
	db := mem.New(mem.Options{})
	a, _, _ := open(t, db)
	b, _, _ := open(t, db)
	key := idempotency.Key("me", "k")
	_, claim, err := a.Begin(t.Context(), key, "req")
	errtest.None(t, err)
	for name, l := range map[string]*idempotency.Log{"the same server": a, "another server": b} {
		if _, _, err := l.Begin(t.Context(), key, "req"); !errors.Is(err, idempotency.ErrRunning) {
			t.Errorf("a call at the same time on %s: %v", name, err)
		}
	}
	want := idempotency.Answer{Status: 202, Headers: map[string]string{"Location": "/x"}, Body: []byte("hello")}
	errtest.None(t, claim.Done(t.Context(), want))
	for name, l := range map[string]*idempotency.Log{"the same server": a, "another server": b} {
		got, _, err := l.Begin(t.Context(), key, "req")
		if err != nil || got == nil || got.Status != 202 || string(got.Body) != "hello" || got.Headers["Location"] != "/x" {
			t.Errorf("a repeat on %s: %+v, %v", name, got, err)
		}
		if _, _, err := l.Begin(t.Context(), key, "other"); !errors.Is(err, idempotency.ErrOther) {
			t.Errorf("another request with the key on %s: %v", name, err)
		}
	}
	if _, c, err := a.Begin(t.Context(), idempotency.Key("you", "k"), "req"); err != nil || c == nil {
		t.Errorf("another user's key of the same name: %v", err)
	}
}

func TestFailuresAreTriedAgain(t *testing.T) {
	a, _, _ := open(t, mem.New(mem.Options{}))
	for _, status := range []int{500, 503} {
		_, claim, err := a.Begin(t.Context(), "k", "req")
		if err != nil || claim == nil {
			t.Fatalf("%d: %v", status, err)
		}
		errtest.None(t, claim.Done(t.Context(), idempotency.Answer{Status: status}))
	}
	_, claim, err := a.Begin(t.Context(), "k", "req")
	if err != nil || claim == nil {
		t.Fatalf("after failures: %v", err)
	}
}

func TestClaimEndsWithItsServer(t *testing.T) {
	db := mem.New(mem.Options{})
	a, lease, _ := open(t, db)
	b, _, _ := open(t, db)
	if _, _, err := a.Begin(t.Context(), "k", "req"); err != nil {
		t.Fatal(err)
	}
	errtest.None(t, lease.Revoke(t.Context()))
	if _, claim, err := b.Begin(t.Context(), "k", "req"); err != nil || claim == nil {
		t.Fatalf("after the end of the first server: %v", err)
	}
}

// TestClaimOfAnUnansweredStore has a store that accepts a claim but loses the answer,
// or does not get its release. It checks that other servers can use the key after
// ReleaseEnded.
func TestClaimOfAnUnansweredStore(t *testing.T) {
	for what, fault := range map[string]mem.Fault{
		"claimed without an answer": {LoseAnswer: true},
		"not given back":            {Err: store.ErrUnavailable},
	} {
		t.Run(what, func(t *testing.T) {
			db := mem.New(mem.Options{})
			a, _, c := open(t, db)
			b, _, _ := open(t, db)
			broken := func(call mem.Call) mem.Fault {
				if call.Kind == mem.Commit {
					return fault
				}
				return mem.Fault{}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if fault.LoseAnswer {
				c.(*mem.Client).Inject(broken)
				if _, _, err := a.Begin(ctx, "k", "req"); err == nil {
					t.Fatal("it was told to run")
				}
			} else {
				_, claim, err := a.Begin(t.Context(), "k", "req")
				errtest.None(t, err)
				c.(*mem.Client).Inject(broken)
				if err := claim.Drop(ctx); err == nil {
					t.Fatal("given back")
				}
			}
			if err := a.ReleaseEnded(ctx); err == nil {
				t.Error("released while the store does not answer")
			}
			c.(*mem.Client).Inject(nil)
			if _, _, err := b.Begin(t.Context(), "k", "req"); !errors.Is(err, idempotency.ErrRunning) {
				t.Fatalf("before: %v, want that it runs", err)
			}
			for range 3 {
				errtest.None(t, a.ReleaseEnded(t.Context()))
			}
			_, claim, err := b.Begin(t.Context(), "k", "req")
			if err != nil {
				t.Fatalf("after: %v", err)
			}
			if err := a.ReleaseEnded(t.Context()); err != nil { // must leave claims of other servers alone
				t.Fatal(err)
			}
			errtest.None(t, claim.Done(t.Context(), idempotency.Answer{Status: 200}))
		})
	}
}

func TestSweep(t *testing.T) {
	a, _, c := open(t, mem.New(mem.Options{}))
	for _, k := range []string{"1", "2", "3"} {
		_, claim, err := a.Begin(t.Context(), k, "req")
		errtest.None(t, err)
		errtest.None(t, claim.Done(t.Context(), idempotency.Answer{Status: 200}))
	}
	if n, err := a.Sweep(t.Context(), time.Now().Add(idempotency.Keep/2)); n != 0 || err != nil {
		t.Errorf("early sweep: %d, %v", n, err)
	}
	if n, err := a.Sweep(t.Context(), time.Now().Add(idempotency.Keep+time.Hour)); n != 3 || err != nil {
		t.Errorf("sweep: %d, %v", n, err)
	}
	page, err := store.List(t.Context(), c, store.Prefix("replay/"))
	if err != nil || len(page.Values) != 0 {
		t.Errorf("left: %v, %v", page.Values, err)
	}
}
