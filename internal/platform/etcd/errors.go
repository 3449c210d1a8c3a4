package etcd

import (
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"lull/internal/store"
)

// refusals maps the etcd errors that guarantee that nothing was done to the kind
// of store error. After any other error a write may have been applied.
var refusals = map[error]error{
	rpctypes.ErrEmptyKey:         store.ErrInvalid,
	rpctypes.ErrDuplicateKey:     store.ErrInvalid,
	rpctypes.ErrFutureRev:        store.ErrInvalid,
	rpctypes.ErrLeaseTTLTooLarge: store.ErrInvalid,
	rpctypes.ErrTooManyOps:       store.ErrTooLarge,
	rpctypes.ErrRequestTooLarge:  store.ErrTooLarge,
	rpctypes.ErrNoSpace:          store.ErrNoSpace,
	rpctypes.ErrLeaseNotFound:    store.ErrLeaseLost,
	rpctypes.ErrTooManyRequests:  store.ErrUnavailable,
	rpctypes.ErrNoLeader:         store.ErrUnavailable,
	rpctypes.ErrNotCapable:       store.ErrUnavailable,
	rpctypes.ErrUserEmpty:        store.ErrDenied,
	rpctypes.ErrAuthFailed:       store.ErrDenied,
	rpctypes.ErrPermissionDenied: store.ErrDenied,
	rpctypes.ErrInvalidAuthToken: store.ErrDenied,
	rpctypes.ErrAuthOldRevision:  store.ErrUnavailable,
	rpctypes.ErrRootRoleNotExist: store.ErrDenied,
}

// kindOf returns the kind of a refusal, or nil if err does not guarantee that
// nothing was done.
func kindOf(err error) error {
	var known rpctypes.EtcdError
	if errors.As(err, &known) {
		for refusal, kind := range refusals {
			if known == refusal {
				return kind
			}
		}
	}
	if errors.Is(err, rpctypes.ErrCompacted) {
		return &store.CompactedError{}
	}
	// The client itself rejects requests over its own limit.
	if s, ok := status.FromError(err); ok && s.Code() == codes.ResourceExhausted {
		return store.ErrTooLarge
	}
	return nil
}

// writeError returns the store error for an etcd error of a write.
func writeError(what string, err error) error {
	if err == nil {
		return nil
	}
	kind := kindOf(err)
	if kind == nil {
		kind = store.ErrAmbiguous
	}
	return fmt.Errorf("cannot %s: %w: %w", what, kind, err)
}

// readError returns the store error for an etcd error of a call that changes
// nothing.
func readError(what string, err error) error {
	kind := kindOf(err)
	if kind == nil {
		kind = store.ErrUnavailable
	}
	if errors.Is(err, context.Canceled) {
		kind = store.ErrUnavailable
	}
	return fmt.Errorf("cannot %s: %w: %w", what, kind, err)
}
