package feed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/lib/delay"
	"lull/internal/store"
)

// Limits of a Hub's buffer of the newest changes.
const (
	heldBatches = 1024
	heldBytes   = 4 << 20
)

// Hub follows the store once for all readers of a server, and reads and encodes
// each entry once. A reader that starts further back, or that does not keep up,
// follows the store itself until it has reached what the Hub holds. Create it
// with NewHub. Without Run every reader follows the store itself.
type Hub struct {
	store  store.Store
	most   int // number of batches held
	begins chan struct{}

	mu      sync.Mutex
	begun   bool
	batches []*batch // oldest first: every change after from
	bytes   int
	from    int64
	at      int64
	more    chan struct{} // closed when there is more
}

// batch is one change of the store.
type batch struct {
	revision int64
	messages []Message
	bytes    int
}

// NewHub returns a Hub over a store.
func NewHub(s store.Store) *Hub {
	return &Hub{store: s, most: heldBatches, begins: make(chan struct{}), more: make(chan struct{})}
}

// String names the hub as a task.
func (h *Hub) String() string { return "the event stream" }

// Ready is closed when the Hub follows the store.
func (h *Hub) Ready() <-chan struct{} { return h.begins }

// Run follows the store until ctx ends. It returns ctx's error.
func (h *Hub) Run(ctx context.Context) error {
	for try := 0; ctx.Err() == nil; try++ {
		err := h.follow(ctx)
		if errors.Is(err, store.ErrCompacted) {
			h.forget()
		}
		if err := delay.For(ctx, backoff(try)); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// follow receives changes from the Hub's position, or from now on, until the
// watch ends.
func (h *Hub) follow(ctx context.Context) error {
	h.mu.Lock()
	begun, at := h.begun, h.at
	h.mu.Unlock()
	if !begun {
		now, err := revision(ctx, h.store)
		if err != nil {
			return err
		}
		at = now
		h.begin(now)
	}
	for b := range h.store.Watch(ctx, audit.Keys(), at+1) {
		if b.Err != nil {
			return b.Err
		}
		h.take(b)
	}
	return nil
}

func (h *Hub) begin(now int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.begun, h.from, h.at = true, now, now
	select {
	case <-h.begins:
	default:
		close(h.begins)
	}
}

// forget drops everything after a gap. Readers notice when they are woken.
func (h *Hub) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.begun, h.batches, h.bytes = false, nil, 0
	close(h.more)
	h.more = make(chan struct{})
}

func (h *Hub) take(b store.Batch) {
	next := &batch{revision: b.Revision, messages: messagesOf(b)}
	for _, m := range next.messages {
		next.bytes += len(m.Data)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if b.Revision <= h.at {
		return
	}
	h.at = b.Revision
	if len(next.messages) == 0 {
		return
	}
	h.batches, h.bytes = append(h.batches, next), h.bytes+next.bytes
	gone := 0
	for len(h.batches)-gone > h.most || h.bytes > heldBytes && len(h.batches)-gone > 1 {
		h.from, h.bytes = h.batches[gone].revision, h.bytes-h.batches[gone].bytes
		gone++
	}
	h.batches = slices.Delete(h.batches, 0, gone)
	close(h.more)
	h.more = make(chan struct{})
}

// after returns the changes after a revision. If there are none, more is closed
// when there are. ok reports whether the Hub holds all that follow.
func (h *Hub) after(at int64) (list []*batch, more <-chan struct{}, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.begun || at < h.from {
		return nil, nil, false
	}
	i, _ := slices.BinarySearchFunc(h.batches, at+1, func(b *batch, r int64) int { return int(b.revision - r) })
	return slices.Clone(h.batches[i:]), h.more, true
}

// holds reports whether a reader at a revision can continue with the Hub.
func (h *Hub) holds(at int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.begun && at >= h.from
}

// errShared and errBehind switch between a reader's own watch and the Hub.
var (
	errShared = errors.New("the hub holds what follows")
	errBehind = errors.New("the hub does not hold what follows")
)

// shared sends the Hub's buffer, and then the changes that the Hub receives.
func (f *follower) shared(ctx context.Context) error {
	quiet := time.NewTimer(idle)
	defer quiet.Stop()
	for {
		list, more, ok := f.hub.after(f.at)
		if !ok {
			return errBehind
		}
		for _, b := range list {
			if err := f.batch(b.revision, b.messages); err != nil {
				return err
			}
		}
		if len(list) > 0 {
			quiet.Reset(idle)
			continue
		}
		select {
		case <-more:
		case <-quiet.C:
			if err := f.send(Message{ID: f.at}); err != nil {
				return err
			}
			quiet.Reset(idle)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// revision reads the revision of the store.
func revision(ctx context.Context, s store.Store) (int64, error) {
	page, err := s.Range(ctx, store.Query{Keys: audit.Keys(), Limit: 1, KeysOnly: true})
	if err != nil {
		return 0, fmt.Errorf("cannot follow the events: %w", err)
	}
	return page.Revision, nil
}
