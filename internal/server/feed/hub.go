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

// Hub follows the store once for all readers of a server, and decodes and encodes
// each entry once. A reader that starts before the Hub's buffer, or falls behind it,
// follows the store itself until it has caught up. Create a Hub with NewHub. Without
// Run, every reader follows the store itself.
type Hub struct {
	store  store.Store
	most   int // number of batches held
	begins chan struct{}

	mu      sync.Mutex
	begun   bool
	batches []*batch // oldest first: every change after revision from
	bytes   int
	from    int64
	at      int64
	more    chan struct{} // closed when the next batch arrives
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

// Ready is closed once the Hub follows the store.
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

// follow receives changes from the Hub's position, or from now on if it has none,
// until the watch ends.
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

// forget drops the buffer after a gap, and wakes the readers, which then follow the
// store themselves.
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

// after returns the changes after revision at. If there are none yet, more is closed
// when the next one arrives. ok is false if the buffer no longer covers at.
func (h *Hub) after(at int64) (list []*batch, more <-chan struct{}, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.begun || at < h.from {
		return nil, nil, false
	}
	i, _ := slices.BinarySearchFunc(h.batches, at+1, func(b *batch, r int64) int { return int(b.revision - r) })
	return slices.Clone(h.batches[i:]), h.more, true
}

// holds reports whether the buffer covers a reader at revision at.
func (h *Hub) holds(at int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.begun && at >= h.from
}

// errShared makes a reader switch from its own watch to the Hub, and errBehind back.
var (
	errShared = errors.New("the hub holds what follows")
	errBehind = errors.New("the hub does not hold what follows")
)

// shared sends changes from the Hub, until the reader falls behind.
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
