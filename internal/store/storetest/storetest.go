// Package storetest is the conformance suite of package store. Every implementation
// must pass it: mem (also in a synctest bubble), the embedded etcd, and Debian's
// etcd-server.
//
// A backend provides a Harness for each case. The cases wait for conditions with a
// deadline and never assert durations, so that they pass on a slow machine. They use
// only their own keys, so that they can share a store.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/store"
)

// Harness is the environment of a case.
type Harness struct {
	// Store is the process under test. Other is another process on the same
	// store, if the backend supports one.
	Store, Other store.Store
	// Prefix is the prefix of all keys of the case.
	Prefix string
	// Compact drops the history before a revision.
	Compact func(ctx context.Context, revision int64) error
	// Expire ends a lease in the store without notifying its owner.
	Expire func(ctx context.Context, id store.LeaseID) error
	// DropRenewals makes all later renewals of Store's leases get lost.
	DropRenewals func()
}

// Case is one case of the suite.
type Case struct {
	Name string
	Run  func(t *testing.T, h Harness)
}

// Cases returns the suite. A case starts no subtests, so that it can run in
// a bubble.
func Cases() []Case {
	return []Case{
		{"Range", testRange},
		{"PagesUnderWrites", testPages},
		{"Conditions", testConditions},
		{"Commit", testCommit},
		{"Limits", testLimits},
		{"Invalid", testInvalid},
		{"OldRevisions", testOldRevisions},
		{"WatchWholeRevisions", testWatchWhole},
		{"WatchOrderUnderWriters", testWatchOrder},
		{"WatchFromNow", testWatchFromNow},
		{"WatchCompacted", testWatchCompacted},
		{"WatchCancelled", testWatchCancelled},
		{"WatchProgressNeverAhead", testWatchProgress},
		{"FollowSurvivesCompaction", testFollow},
		{"LeaseRevoked", testLeaseRevoked},
		{"LeaseExpired", testLeaseExpired},
		{"LeaseExpiresBetweenCompareAndPut", testLeaseExpiresInUpdate},
		{"LostRenewals", testLostRenewals},
		{"Handover", testHandover},
		{"OneOwner", testOneOwner},
		{"Update", testUpdate},
		{"UpdateNoLostIncrement", testUpdateConcurrent},
		{"UpdateAmbiguous", testUpdateAmbiguous},
		{"UpdateAmbiguousOverwritten", testAmbiguousOverwritten},
		{"UpdateAmbiguousDeleted", testAmbiguousDeleted},
		{"UpdateAmbiguousDelete", testAmbiguousDelete},
		{"UpdateAmbiguousCompacted", testAmbiguousCompacted},
		{"Transact", testTransact},
	}
}

// waitLimit is the time in which a condition must become true.
const waitLimit = 60 * time.Second

func (h Harness) key(name string) string { return h.Prefix + name }

func (h Harness) all() store.Keys { return store.Prefix(h.Prefix) }

func put(t *testing.T, h Harness, name, data string) int64 {
	t.Helper()
	return commit(t, h, store.Txn{Then: []store.Op{store.Put(h.key(name), []byte(data))}}).Revision
}

func commit(t *testing.T, h Harness, txn store.Txn) store.Result {
	t.Helper()
	res, err := h.Store.Commit(t.Context(), txn)
	if err != nil {
		t.Fatalf("Commit(%+v): %v", txn, err)
	}
	return res
}

func get(t *testing.T, h Harness, name string) store.Value {
	t.Helper()
	v, err := store.Get(t.Context(), h.Store, h.key(name))
	if errors.Is(err, store.ErrNotFound) {
		return store.Value{Key: h.key(name)}
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func grant(t *testing.T, s store.Store, ttl time.Duration) store.Lease {
	t.Helper()
	l, err := s.Grant(t.Context(), ttl)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// end revokes a lease; it may be lost already.
func end(t *testing.T, l store.Lease) {
	t.Helper()
	if err := l.Revoke(context.WithoutCancel(t.Context())); err != nil {
		t.Errorf("Revoke: %v", err)
	}
}

// await waits until ch is closed.
func await(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(waitLimit):
		t.Fatalf("still waiting for %s after %v", what, waitLimit)
	}
}

// next returns the next batch that has events or an error.
func next(t *testing.T, batches <-chan store.Batch) store.Batch {
	t.Helper()
	deadline := time.After(waitLimit)
	for {
		select {
		case b, ok := <-batches:
			if !ok {
				t.Fatal("watch is closed")
			}
			if len(b.Events) > 0 || b.Err != nil {
				return b
			}
		case <-deadline:
			t.Fatalf("no batch after %v", waitLimit)
		}
	}
}

// awaitGone waits until a key does not exist.
func awaitGone(t *testing.T, h Harness, name string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	page, err := h.Store.Range(ctx, store.Query{Keys: store.Key(h.key(name))})
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Values) == 0 {
		return
	}
	for b := range h.Store.Watch(ctx, store.Key(h.key(name)), page.Revision+1) {
		if b.Err != nil {
			t.Fatal(b.Err)
		}
		for _, e := range b.Events {
			if e.Deleted {
				return
			}
		}
	}
	t.Fatalf("%q still exists", name)
}

// parallel runs f n times concurrently and reports each error.
func parallel(t *testing.T, n int, f func(i int) error) {
	t.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// show returns a page in one line: key=data@mod/version.
func show(h Harness, values []store.Value) string {
	var b strings.Builder
	for _, v := range values {
		fmt.Fprintf(&b, "%s=%s/%d ", strings.TrimPrefix(v.Key, h.Prefix), store.StripWriteID(v.Data), v.Version)
	}
	return strings.TrimSpace(b.String())
}

func wantKind(t *testing.T, what string, err, kind error) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("%s: error %v, want %v", what, err, kind)
	}
}
