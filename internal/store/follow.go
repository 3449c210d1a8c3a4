package store

import (
	"context"
	"errors"
	"fmt"
)

// pageSize is the number of values that List reads at a time.
const pageSize = 1000

// List reads all of keys at one revision, page by page.
func List(ctx context.Context, s Store, keys Keys) (Page, error) {
	var all Page
	revision, err := listed(ctx, s, keys, func(values []Value) { all.Values = append(all.Values, values...) })
	if err != nil {
		return Page{}, err
	}
	all.Revision = revision
	return all, nil
}

// listed reads keys page by page, all at the revision that it returns, and passes
// each page to take.
func listed(ctx context.Context, s Store, keys Keys, take func([]Value)) (int64, error) {
	q := Query{Keys: keys, Limit: pageSize}
	for {
		page, err := s.Range(ctx, q)
		if err != nil {
			return 0, fmt.Errorf("cannot list %q: %w", keys, err)
		}
		take(page.Values)
		if !page.More {
			return page.Revision, nil
		}
		q.Revision = page.Revision
		q.After = page.Values[len(page.Values)-1].Key
	}
}

// Follower receives the state of some keys and every change after it. The functions
// are called from the goroutine that called Follow. If Reset or Apply returns an
// error, Follow returns it.
type Follower struct {
	// Watch are the keys to watch, if they differ from the listed ones. The zero Keys
	// means the listed ones.
	Watch Keys
	// Listed, if not nil, receives the listed values page by page. Reset then gets
	// only the revision, so that not all records are in memory at once. first is true
	// for the first page of a listing; a listing may start over.
	Listed func(first bool, values []Value)
	// Reset receives all values. It is called first, and again whenever changes were
	// missed because the history was compacted.
	Reset func(Page) error
	// Apply receives the next change, or only a newer revision.
	Apply func(Batch) error
}

// Follow keeps f up to date with keys until ctx ends, and then returns ctx's error.
// If the store cannot be reached, it waits; no change is lost.
func Follow(ctx context.Context, s Store, keys Keys, f Follower) error {
	next := int64(0)
	for try := 0; ; try++ {
		err := followOnce(ctx, s, keys, f, &next, &try)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, ErrCompacted):
			next = 0
		case !errors.Is(err, ErrUnavailable):
			return err
		}
		if err := pause(ctx, try); err != nil {
			return context.Cause(ctx)
		}
	}
}

// list reads the listed keys and returns the argument for Reset.
func (f *Follower) list(ctx context.Context, s Store, keys Keys) (Page, error) {
	if f.Listed == nil {
		return List(ctx, s, keys)
	}
	first := true
	revision, err := listed(ctx, s, keys, func(values []Value) {
		f.Listed(first, values)
		first = false
	})
	return Page{Revision: revision}, err
}

// followOnce lists the keys if *next is 0, and then watches from *next until the
// watch ends.
func followOnce(ctx context.Context, s Store, keys Keys, f Follower, next *int64, try *int) error {
	if *next == 0 {
		page, err := f.list(ctx, s, keys)
		if err != nil {
			return err
		}
		if err := f.Reset(page); err != nil {
			return err
		}
		*next = page.Revision + 1
	}
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	watched := keys
	if f.Watch != (Keys{}) {
		watched = f.Watch
	}
	for b := range s.Watch(watch, watched, *next) {
		if b.Err != nil {
			return b.Err
		}
		*try = 0
		if err := f.Apply(b); err != nil {
			return err
		}
		*next = b.Revision + 1
	}
	return fmt.Errorf("cannot continue watching %q: %w", watched, ErrUnavailable)
}
