package notify

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/settings"
	"lull/internal/lib/delay"
	"lull/internal/store"
)

// line delivers for one channel: it follows the log, queues the events that the
// channel wants, and sends them.
type line struct {
	n       *Notifier
	name    string
	channel channel.Channel
	set     settings.Settings
	to      receiver
	guard   store.Cond
	state   channel.Delivery
	q       *queue
	wrote   time.Time        // when the progress was last written
	last    channel.Delivery // the progress that was last written
	died    bool             // dead letters were written since then
	again   []channel.DeadLetter
	rests   []*channel.Rest // oldest first
	tried   time.Time       // when the receiver was last tried
	asked   time.Time       // until when the receiver asked not to be contacted
	retry   <-chan channel.DeadLetter
	backoff int
}

const (
	parallel    = 8                // concurrent messages of one channel
	rejectTries = 3                // attempts for a message that the receiver itself rejects
	firstWait   = time.Second      // after the first failure of the receiver
	longestWait = 5 * time.Minute  // maximum between two attempts
	urgentWait  = 30 * time.Second // maximum delay while an urgent event is pending
	writeEvery  = 30 * time.Second // interval at which a cursor that only skipped entries is written
)

// run delivers until ctx ends. It handles failures of the receiver, and returns those
// of the store or the loss of the right to deliver.
func (l *line) run(ctx context.Context) error {
	if err := l.load(ctx); err != nil {
		return err
	}
	defer l.to.close()
	defer l.n.count.rest(l.name)
	for ctx.Err() == nil {
		err := l.follow(ctx)
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, store.ErrCompacted):
			if err := l.scan(ctx); err != nil && !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrCompacted) {
				return err
			}
		case err != nil && !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrAmbiguous):
			return err
		}
		if err != nil {
			_ = delay.For(ctx, time.Second)
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	return l.write(last, true)
}

// load reads the channel's progress. A new channel begins at the current end of the
// log.
func (l *line) load(ctx context.Context) error {
	v, err := l.n.store.Commit(ctx, store.Txn{Read: []string{channel.DeliveryKey(l.name)}})
	if err != nil {
		return fmt.Errorf("cannot read the position of channel %q: %w", l.name, err)
	}
	d, err := channel.DecodeDelivery(v.Read[0])
	if err != nil {
		return err
	}
	if d == nil {
		d = &channel.Delivery{Channel: l.name, Cursor: v.Revision}
	}
	l.state, l.q = *d, newQueue(d)
	l.state.Type = l.channel.Type
	if err := l.loadRests(ctx); err != nil {
		return err
	}
	l.n.count.begin(l.name)
	return l.write(ctx, true)
}

// follow watches the log from the queue's position and sends meanwhile. When the
// queue is full it drains it and returns nil.
func (l *line) follow(ctx context.Context) error {
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	batches := l.n.store.Watch(watch, audit.Keys(), l.q.seen+1)
	for {
		if l.q.full() {
			cancel()
			return l.drain(ctx)
		}
		at := l.wake()
		timer := time.NewTimer(max(0, time.Until(at)))
		if at.IsZero() {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case b, ok := <-batches:
			timer.Stop()
			if !ok {
				return fmt.Errorf("cannot follow the log: %w", store.ErrUnavailable)
			}
			if b.Err != nil {
				return b.Err
			}
			l.take(b)
		case d := <-l.retry:
			timer.Stop()
			l.again = append(l.again, d)
		case <-timer.C:
			if err := l.send(ctx); err != nil {
				return err
			}
		}
		if err := l.write(ctx, false); err != nil {
			return err
		}
	}
}

// drain sends without reading more, until half of the queue is empty.
func (l *line) drain(ctx context.Context) error {
	for len(l.q.open) > maxOpen/2 {
		if delay.For(ctx, time.Until(l.wake())) != nil {
			return nil
		}
		if err := l.send(ctx); err != nil {
			return err
		}
		if err := l.write(ctx, false); err != nil {
			return err
		}
	}
	return nil
}

// wake returns when something is next due.
func (l *line) wake() time.Time {
	at := l.q.wake()
	for _, r := range l.firstRests() {
		if at.IsZero() || r.NextTryAt.Before(at) {
			at = r.NextTryAt
		}
	}
	if t := l.wrote.Add(writeEvery); l.pending() != l.last.Pending && (at.IsZero() || t.Before(at)) {
		at = t // an overdue retry must still be written, to be shown
	}
	if len(l.again) > 0 {
		at = time.Now()
	}
	if n := l.nextTry(); !at.IsZero() && n.After(at) {
		at = n
	}
	return at
}

// pending returns the number of events and mails that are known to be pending, due or
// not.
func (l *line) pending() int { return len(l.q.open) + len(l.rests) }

// nextTry returns when a failing receiver is tried again; zero if the receiver does
// not fail.
func (l *line) nextTry() time.Time {
	n := l.state.NextTryAt
	if n == nil {
		return time.Time{}
	}
	if soon := l.tried.Add(urgentWait); soon.Before(*n) && len(l.q.pressing(time.Now())) > 0 {
		if l.asked.After(soon) {
			return l.asked
		}
		return soon
	}
	return *n
}

