// Package idempotency makes API calls safe to repeat. The first answer to an
// Idempotency-Key is durable, and every later call with that key gets it, on any
// server and after a restart.
//
// Of two calls with one key at most one runs at a time. A key that was used for
// another request is refused. A stored answer is repeated unchanged for the duration
// Keep. A server that dies before the answer is stored leaves a claim, which ends
// with its lease. The call then runs again and must detect what it did before; Key
// gives it the same name each time. Server errors (5xx) are not stored, so a retry
// runs again. Reading HTTP requests is left to the caller.
package idempotency

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"lull/internal/store"
)

// Keep is the time for which an answer is stored.
const Keep = 24 * time.Hour

// MaxBody is the maximum size of a stored answer, in bytes.
const MaxBody = 256 << 10

const (
	donePrefix  = "replay/done/"
	claimPrefix = "replay/claims/"
)

// Answer is the answer to a call.
type Answer struct {
	Status  int               `json:"status"`
	Headers map[string]string `json:"headers,omitempty"`
	Body    []byte            `json:"body,omitempty"`
}

type record struct {
	Request string    `json:"request"` // hash of the request
	At      time.Time `json:"at"`
	Answer  Answer    `json:"answer"`
}

var codec = store.Codec[record]{Version: 1}

// Errors for a key that cannot be used now.
var (
	// ErrOther means that the key was used for another request.
	ErrOther = errors.New("cannot use the idempotency key again: it was used for another request")
	// ErrRunning means that the first call with the key has not been answered
	// yet.
	ErrRunning = errors.New("cannot run the request a second time: the first with this idempotency key has not been answered yet")
)

// Log stores answers. The zero value is not usable.
type Log struct {
	store store.Store
	lease store.Lease

	mu      sync.Mutex
	running map[string]bool // keys claimed by this server, all under one lease
	left    map[string]int  // keys whose claim may remain although no call runs, with the number of checks still to make
}

// New returns a Log whose claims end with lease.
func New(s store.Store, lease store.Lease) *Log {
	return &Log{store: s, lease: lease, running: map[string]bool{}, left: map[string]int{}}
}

// enter claims key within this process; false if another call has it.
func (l *Log) enter(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running[key] {
		return false
	}
	l.running[key] = true
	return true
}

func (l *Log) leave(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.running, key)
}

// Key returns a name for the calls of one principal with one idempotency key. It is
// the same each time.
func Key(principal, given string) string {
	sum := sha256.Sum256([]byte(principal + "\x00" + given))
	return hex.EncodeToString(sum[:20])
}

// Claim is the right to run a call. It must be ended with Done or Drop.
type Claim struct {
	log     *Log
	owner   *store.Ownership
	key     string
	request string
}

// Begin returns either the earlier answer for key, or a Claim to run the call now.
// request is a hash that identifies the call. Errors: ErrOther, ErrRunning, and those
// of the store.
func (l *Log) Begin(ctx context.Context, key, request string) (*Answer, *Claim, error) {
	if a, err := l.answer(ctx, key, request); a != nil || err != nil {
		return a, nil, err
	}
	if !l.enter(key) {
		return nil, nil, ErrRunning
	}
	o, err := store.Claim(ctx, l.store, l.lease, claimPrefix+key, []byte(`{"v":1}`))
	var held *store.HeldError
	switch {
	case errors.As(err, &held):
		l.leave(key)
		return nil, nil, ErrRunning
	case err != nil:
		l.leaveBehind(key) // the write may have succeeded after all
		return nil, nil, fmt.Errorf("cannot use the idempotency key: %w", err)
	}
	// The first call may have ended between the read and the claim.
	a, err := l.answer(ctx, key, request)
	c := &Claim{log: l, owner: o, key: key, request: request}
	if a != nil || err != nil {
		return a, nil, errors.Join(err, c.Drop(ctx))
	}
	return nil, c, nil
}

