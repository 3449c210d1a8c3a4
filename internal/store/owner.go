package store

import (
	"context"
	"errors"
	"fmt"
)

// Ownership is a key held by a lease: leadership, a worker, a shard or a request. One
// lease can hold many keys.
type Ownership struct {
	Key string
	// Revision is the store revision at which the key was created. It is larger for
	// each later owner.
	Revision int64
	// Lease is the lease that holds the key. When the lease is lost, so is the
	// key.
	Lease Lease

	store Store
}

// Guard returns the condition that the key is still held. Every write of the owner
// must include it, so that the write fails once the lease has ended.
func (o *Ownership) Guard() Cond { return CreatedAt(o.Key, o.Revision) }

// Resign releases the key but not the lease. Resigning a lost ownership is not an
// error.
func (o *Ownership) Resign(ctx context.Context) error {
	_, err := o.store.Commit(ctx, Txn{If: []Cond{o.Guard()}, Then: []Op{Delete(o.Key)}})
	if errors.Is(err, ErrAmbiguous) {
		_, err = o.store.Commit(ctx, Txn{If: []Cond{o.Guard()}, Then: []Op{Delete(o.Key)}})
	}
	return err
}

// Claim creates key with data under lease if key is free. If another client holds it,
// the error is a *HeldError. If this lease holds it already, Claim succeeds and
// returns the existing ownership. Errors: ErrLeaseLost and those of Commit.
func Claim(ctx context.Context, s Store, lease Lease, key string, data []byte) (*Ownership, error) {
	t := Txn{If: []Cond{Absent(key)}, Then: []Op{PutLeased(key, data, lease.ID())}, Read: []string{key}}
	for try := 0; ; try++ {
		select {
		case <-lease.Lost():
			return nil, fmt.Errorf("cannot claim %q: %w", key, ErrLeaseLost)
		default:
		}
		res, err := s.Commit(ctx, t)
		switch {
		case errors.Is(err, ErrAmbiguous) && ctx.Err() == nil:
			// Claim can be repeated, because the key's lease identifies its owner.
			if err := pause(ctx, try); err != nil {
				return nil, err
			}
		case err != nil:
			return nil, fmt.Errorf("cannot claim %q: %w", key, err)
		case res.Read[0].Lease != lease.ID():
			return nil, &HeldError{Holder: res.Read[0], Revision: res.Revision}
		default:
			return &Ownership{Key: key, Revision: res.Read[0].CreateRevision, Lease: lease, store: s}, nil
		}
	}
}

// Campaign claims key as soon as it is free. It returns ctx's error when ctx ends,
// and ErrLeaseLost when lease is lost. While the store cannot be reached, it waits.
func Campaign(ctx context.Context, s Store, lease Lease, key string, data []byte) (*Ownership, error) {
	for try := 0; ; try++ {
		o, err := Claim(ctx, s, lease, key, data)
		var held *HeldError
		switch {
		case err == nil:
			return o, nil
		case errors.As(err, &held):
			try = 0
			if err := awaitDelete(ctx, s, lease, key, held.Revision+1); err != nil {
				return nil, err
			}
		case ctx.Err() != nil:
			return nil, fmt.Errorf("cannot claim %q: %w", key, context.Cause(ctx))
		case !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrAmbiguous):
			return nil, err
		}
		if err := pause(ctx, try); err != nil {
			return nil, err
		}
	}
}

// awaitDelete waits until key is deleted, at revision from or later. It also returns
// if the watch ends for a reason that the next read will show.
func awaitDelete(ctx context.Context, s Store, lease Lease, key string, from int64) error {
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	batches := s.Watch(watch, Key(key), from)
	for {
		select {
		case <-lease.Lost():
			return fmt.Errorf("cannot claim %q: %w", key, ErrLeaseLost)
		case <-ctx.Done():
			return fmt.Errorf("cannot claim %q: %w", key, context.Cause(ctx))
		case b, ok := <-batches:
			if !ok || b.Err != nil {
				return nil
			}
			for _, e := range b.Events {
				if e.Deleted {
					return nil
				}
			}
		}
	}
}
