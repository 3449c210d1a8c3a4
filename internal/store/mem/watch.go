package mem

import (
	"context"
	"fmt"

	"lull/internal/store"
)

// watcher is one watch. Its queue is guarded by db.mu. run takes batches from the
// queue and delivers them without the lock.
type watcher struct {
	keys  store.Keys
	next  int64 // earlier revisions are not delivered
	queue []store.Batch
	more  chan struct{}
	out   chan store.Batch
}

// add queues the part of b that belongs to the watch. db.mu must be held.
func (w *watcher) add(b store.Batch) {
	if b.Revision < w.next {
		return
	}
	mine := store.Batch{Revision: b.Revision}
	for _, e := range b.Events {
		if w.keys.Contains(e.Value.Key) {
			mine.Events = append(mine.Events, e)
		}
	}
	if len(mine.Events) == 0 {
		return
	}
	w.queue = append(w.queue, mine)
	select {
	case w.more <- struct{}{}:
	default:
	}
}

// register queues the history from w.next on, and adds w to the watchers.
func (db *DB) register(w *watcher) error {
	db.mu.Lock()
	defer db.mu.Unlock()
	if w.next < db.compacted {
		return &store.CompactedError{Revision: db.compacted}
	}
	for _, b := range db.history {
		w.add(b)
	}
	db.watchers[w] = struct{}{}
	return nil
}

func (db *DB) unregister(w *watcher) {
	db.mu.Lock()
	defer db.mu.Unlock()
	delete(db.watchers, w)
}

func (db *DB) take(w *watcher) []store.Batch {
	db.mu.Lock()
	defer db.mu.Unlock()
	queue := w.queue
	w.queue = nil
	return queue
}

func (w *watcher) run(ctx context.Context, c *Client, cut <-chan struct{}) {
	defer close(w.out)
	if _, err := c.enter(ctx, Call{Kind: Watch}); err != nil {
		w.send(ctx, nil, store.Batch{Err: err})
		return
	}
	if err := c.db.register(w); err != nil {
		w.send(ctx, nil, store.Batch{Err: err})
		return
	}
	defer c.db.unregister(w)
	for {
		select {
		case <-ctx.Done():
			return
		case <-cut:
		case <-w.more:
		}
		for _, b := range c.db.take(w) {
			if !w.send(ctx, cut, b) {
				break
			}
		}
		select {
		case <-cut:
			w.send(ctx, nil, store.Batch{Err: fmt.Errorf("cannot continue watching %q: %w", w.keys, store.ErrUnavailable)})
			return
		default:
		}
	}
}

// send passes b to the reader, unless ctx ends or the client is cut off.
func (w *watcher) send(ctx context.Context, cut <-chan struct{}, b store.Batch) bool {
	select {
	case w.out <- b:
		return true
	case <-ctx.Done():
		return false
	case <-cut:
		return false
	}
}