func (l *Log) answer(ctx context.Context, key, request string) (*Answer, error) {
	v, err := store.Get(ctx, l.store, donePrefix+key)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot look up the idempotency key: %w", err)
	}
	r, err := codec.Decode(v.Key, v.Data)
	switch {
	case err != nil:
		return nil, err
	case r.Request != request:
		return nil, ErrOther
	}
	return &r.Answer, nil
}

// Done stores the answer and ends the claim. An answer with status 500 or
// above, or larger than MaxBody, is not stored.
func (c *Claim) Done(ctx context.Context, a Answer) error {
	if a.Status >= 500 || len(a.Body) > MaxBody {
		return c.Drop(ctx)
	}
	key := donePrefix + c.key
	_, err := store.Update(ctx, c.log.store, key, func(store.Value) ([]byte, []store.Op, error) {
		data, err := codec.Encode(key, record{Request: c.request, At: time.Now().UTC().Round(time.Second), Answer: a})
		return data, []store.Op{store.Delete(c.owner.Key)}, err
	})
	if err == nil {
		c.log.leave(c.key)
		return nil
	}
	return errors.Join(fmt.Errorf("cannot keep the answer for its idempotency key: %w", err), c.Drop(ctx))
}

// Drop ends the claim without storing an answer.
func (c *Claim) Drop(ctx context.Context) error {
	defer c.log.leave(c.key)
	if err := c.owner.Resign(ctx); err != nil {
		c.log.leaveBehind(c.key)
		return fmt.Errorf("cannot release the idempotency key: %w", err)
	}
	return nil
}

// looks is how many times a claim that was left behind must be found missing: a write
// with an unknown outcome may still arrive after the first check.
const looks = 2

func (l *Log) leaveBehind(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.running, key)
	l.left[key] = looks
}

// ReleaseEnded releases the claims of calls that ended while the store did not
// answer; otherwise, other servers would refuse those keys for as long as this server
// runs. It must be called regularly.
func (l *Log) ReleaseEnded(ctx context.Context) error {
	l.mu.Lock()
	keys := slices.Collect(maps.Keys(l.left))
	l.mu.Unlock()
	var errs []error
	for _, key := range keys {
		if !l.enter(key) {
			continue // the running call will end its claim itself
		}
		gone, err := l.endClaim(ctx, claimPrefix+key)
		errs = append(errs, err)
		l.mu.Lock()
		delete(l.running, key)
		if gone {
			if l.left[key]--; l.left[key] <= 0 {
				delete(l.left, key)
			}
		}
		l.mu.Unlock()
	}
	return errors.Join(errs...)
}

// endClaim removes the claim of key if it is this server's. gone reports whether
// there was no claim.
func (l *Log) endClaim(ctx context.Context, key string) (gone bool, err error) {
	v, err := store.Get(ctx, l.store, key)
	switch {
	case errors.Is(err, store.ErrNotFound), err == nil && v.Lease != l.lease.ID():
		return true, nil
	case err == nil:
		_, err = l.store.Commit(ctx, store.Txn{If: []store.Cond{store.CreatedAt(key, v.CreateRevision)}, Then: []store.Op{store.Delete(key)}})
	}
	if err != nil {
		return false, fmt.Errorf("cannot release an idempotency key: %w", err)
	}
	return false, nil
}

// Sweep removes answers older than Keep and returns how many.
func (l *Log) Sweep(ctx context.Context, now time.Time) (int, error) {
	removed, after := 0, ""
	for {
		page, err := l.store.Range(ctx, store.Query{Keys: store.Prefix(donePrefix), After: after, Limit: 100})
		if err != nil {
			return removed, fmt.Errorf("cannot sweep old answers: %w", err)
		}
		var ops []store.Op
		for _, v := range page.Values {
			after = v.Key
			if r, err := codec.Decode(v.Key, v.Data); err != nil || now.Sub(r.At) > Keep {
				ops = append(ops, store.Delete(v.Key))
			}
		}
		if len(ops) > 0 {
			if _, err := l.store.Commit(ctx, store.Txn{Then: ops}); err != nil {
				return removed, fmt.Errorf("cannot sweep old answers: %w", err)
			}
			removed += len(ops)
		}
		if !page.More {
			return removed, nil
		}
	}
}
