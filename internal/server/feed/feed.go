// Package feed is the event stream of a fleet: every audit entry, with the store's
// revision as its ID.
//
// A reader resumes after the last ID it got, on any server of the fleet. It then
// misses nothing and gets nothing twice, or it gets a Reset that says that the missed
// entries are gone. Entries of one change share its revision. Only the last of them
// carries the ID, so a reader that was cut off between them gets the complete change
// again. HTTP is left to the caller.
package feed

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/lib/delay"
	"lull/internal/store"
)

// Message is one message of the stream: an entry, a reset, or only a new position.
type Message struct {
	// ID is the position after this message, from which a reader can resume. 0 means
	// that a reader must not resume here.
	ID    int64
	Entry *audit.Entry // shared by all readers; read-only
	Data  []byte       // Entry in JSON
	// Reset, if not empty, says why entries before ID may have been missed.
	Reset string
}

// Start is where a stream begins.
type Start struct {
	// After is the last ID the reader got, if Known. Otherwise the reader gets
	// only what happens from now on.
	After int64
	Known bool
}

// idle is how long the stream is silent before it reports its position.
const idle = 15 * time.Second

// Follow calls send with every message after start until ctx ends or send fails, and
// returns that error. While the store is unreachable, it waits.
func (h *Hub) Follow(ctx context.Context, start Start, send func(Message) error) error {
	f := follower{hub: h, store: h.store, send: send}
	if err := f.begin(ctx, start); err != nil {
		return err
	}
	for try := 0; ctx.Err() == nil; try++ {
		err := f.next(ctx)
		switch {
		case err == nil, errors.Is(err, store.ErrUnavailable):
			err = delay.For(ctx, backoff(try))
		case errors.Is(err, store.ErrCompacted):
			err = f.reset(ctx, "some events are no longer retained")
			try = 0
		}
		if err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

type follower struct {
	hub   *Hub
	store store.Store
	send  func(Message) error
	at    int64 // everything up to this revision has been sent
}

// next reads from a watch of its own until the hub's buffer covers the follower's
// position, then from the hub for as long as it does. It returns the error that ended
// this.
func (f *follower) next(ctx context.Context) error {
	for {
		err := f.watch(ctx)
		if !errors.Is(err, errShared) {
			return err
		}
		if err := f.shared(ctx); !errors.Is(err, errBehind) {
			return err
		}
	}
}

// begin determines the position at which the stream starts, and sends it.
func (f *follower) begin(ctx context.Context, start Start) error {
	now, err := revision(ctx, f.store)
	if err != nil {
		return err
	}
	if start.Known && start.After > now {
		f.at = now
		return f.send(Message{ID: now, Reset: "the last event ID belongs to another or a restored store"})
	}
	f.at = now
	if start.Known {
		f.at = start.After
	}
	return f.send(Message{ID: f.at})
}

func (f *follower) reset(ctx context.Context, why string) error {
	now, err := revision(ctx, f.store)
	for try := 0; errors.Is(err, store.ErrUnavailable) && delay.For(ctx, backoff(try)) == nil; try++ {
		now, err = revision(ctx, f.store)
	}
	if err != nil {
		return err
	}
	f.at = now
	return f.send(Message{ID: now, Reset: why})
}

// watch sends changes from a watch of the store. It returns errShared when the hub's
// buffer covers the position, and otherwise the error of the watch.
func (f *follower) watch(parent context.Context) error {
	if f.hub.holds(f.at) {
		return errShared
	}
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	batches := f.store.Watch(ctx, audit.Keys(), f.at+1)
	quiet := time.NewTimer(idle)
	defer quiet.Stop()
	for {
		select {
		case <-quiet.C:
			if err := f.send(Message{ID: f.at}); err != nil {
				return err
			}
			quiet.Reset(idle)
		case b, ok := <-batches:
			if !ok {
				return context.Cause(parent)
			}
			if b.Err != nil {
				return b.Err
			}
			if err := f.batch(b.Revision, messagesOf(b)); err != nil {
				return err
			}
			if f.hub.holds(f.at) {
				return errShared
			}
			if len(b.Events) > 0 {
				quiet.Reset(idle)
			}
		}
	}
}

// batch sends the messages of one change.
func (f *follower) batch(revision int64, messages []Message) error {
	for _, m := range messages {
		if err := f.send(m); err != nil {
			return err
		}
	}
	f.at = max(f.at, revision)
	return nil
}

// messagesOf returns the entries of one change. An unreadable entry is included as
// unreadable.
func messagesOf(b store.Batch) []Message {
	var out []Message
	for _, e := range b.Events {
		if e.Deleted {
			continue
		}
		entry, err := audit.DecodeEntry(e.Value)
		var data []byte
		if err == nil {
			data, err = json.Marshal(entry)
		}
		if err != nil {
			entry = audit.Entry{ID: b.Revision, At: time.Now().UTC(), Action: "unreadable_entry", Detail: err.Error()}
			data, _ = json.Marshal(entry) // plain values
		}
		out = append(out, Message{Entry: &entry, Data: data})
	}
	if n := len(out); n > 0 {
		out[n-1].ID = b.Revision
	}
	return out
}

// backoff grows from 20 ms to 2 s.
func backoff(try int) time.Duration { return min(2*time.Second, 20*time.Millisecond<<min(try, 7)) }
