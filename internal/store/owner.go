package store

import (
	"context"
	"errors"
	"fmt"
)

// Ownership is a key that a lease holds: leadership, or one worker, shard or
// request of many under the same lease.
type Ownership struct {
	Key string
	// Revision is when the key was created. It grows with each owner.
	Revision int64
	// Lease is the lease that holds the key. When the lease is lost, so is the
	// key.
	Lease Lease

	store Store
}

// Guard returns the condition that the key is still held. Every write of the
// owner must include it; once the lease has ended it fails.
func (o *Ownership) Guard() Cond { return CreatedAt(o.Key, o.Revision) }

// Resign releases the key and leaves the lease alone. Resigning a lost
// ownership is not an error.
func (o *Ownership) Resign(ctx context.Context) error {
	_, err := o.store.Commit(ctx, Txn{If: []Cond{o.Guard()}, Then: []Op{Delete(o.Key)}})
	if errors.Is(err, ErrAmbiguous) {
		_, err = o.store.Commit(ctx, Txn{If: []Cond{o.Guard()}, Then: []Op{Delete(o.Key)}})
	}
	return err
}

// Claim takes key with data for lease if it is free. If another client has it,
// the error is a *HeldError. If this lease already holds it, Claim succeeds and
// returns the data it was claimed with. Errors: ErrLeaseLost and those of
// Commit.
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
			// The lease of the key identifies its owner, so repeating the claim is
			// harmless.
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

// Campaign claims key as soon as it is free. It returns ctx's error when ctx
// ends, and ErrLeaseLost when lease is lost. It waits for a store that cannot
// be reached.
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

// awaitDelete waits until key was deleted at or after revision from, or the
// watch ended for a reason that the next read will show.
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
