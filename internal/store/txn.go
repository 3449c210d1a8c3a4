package store

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// Limits of one transaction: etcd's defaults, minus the overhead of its own
// framing.
const (
	// MaxOps is the maximum number of conditions, and of writes and reads
	// together.
	MaxOps = 128
	// MaxTxnBytes is the maximum size of keys and data in a transaction.
	MaxTxnBytes = 1536<<10 - 32<<10
	// MaxKeyBytes is the maximum length of a key.
	MaxKeyBytes = 1024
)

// Target is the property of a key that a Cond checks.
type Target int

// The targets. Each is 0 for a key that does not exist.
const (
	TargetModRevision Target = iota
	TargetCreateRevision
)

// Cond is a condition on one key: its Target must equal Value.
type Cond struct {
	Key    string
	Target Target
	Value  int64
}

// Unchanged returns the condition that the key of v still has the value v; if v does
// not exist, that the key still does not exist.
func Unchanged(v Value) Cond { return Cond{Key: v.Key, Value: v.ModRevision} }

// Absent returns the condition that key does not exist.
func Absent(key string) Cond { return Cond{Key: key, Target: TargetCreateRevision} }

// CreatedAt returns the condition that key exists and was created at revision.
func CreatedAt(key string, revision int64) Cond {
	return Cond{Key: key, Target: TargetCreateRevision, Value: revision}
}

// Holds reports whether v, the value of c.Key, satisfies c.
func (c Cond) Holds(v Value) bool {
	var got int64
	switch c.Target {
	case TargetModRevision:
		got = v.ModRevision
	case TargetCreateRevision:
		got = v.CreateRevision
	}
	return got == c.Value
}

// Op is one write of a transaction: a put, or a delete.
type Op struct {
	Key  string
	Data []byte
	// Lease is the lease that the key is attached to; 0 detaches it.
	Lease  LeaseID
	Delete bool
}

// Put returns a write of data to key. The data must not be changed until the
// transaction is done.
func Put(key string, data []byte) Op { return Op{Key: key, Data: data} }

// PutLeased returns a write of data to key, which is deleted when the lease
// ends.
func PutLeased(key string, data []byte, id LeaseID) Op {
	return Op{Key: key, Data: data, Lease: id}
}

// Delete returns the removal of key. Deleting a missing key is not an error.
func Delete(key string) Op { return Op{Key: key, Delete: true} }

// Txn is a transaction: if every condition of If holds, Then is applied.
type Txn struct {
	If   []Cond
	Then []Op
	// Read are keys to read in the transaction: after Then has been applied, if it
	// is.
	Read []string
}

// Result is the result of a transaction.
type Result struct {
	Succeeded bool
	// Revision is the transaction's revision if it wrote something, otherwise the
	// store's revision at that time.
	Revision int64
	// Read has one Value for each key of Txn.Read, in order.
	Read []Value
}

// Validate returns every fault of t: ErrTooLarge for exceeded limits,
// ErrInvalid for an empty or malformed key, or two writes of one key.
func (t Txn) Validate() error {
	var errs []error
	if n := len(t.If); n > MaxOps {
		errs = append(errs, fmt.Errorf("cannot commit %d conditions, the limit is %d: %w", n, MaxOps, ErrTooLarge))
	}
	if n := len(t.Then) + len(t.Read); n > MaxOps {
		errs = append(errs, fmt.Errorf("cannot commit %d operations, the limit is %d: %w", n, MaxOps, ErrTooLarge))
	}
	size := 0
	for _, c := range t.If {
		size += len(c.Key)
		errs = append(errs, checkKey(c.Key))
	}
	written := make(map[string]bool, len(t.Then))
	for _, op := range t.Then {
		size += len(op.Key) + len(op.Data)
		errs = append(errs, checkKey(op.Key))
		if written[op.Key] {
			errs = append(errs, fmt.Errorf("cannot write %q twice in one transaction: %w", op.Key, ErrInvalid))
		}
		written[op.Key] = true
	}
	for _, key := range t.Read {
		size += len(key)
		errs = append(errs, checkKey(key))
	}
	if size > MaxTxnBytes {
		errs = append(errs, fmt.Errorf("cannot commit %d bytes, the limit is %d: %w", size, MaxTxnBytes, ErrTooLarge))
	}
	return errors.Join(errs...)
}

// Validate returns every fault of q, as an ErrInvalid.
func (q Query) Validate() error {
	switch {
	case q.Limit < 0:
		return fmt.Errorf("cannot read %q: limit %d is negative: %w", q.Keys, q.Limit, ErrInvalid)
	case q.Revision < 0:
		return fmt.Errorf("cannot read %q: revision %d is negative: %w", q.Keys, q.Revision, ErrInvalid)
	case !q.Keys.prefix:
		return checkKey(q.Keys.name)
	}
	return nil
}

func checkKey(key string) error {
	switch {
	case key == "":
		return fmt.Errorf("cannot use an empty key: %w", ErrInvalid)
	case len(key) > MaxKeyBytes:
		return fmt.Errorf("cannot use key %q...: %d bytes, the limit is %d: %w", key[:32], len(key), MaxKeyBytes, ErrTooLarge)
	case !utf8.ValidString(key):
		return fmt.Errorf("cannot use key %q: not UTF-8: %w", key, ErrInvalid)
	}
	return nil
}
