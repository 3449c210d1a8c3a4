package store

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Renewer renews and revokes the lease of a KeptLease.
type Renewer interface {
	// Renew extends the lease to its TTL from now. ErrLeaseLost means that the
	// store does not have it; after any other error Renew is retried.
	Renew(ctx context.Context, id LeaseID) error
	// Revoke ends the lease. Revoking a lease that has ended is not an error.
	Revoke(ctx context.Context, id LeaseID) error
}

// KeptLease is the Lease of every implementation: it renews itself until it
// is revoked, abandoned or lost.
type KeptLease struct {
	id      LeaseID
	ttl     time.Duration
	clock   func() time.Duration
	renewer Renewer
	stop    context.CancelFunc
	ended   chan struct{} // closed when the renewal loop has ended
	lost    chan struct{}

	mu      sync.Mutex
	renewed time.Duration // by clock, when the request of the last successful renewal was sent
	gone    bool
}

var _ Lease = (*KeptLease)(nil)

// Keep starts renewing a lease that the store has granted. sent is when the request
// was sent, by clock. clock must also advance while the machine sleeps.
func Keep(id LeaseID, ttl, sent time.Duration, clock func() time.Duration, r Renewer) *KeptLease {
	ctx, stop := context.WithCancel(context.Background())
	l := &KeptLease{
		id: id, ttl: ttl, clock: clock, renewer: r, stop: stop, renewed: sent,
		ended: make(chan struct{}), lost: make(chan struct{}),
	}
	go l.run(ctx)
	return l
}

// ID returns the id.
func (l *KeptLease) ID() LeaseID { return l.id }

// TTL returns the time to live.
func (l *KeptLease) TTL() time.Duration { return l.ttl }

// Lost returns a channel that is closed when the lease is lost.
func (l *KeptLease) Lost() <-chan struct{} { return l.lost }

// Remaining returns for how long the lease is certainly held.
func (l *KeptLease) Remaining() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return 0
	}
	return max(0, l.renewed+l.ttl-l.clock())
}

// Revoke ends the lease.
func (l *KeptLease) Revoke(ctx context.Context) error {
	l.Abandon()
	return l.renewer.Revoke(ctx, l.id)
}

// Abandon stops the renewal and marks the lease as lost without telling the
// store, like a killed process.
func (l *KeptLease) Abandon() {
	l.stop()
	<-l.ended
	l.lose()
}

func (l *KeptLease) lose() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.gone {
		l.gone = true
		close(l.lost)
	}
}

// run renews the lease every third of the TTL, sooner after a failure, and gives up
// when the TTL has passed. A renewal that hangs cannot delay that, because its
// context ends with the lease.
func (l *KeptLease) run(ctx context.Context) {
	defer close(l.ended)
	timer := time.NewTimer(l.ttl / 3)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		left := l.Remaining()
		if left == 0 {
			l.lose()
			return
		}
		sent := l.clock()
		call, cancel := context.WithTimeout(ctx, left)
		err := l.renewer.Renew(call, l.id)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, ErrLeaseLost):
			l.lose()
			return
		case err == nil && l.Remaining() > 0:
			l.mu.Lock()
			l.renewed = sent
			l.mu.Unlock()
			timer.Reset(l.ttl / 3)
		default:
			timer.Reset(min(l.ttl/10, l.Remaining()))
		}
	}
}