// take queues the events of one change that the channel wants.
func (l *line) take(b store.Batch) {
	var found []*item
	for _, e := range b.Events {
		if !e.Deleted {
			found = append(found, l.items(e.Value)...)
		}
	}
	inOrder(found)
	for _, it := range found {
		l.q.add(it)
	}
	l.q.seen = max(l.q.seen, b.Revision)
}

// items returns the events of an entry that the channel wants.
func (l *line) items(v store.Value) []*item {
	e, err := audit.DecodeEntry(v)
	if err != nil {
		l.n.log.Error("record cannot be read", "key", v.Key, "err", err)
		l.n.count.unreadable.Inc()
		return nil
	}
	var out []*item
	for i, event := range e.Events {
		if !l.channel.Wants(&e, event) {
			continue
		}
		it := &item{id: audit.EventID(v.Key, i), rev: v.ModRevision, key: v.Key, index: i, event: event, entry: e}
		it.due, it.together = l.channel.Due(e.At, event, l.set.Zone())
		it.urgent = l.channel.IsUrgent(event)
		out = append(out, it)
	}
	return out
}

// scan reads the log's entries themselves, because the store no longer has the
// history to watch. It queues the oldest unread events, as many as fit.
func (l *line) scan(ctx context.Context) error {
	var found []*item
	var revision, upTo int64
	q := store.Query{Keys: audit.Keys(), Limit: 500}
	for {
		page, err := l.n.store.Range(ctx, q)
		if err != nil {
			return fmt.Errorf("cannot read the log: %w", err)
		}
		q.Revision, revision = page.Revision, page.Revision
		for _, v := range page.Values {
			q.After = v.Key
			if v.ModRevision > l.q.seen && (upTo == 0 || v.ModRevision <= upTo) {
				found = append(found, l.items(v)...)
			}
		}
		if len(found) > 2*maxOpen {
			inOrder(found)
			upTo = found[maxOpen].rev
			found = slices.DeleteFunc(found, func(it *item) bool { return it.rev > upTo })
		}
		if !page.More {
			break
		}
	}
	inOrder(found)
	for _, it := range found {
		l.q.add(it)
	}
	l.q.seen = revision
	if upTo > 0 {
		l.q.seen = upTo
	}
	return nil
}

// outcome is the result of one message.
type outcome struct {
	items   []*item
	message message
	err     error
}

// send sends what is due: several messages at a time, or one at a time while the
// receiver fails.
func (l *line) send(ctx context.Context) error {
	now, most := time.Now(), parallel
	if l.state.FailingSince != nil {
		most = 1
	}
	var results []outcome
	for _, items := range l.q.ready(now, most) {
		m := l.message(now, items)
		m.held = l.held(items[0].stream())
		results = append(results, outcome{items: items, message: m})
		if l.q.freeze(items) {
			if err := l.write(ctx, true); err != nil {
				return err
			}
		}
	}
	var wg sync.WaitGroup
	for i := range results {
		wg.Go(func() { results[i].err = l.to.send(ctx, results[i].message) })
	}
	wg.Wait()
	if len(results) > 0 {
		l.tried = time.Now()
	}
	if ctx.Err() != nil {
		// If such a message did arrive, it is delivered again with the same ID.
		results = slices.DeleteFunc(results, func(r outcome) bool { return r.err != nil })
	}
	ops := l.resend(ctx)
	for _, r := range results {
		ops = append(ops, l.recordOutcome(r)...)
	}
	if l.state.FailingSince == nil || len(results) == 0 {
		ops = append(ops, l.sendRests(ctx)...)
	}
	return l.bury(ctx, ops)
}

// resend retries the dead letters whose retry a user requested. It returns the
// resulting writes.
func (l *line) resend(ctx context.Context) []store.Op {
	var ops []store.Op
	for _, d := range l.again {
		it := &item{id: d.ID, event: d.Event, entry: d.Entry}
		m := l.message(time.Now(), []*item{it})
		if d.To != "" {
			m.only, m.named = []string{d.To}, []string{d.To}
		}
		err := l.to.send(ctx, m)
		l.counted([]*item{it}, err)
		if err == nil {
			ops = append(ops, channel.DropOp(d))
			continue
		}
		d.RetryAt, d.Error, d.Tries = nil, err.Error(), d.Tries+1
		if op, err := channel.DeadOp(d); err == nil {
			ops = append(ops, op)
		}
	}
	l.again = nil
	return ops
}

