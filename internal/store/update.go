package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Get returns the value of key. Errors: ErrNotFound and those of Range.
func Get(ctx context.Context, s Store, key string) (Value, error) {
	page, err := s.Range(ctx, Query{Keys: Key(key)})
	if err != nil {
		return Value{}, err
	}
	if len(page.Values) == 0 {
		return Value{}, fmt.Errorf("cannot find %q: %w", key, ErrNotFound)
	}
	return page.Values[0], nil
}

// Update changes key by compare-and-swap. fn receives the value of the key, or an
// absent Value. It returns the new data, nil to delete the key, and further writes
// for the same transaction. If another client changes the key meanwhile, fn is called
// again with fresh state, so it must have no side effects. An error of fn ends the
// update and is returned. If fn changes nothing and adds nothing, nothing is written.
//
// The guards are conditions on other keys, usually Ownership.Guard. If one does not
// hold, Update returns ErrLeaseLost.
//
// If the answer of the store is lost, Update determines whether the change was
// applied, by a unique ID written with it. The data, or that of one of the further
// puts, must be a JSON object, which gets the ID as its first member "w".
// ErrAmbiguous is returned only if the outcome cannot be determined, because the
// store stays unreachable for ResolveTime after ctx ended or the history is
// compacted.
//
// The returned Value has the data as fn returned it, and the revision of the change.
func Update(ctx context.Context, s Store, key string, fn func(old Value) ([]byte, []Op, error), guards ...Cond) (Value, error) {
	var done Value
	res, err := Transact(ctx, s, []string{key}, func(view []Value) ([]Op, error) {
		old := view[0]
		data, extra, err := fn(old)
		if err != nil {
			return nil, err
		}
		done = old
		done.Data = data
		switch {
		case data == nil && old.Exists():
			extra = append([]Op{Delete(key)}, extra...)
		case data != nil && !(old.Exists() && bytes.Equal(data, old.Data)):
			extra = append([]Op{PutLeased(key, data, old.Lease)}, extra...)
		}
		return extra, nil
	}, guards...)
	if err != nil {
		return Value{}, err
	}
	if !slices.ContainsFunc(res.writes, func(op Op) bool { return op.Key == key }) {
		return done, nil
	}
	done.ModRevision = res.Revision
	done.Version++
	switch {
	case done.Data == nil:
		done = Value{Key: key, ModRevision: res.Revision}
	case done.CreateRevision == 0:
		done.CreateRevision = res.Revision
	}
	return done, nil
}

// Done is the result of a Transact.
type Done struct {
	// Revision is the revision of the change. If nothing was written, it is the
	// store's revision when the keys were read.
	Revision int64
	writes   []Op
}

// Transact is like Update for several keys. fn receives the values of keys, all at
// one revision and in order, and returns the writes of one transaction. The
// transaction is applied only if none of keys has changed since.
func Transact(ctx context.Context, s Store, keys []string, fn func(view []Value) ([]Op, error), guards ...Cond) (Done, error) {
	if len(keys) == 0 {
		return Done{}, fmt.Errorf("cannot start a transaction without keys: %w", ErrInvalid)
	}
	view, err := s.Commit(ctx, Txn{Read: keys})
	for try := 0; err == nil; try++ {
		var a attempt
		if a, err = newAttempt(keys, view, fn, guards); err != nil {
			break
		}
		if len(a.txn.Then) == 0 {
			return Done{Revision: view.Revision}, nil
		}
		var won bool
		if view, won, err = a.run(ctx, s); won && err == nil {
			return Done{Revision: view.Revision, writes: a.txn.Then}, nil
		}
		if err == nil {
			err = pause(ctx, try)
		}
	}
	return Done{}, err
}

// attempt is one attempt at a transaction, based on the values of its keys at one
// revision.
type attempt struct {
	txn    Txn
	keys   int // number of leading entries of txn.If and txn.Read that are for the keys; guards and marker follow
	base   int64
	id     string
	marker string // the key whose data has the write ID; empty if there are only deletes
}

func newAttempt(keys []string, view Result, fn func([]Value) ([]Op, error), guards []Cond) (attempt, error) {
	a := attempt{keys: len(keys), base: view.Revision}
	old := make([]Value, len(keys))
	for i := range keys {
		old[i] = view.Read[i]
		old[i].Data = StripWriteID(old[i].Data)
		a.txn.If = append(a.txn.If, Unchanged(old[i]))
	}
	a.txn.If = append(a.txn.If, guards...)
	for _, c := range a.txn.If {
		a.txn.Read = append(a.txn.Read, c.Key)
	}
	ops, err := fn(old)
	if err != nil {
		return attempt{}, err
	}
	a.txn.Then = slices.Clone(ops)
	return a, a.mark()
}

// mark adds the write ID to the first put that can have one.
func (a *attempt) mark() error {
	puts := 0
	for i, op := range a.txn.Then {
		if op.Delete {
			continue
		}
		puts++
		id, data, ok := addWriteID(op.Data)
		if !ok {
			continue
		}
		a.id, a.marker = id, op.Key
		a.txn.Then[i].Data = data
		a.txn.Read = append(a.txn.Read, op.Key)
		return nil
	}
	if puts > 0 {
		return fmt.Errorf("cannot update %q: no write is a JSON object that could carry its id: %w", a.txn.Then[0].Key, ErrInvalid)
	}
	return nil
}

// run commits the attempt. won is false if a key has changed; the result then has the
// fresh state.
func (a *attempt) run(ctx context.Context, s Store) (res Result, won bool, err error) {
	res, err = s.Commit(ctx, a.txn)
	switch {
	case errors.Is(err, ErrAmbiguous):
		return a.resolve(ctx, s, err)
	case err != nil || res.Succeeded:
		return res, err == nil, err
	}
	return res, false, a.lost(res)
}

// lost returns nil if the attempt was refused because one of its keys changed, and
// ErrLeaseLost if a guard does not hold.
func (a *attempt) lost(res Result) error {
	for i, c := range a.txn.If[a.keys:] {
		if !c.Holds(res.Read[a.keys+i]) {
			return fmt.Errorf("cannot write %q: %q is no longer held: %w", a.txn.Then[0].Key, c.Key, ErrLeaseLost)
		}
	}
	return nil
}

// changed reports whether one of the attempt's keys has changed, so that the attempt
// can no longer be applied.
func (a *attempt) changed(res Result) bool {
	for i, c := range a.txn.If[:a.keys] {
		if !c.Holds(res.Read[i]) {
			return true
		}
	}
	return false
}

// pause waits a random time that grows with try, at most 200 ms.
func pause(ctx context.Context, try int) error {
	most := min(200*time.Millisecond, 2*time.Millisecond<<min(try, 10))
	timer := time.NewTimer(rand.N(most))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("cannot finish the update: %w: %w", ErrUnavailable, context.Cause(ctx))
	}
}
