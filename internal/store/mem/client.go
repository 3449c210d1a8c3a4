package mem

import (
	"context"
	"fmt"
	"sync"
	"time"

	"lull/internal/store"
)

// Kind is the kind of a call of a Client.
type Kind string

// The kinds.
const (
	Range  Kind = "range"
	Commit Kind = "commit"
	Watch  Kind = "watch"
	Grant  Kind = "grant"
	Renew  Kind = "renew"
	Revoke Kind = "revoke"
)

// Call is a call for which a Fault may be injected.
type Call struct {
	Kind Kind
	Txn  store.Txn // of a Commit
}

// Fault is how one call fails. The zero Fault means no fault.
type Fault struct {
	// Latency passes before the call takes effect. A Commit whose context ends
	// during it returns ErrAmbiguous and is not applied.
	Latency time.Duration
	// Err is returned and the call has no effect.
	Err error
	// LoseAnswer makes a Commit return ErrAmbiguous although it is applied: at the
	// return, or Late after it.
	LoseAnswer bool
	Late       time.Duration
}

// Client is one process's view of a DB. It implements store.Store.
type Client struct {
	db *DB

	mu     sync.Mutex
	inject func(Call) Fault
	cut    chan struct{} // closed by Disconnect
	leases map[*store.KeptLease]struct{}
	closed bool
}

var _ store.Store = (*Client)(nil)

// Client returns a new view of db. Close ends its goroutines.
func (db *DB) Client() *Client {
	return &Client{
		db: db, cut: make(chan struct{}),
		leases: map[*store.KeptLease]struct{}{},
	}
}

// Inject makes every following call ask f for its fault; a nil f ends that. f is
// called from the goroutines of the callers.
func (c *Client) Inject(f func(Call) Fault) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inject = f
}

// Partition makes every call fail with ErrUnavailable, and ends all watches with that
// error, until Inject is called.
func (c *Client) Partition() {
	c.Inject(func(Call) Fault {
		return Fault{Err: fmt.Errorf("cannot reach the store: %w", store.ErrUnavailable)}
	})
	c.Disconnect()
}

// Disconnect ends all current watches with ErrUnavailable.
func (c *Client) Disconnect() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.cut)
	c.cut = make(chan struct{})
}

// Close simulates the end of the process: renewals and watches stop, leases are not
// revoked, and every later call returns ErrUnavailable.
func (c *Client) Close() {
	c.Partition()
	c.mu.Lock()
	c.closed = true
	var leases []*store.KeptLease
	for l := range c.leases {
		leases = append(leases, l)
	}
	c.mu.Unlock()
	for _, l := range leases {
		l.Abandon()
	}
}

// enter applies the fault of a call: it waits for its latency and returns its error.
func (c *Client) enter(ctx context.Context, call Call) (Fault, error) {
	if ctx.Err() != nil {
		return Fault{}, fmt.Errorf("cannot %s: %w: %w", call.Kind, store.ErrUnavailable, context.Cause(ctx))
	}
	c.mu.Lock()
	inject, closed := c.inject, c.closed
	c.mu.Unlock()
	if closed {
		return Fault{}, fmt.Errorf("cannot %s: client is closed: %w", call.Kind, store.ErrUnavailable)
	}
	var f Fault
	if inject != nil {
		f = inject(call)
	}
	if f.Latency > 0 {
		timer := time.NewTimer(f.Latency)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			kind := store.ErrUnavailable
			if call.Kind == Commit && len(call.Txn.Then) > 0 {
				kind = store.ErrAmbiguous
			}
			return Fault{}, fmt.Errorf("cannot %s: %w: %w", call.Kind, kind, context.Cause(ctx))
		}
	}
	return f, f.Err
}

// Range implements store.Store.
func (c *Client) Range(ctx context.Context, q store.Query) (store.Page, error) {
	if err := q.Validate(); err != nil {
		return store.Page{}, err
	}
	if _, err := c.enter(ctx, Call{Kind: Range}); err != nil {
		return store.Page{}, err
	}
	return c.db.rangeOf(q)
}

// Commit implements store.Store.
func (c *Client) Commit(ctx context.Context, t store.Txn) (store.Result, error) {
	if err := t.Validate(); err != nil {
		return store.Result{}, err
	}
	f, err := c.enter(ctx, Call{Kind: Commit, Txn: t})
	if err != nil {
		return store.Result{}, err
	}
	if !f.LoseAnswer || len(t.Then) == 0 {
		return c.db.commit(t)
	}
	// The answer is lost, so the result is too, even a refusal.
	apply := func() { _, _ = c.db.commit(t) }
	if f.Late > 0 {
		time.AfterFunc(f.Late, apply)
	} else {
		apply()
	}
	return store.Result{}, fmt.Errorf("cannot commit: the answer was lost: %w", store.ErrAmbiguous)
}

// Watch implements store.Store.
func (c *Client) Watch(ctx context.Context, keys store.Keys, from int64) <-chan store.Batch {
	c.mu.Lock()
	cut := c.cut
	c.mu.Unlock()
	w := &watcher{keys: keys, next: from, more: make(chan struct{}, 1), out: make(chan store.Batch)}
	if from == 0 {
		w.next = c.db.Revision() + 1
	}
	go w.run(ctx, c, cut)
	return w.out
}

// Grant implements store.Store.
func (c *Client) Grant(ctx context.Context, ttl time.Duration) (store.Lease, error) {
	if ttl < time.Second || ttl%time.Second != 0 {
		return nil, fmt.Errorf("cannot grant a lease of %v: not in whole seconds: %w", ttl, store.ErrInvalid)
	}
	clock := func() time.Duration { return time.Since(c.db.start) }
	sent := clock()
	if _, err := c.enter(ctx, Call{Kind: Grant}); err != nil {
		return nil, err
	}
	l := store.Keep(c.db.grant(ttl), ttl, sent, clock, renewer{c})
	c.mu.Lock()
	closed := c.closed
	c.leases[l] = struct{}{}
	c.mu.Unlock()
	if closed {
		l.Abandon()
	}
	return l, nil
}

// renewer is the Renewer of a Client's leases.
type renewer struct{ c *Client }

func (r renewer) Renew(ctx context.Context, id store.LeaseID) error {
	if _, err := r.c.enter(ctx, Call{Kind: Renew}); err != nil {
		return err
	}
	return r.c.db.renew(id)
}

func (r renewer) Revoke(ctx context.Context, id store.LeaseID) error {
	r.c.forget(id)
	if _, err := r.c.enter(ctx, Call{Kind: Revoke}); err != nil {
		return err
	}
	r.c.db.Expire(id)
	return nil
}

func (c *Client) forget(id store.LeaseID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for l := range c.leases {
		if l.ID() == id {
			delete(c.leases, l)
		}
	}
}
