package store

import (
	"errors"
	"fmt"
)

// Kinds of failure, for errors.Is.
var (
	// ErrNotFound means that the key does not exist.
	ErrNotFound = errors.New("not found")
	// ErrConflict means that another client holds or changed the object.
	ErrConflict = errors.New("conflict")
	// ErrCompacted means that the requested history was compacted. The error is
	// a *CompactedError.
	ErrCompacted = errors.New("history is no longer available")
	// ErrLeaseLost means that a lease has ended, or an Ownership was lost.
	ErrLeaseLost = errors.New("lease lost")
	// ErrTooLarge means that a transaction or record exceeds a limit of this
	// package.
	ErrTooLarge = errors.New("too large")
	// ErrNoSpace means that the store is full. Deleting is still possible.
	ErrNoSpace = errors.New("store is full")
	// ErrUnavailable means that the store cannot be reached, or refuses to
	// answer now. The call changed nothing.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrAmbiguous means that the answer to a write was lost. It may have been
	// applied, or may still be.
	ErrAmbiguous = errors.New("outcome is unknown")
	// ErrInvalid means that the call can never succeed unchanged.
	ErrInvalid = errors.New("invalid request")
	// ErrNewer means that a record was written by a newer version of lull.
	ErrNewer = errors.New("written by a newer version")
	// ErrDenied means that the store denies this user the operation.
	ErrDenied = errors.New("permission denied")
)

// CompactedError is the error for history that was compacted; it is an ErrCompacted.
type CompactedError struct {
	// Revision is the first revision that can still be read, or 0 if the store
	// did not report it.
	Revision int64
}

func (e *CompactedError) Error() string {
	if e.Revision == 0 {
		return "cannot read old revision: " + ErrCompacted.Error()
	}
	return fmt.Sprintf("cannot read before revision %d: %v", e.Revision, ErrCompacted)
}

// Is reports whether target is ErrCompacted.
func (e *CompactedError) Is(target error) bool { return target == ErrCompacted }

// HeldError is the error of a Claim of a key that another client owns; it is an
// ErrConflict.
type HeldError struct {
	// Holder is the key's value, as its owner wrote it.
	Holder Value
	// Revision is the revision at which Holder was read.
	Revision int64
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("cannot claim %q: held by lease %x since revision %d", e.Holder.Key, int64(e.Holder.Lease), e.Holder.CreateRevision)
}

// Is reports whether target is ErrConflict.
func (e *HeldError) Is(target error) bool { return target == ErrConflict }