// recordOutcome records the outcome of a message and returns the resulting writes:
// dead letters, or mails that wait for single addresses.
func (l *line) recordOutcome(r outcome) []store.Op {
	now := time.Now().UTC().Round(0)
	part, some := errors.AsType[*partly](r.err)
	if r.err == nil || some {
		l.counted(r.items, nil)
		l.works(now)
		l.q.done(r.items)
		if some {
			return l.split(now, r, part)
		}
		return nil
	}
	l.counted(r.items, r.err)
	for _, it := range r.items {
		it.tries++
	}
	var dead []*item
	if verdict(r.err) == refusesMessage {
		l.state.LastError = r.err.Error()
		wait := l.wait()
		for _, it := range r.items {
			it.next = now.Add(wait)
		}
		if r.items[0].tries >= rejectTries {
			dead = r.items
		}
	} else {
		l.fails(now, r.err)
		if now.Sub(*l.state.FailingSince) >= l.set.NotifyRetry {
			dead = slices.DeleteFunc(slices.Clone(l.q.open), func(it *item) bool { return now.Sub(it.due) < l.set.NotifyRetry })
		}
	}
	return l.die(dead, now, r.err)
}

// wait returns a random time until the next attempt.
func (l *line) wait() time.Duration {
	wait := min(longestWait, firstWait<<min(l.backoff, 12))
	return wait/2 + rand.N(wait/2+1)
}

// works records that the receiver accepted a message.
func (l *line) works(now time.Time) {
	l.state.Delivered++
	l.state.LastDeliveredAt, l.state.FailingSince, l.state.NextTryAt, l.state.LastError = &now, nil, nil, ""
	l.backoff, l.asked = 0, time.Time{}
}

// fails records that the receiver failed, and schedules the next attempt.
func (l *line) fails(now time.Time, err error) {
	l.state.LastError = err.Error()
	wait := l.wait()
	l.backoff++
	if after := retryAfter(err); after > wait {
		wait = after
		l.asked = now.Add(after)
	}
	next := now.Add(wait)
	l.state.NextTryAt = &next
	if l.state.FailingSince == nil {
		l.state.FailingSince = &now
		l.n.log.Warn("a notification receiver fails", "channel", l.name, "err", err)
	}
}

// die converts items to dead letters.
func (l *line) die(items []*item, now time.Time, why error) []store.Op {
	var ops []store.Op
	var gone []*item
	for _, it := range items {
		op, err := channel.DeadOp(channel.DeadLetter{ID: it.id, Channel: l.name, Event: it.event, Entry: it.entry, Tries: it.tries, Error: why.Error(), DiedAt: now})
		if err != nil {
			l.n.log.Error("cannot store a notification", "channel", l.name, "id", it.id, "err", err)
			continue
		}
		ops, gone = append(ops, op), append(gone, it)
	}
	if len(gone) > 0 {
		l.n.log.Error("notifications could not be delivered; see lull notify dead", "channel", l.name, "count", len(gone), "err", why)
		l.n.count.dead.WithLabelValues(l.name).Add(float64(len(gone)))
		l.died = true
		l.q.done(gone)
	}
	return ops
}

// bury writes dead letters. They must be durable before the cursor passes them.
func (l *line) bury(ctx context.Context, ops []store.Op) error {
	for part := range slices.Chunk(ops, 100) {
		if err := l.commit(ctx, part); err != nil {
			return fmt.Errorf("cannot store dead letters: %w", err)
		}
	}
	return nil
}

// commit writes ops unless the right to deliver is lost. The writes are idempotent,
// so it repeats a write with an unknown outcome.
func (l *line) commit(ctx context.Context, ops []store.Op) error {
	for {
		res, err := l.n.store.Commit(ctx, store.Txn{If: []store.Cond{l.guard}, Then: ops})
		switch {
		case err == nil && !res.Succeeded:
			return store.ErrLeaseLost
		case err == nil:
			return nil
		case !errors.Is(err, store.ErrAmbiguous) && !errors.Is(err, store.ErrUnavailable), delay.For(ctx, time.Second) != nil:
			return err
		}
	}
}

// write stores the channel's progress if a delivery changed it, if the last write was
// long enough ago, or if now is set.
func (l *line) write(ctx context.Context, now bool) error {
	s := l.state
	s.Cursor, s.Pending, s.Ahead, s.Batch = l.q.cursor(), l.pending(), maps.Clone(l.q.ahead), l.q.batch
	l.n.count.pending.WithLabelValues(l.name).Set(float64(l.q.due(time.Now()) + len(l.rests)))
	news := l.died || s.Delivered != l.last.Delivered || !same(s.NextTryAt, l.last.NextTryAt)
	late := time.Since(l.wrote) >= writeEvery && (s.Cursor != l.last.Cursor || s.Pending != l.last.Pending)
	if !now && !news && !late {
		return nil
	}
	op, err := channel.DeliveryOp(s)
	if err != nil {
		return err
	}
	if err := l.commit(ctx, []store.Op{op}); err != nil {
		return fmt.Errorf("cannot store the position of channel %q: %w", l.name, err)
	}
	l.wrote, l.last, l.died = time.Now(), s, false
	return nil
}

func same(a, b *time.Time) bool { return a == b || a != nil && b != nil && a.Equal(*b) }
