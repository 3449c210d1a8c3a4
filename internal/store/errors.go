package store

import (
	"errors"
	"fmt"
)

// The kinds of failure, to be tested with errors.Is.
var (
	// ErrNotFound: the key does not exist.
	ErrNotFound = errors.New("not found")
	// ErrConflict means that another client holds or changed the object.
	ErrConflict = errors.New("conflict")
	// ErrCompacted: the history asked for is gone. The error is a
	// *CompactedError.
	ErrCompacted = errors.New("history is gone")
	// ErrLeaseLost: a lease has ended, or an Ownership was lost.
	ErrLeaseLost = errors.New("lease lost")
	// ErrTooLarge: a transaction or record is over a limit of this package.
	ErrTooLarge = errors.New("too large")
	// ErrNoSpace: the store refuses to grow. Deleting is still possible.
	ErrNoSpace = errors.New("store is full")
	// ErrUnavailable: the store cannot be reached, or refuses to answer
	// now. Nothing was changed by the call.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrAmbiguous: the answer to a write was lost. It may have been
	// applied, or may yet be.
	ErrAmbiguous = errors.New("outcome is unknown")
	// ErrInvalid: the call can never succeed as it is.
	ErrInvalid = errors.New("invalid request")
	// ErrNewer: a record was written by a newer version of lull.
	ErrNewer = errors.New("written by a newer version")
	// ErrDenied: the store does not let this user do that.
	ErrDenied = errors.New("permission denied")
)

// CompactedError is an ErrCompacted with how far the history is gone.
type CompactedError struct {
	// Revision is the first revision that can still be read, or 0 if the
	// store did not say.
	Revision int64
}

func (e *CompactedError) Error() string {
	if e.Revision == 0 {
		return "cannot read old revision: " + ErrCompacted.Error()
	}
	return fmt.Sprintf("cannot read before revision %d: %v", e.Revision, ErrCompacted)
}

// Is makes a CompactedError an ErrCompacted.
func (e *CompactedError) Is(target error) bool { return target == ErrCompacted }

// HeldError is the ErrConflict of a Claim: another client owns the key.
type HeldError struct {
	// Holder is the key as its owner wrote it.
	Holder Value
	// Revision is when that was read.
	Revision int64
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("cannot claim %q: held by lease %x since revision %d", e.Holder.Key, int64(e.Holder.Lease), e.Holder.CreateRevision)
}

// Is makes a HeldError an ErrConflict.
func (e *HeldError) Is(target error) bool { return target == ErrConflict }
