// Package store is the contract between lull and the one place that holds
// its state: an ordered key space with revisions, transactions, watches and
// leases, in the terms of etcd.
//
// It guarantees, for every implementation that passes the suite in
// storetest:
//
//   - each Commit is atomic and gets one revision, larger than every earlier
//     one; a Range sees one revision; both are linearizable;
//   - a Watch delivers each revision that touches its keys exactly once, in
//     order and whole, or ends with an error that says why;
//   - a write whose answer was lost returns ErrAmbiguous and is never reported
//     as refused; Update and Transact determine the outcome;
//   - when a lease has ended, no Commit guarded by its Ownership succeeds.
//
// In addition to the four methods of Store it has what every writer needs:
// Update and Transact (compare-and-swap with retry), Claim and Campaign
// (ownership by key and lease), Follow (list, then watch) and Codec
// (versioned records). It defines neither the content of the records nor how a
// store is opened; platform/etcd opens one, and mem does so for tests.
//
// Keys are UTF-8 text with '/' between their parts. No record or key here
// holds metrics or heartbeats; they change too often for a replicated log.
package store

import (
	"context"
	"time"
)

// Store is the state of a fleet. It is safe for concurrent use.
//
// If a context ends while a write is in progress, the write returns
// ErrAmbiguous. An implementation also bounds each call by itself, so that a
// store that cannot be reached never blocks a caller forever.
type Store interface {
	// Range reads the keys of q at one revision.
	// Errors: ErrCompacted, ErrInvalid, ErrUnavailable.
	Range(ctx context.Context, q Query) (Page, error)

	// Commit runs t as one transaction. A condition that does not hold is
	// not an error: the Result then has Succeeded false. A transaction
	// that writes nothing takes no revision.
	// Errors: ErrTooLarge, ErrInvalid, ErrNoSpace, ErrLeaseLost (a put
	// names a lease that has ended), ErrUnavailable (not applied),
	// ErrAmbiguous (may or may not be applied, now or later).
	Commit(ctx context.Context, t Txn) (Result, error)

	// Watch reports the changes of keys from revision from on, or from now if
	// from is 0. The channel is closed when ctx ends or after a Batch with Err
	// set, which is the last one. The reader must read until then or cancel ctx;
	// pending batches are kept in memory.
	Watch(ctx context.Context, keys Keys, from int64) <-chan Batch

	// Grant creates a lease, which is renewed in the background every third of ttl
	// until Revoke. ttl must be whole seconds, at least one. ctx limits the call, not
	// the lease.
	Grant(ctx context.Context, ttl time.Duration) (Lease, error)
}

// Keys selects one key, or all keys with a prefix.
type Keys struct {
	name   string
	prefix bool
}

// Key returns the Keys with exactly the key name.
func Key(name string) Keys { return Keys{name: name} }

// Prefix returns the Keys that begin with p. The empty prefix selects every
// key.
func Prefix(p string) Keys { return Keys{name: p, prefix: true} }

// Name returns the key or the prefix.
func (k Keys) Name() string { return k.name }

// IsPrefix reports whether Name is a prefix.
func (k Keys) IsPrefix() bool { return k.prefix }

// Contains reports whether key is one of k.
func (k Keys) Contains(key string) bool {
	if !k.prefix {
		return key == k.name
	}
	return len(key) >= len(k.name) && key[:len(k.name)] == k.name
}

// String returns the key, or the prefix with a star.
func (k Keys) String() string {
	if k.prefix {
		return k.name + "*"
	}
	return k.name
}

// Query specifies the keys and values of a Range.
type Query struct {
	Keys Keys
	// After excludes all keys up to and including it. If empty, the page begins at
	// the first key.
	After string
	// Limit is the maximum number of values in the page; 0 means no limit.
	Limit int
	// Revision is the revision to read at; 0 means the newest. To read all pages of a
	// listing from one snapshot, pass Page.Revision of the first page.
	Revision int64
	// KeysOnly omits the data.
	KeysOnly bool
}

// Page is the answer to a Query, in the order of the keys.
type Page struct {
	Values []Value
	// Revision is the store's revision at the time of the read, or Query.Revision.
	Revision int64
	// More reports whether there are keys after the last one.
	More bool
}

// LeaseID identifies a lease; 0 means none.
type LeaseID int64

// Value is the content of a key. For a key that does not exist, only Key is
// set.
type Value struct {
	Key string
	// Data must not be modified: a store may pass the same bytes to other
	// readers.
	Data []byte
	// ModRevision is the revision of the key's last change. CreateRevision is the
	// revision at which the key was created, since it was last absent.
	ModRevision, CreateRevision int64
	// Version is the number of changes since the key was created, from 1.
	Version int64
	Lease   LeaseID
}

// Exists reports whether the key exists.
func (v Value) Exists() bool { return v.CreateRevision > 0 }

// Batch is every change to the watched keys that one transaction made.
type Batch struct {
	// Revision is the transaction's revision. A Batch without events only says that
	// everything up to Revision has been delivered; the store may send such batches
	// at any time, or never.
	Revision int64
	Events   []Event
	// Err is why the watch ended: ErrCompacted (read the keys again, and watch from
	// there) or ErrUnavailable (watch again from the revision after the last one).
	// The channel is closed after it.
	Err error
}

// Event is the change of one key.
type Event struct {
	// Deleted means that the key was deleted. Value then has only Key and
	// ModRevision.
	Deleted bool
	Value   Value
}

// Lease is a lease in the store. It expires unless it is renewed, and the keys put
// with it are deleted when it ends. It is safe for concurrent use.
type Lease interface {
	ID() LeaseID
	// TTL is the time for which the lease outlives its last renewal.
	TTL() time.Duration
	// Remaining returns how long the lease is certainly held if no renewal succeeds,
	// counted from when the last successful renewal was sent; 0 if the lease is lost.
	// Time during which the machine slept counts.
	Remaining() time.Duration
	// Lost returns a channel that is closed when the lease has ended or is no longer
	// certain: it was revoked, or its TTL passed without a renewal.
	Lost() <-chan struct{}
	// Revoke ends the lease and its renewal, and closes Lost. If it fails, renewal
	// still ends and Lost is closed; the store then drops the lease one TTL after the
	// last renewal.
	Revoke(ctx context.Context) error
}
