package notify

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"lull/internal/fleet"
)

// item is one event that a channel is to send.
type item struct {
	id    string
	rev   int64  // of the change it tells of
	key   string // of its entry, which orders the entries of one change
	index int    // orders the events of one entry
	event string
	entry fleet.Entry
	due   time.Time
	// together items of one due time are one message.
	together bool
	urgent   bool

	tries int
	next  time.Time // not before
}

// stream identifies the events that are sent in order: those of one worker, or
// those that are sent together.
func (it *item) stream() string {
	if it.together {
		return "digest"
	}
	return "worker " + it.entry.WorkerID
}

// queue contains the events that a channel has read from the log and not yet
// delivered, in log order. It is pure.
type queue struct {
	seen  int64            // every entry up to it was looked at
	open  []*item          // by rev, key and index
	ahead map[string]int64 // what was delivered above the cursor, with its revision
	batch *fleet.Batch     // what is sent together now, if anything
}

// maxOpen is how many items a queue has before it stops to read the log, and
// maxAhead how many delivered ids it remembers above the cursor; what is
// forgotten is delivered again after a restart.
const (
	maxOpen  = 2000
	maxAhead = 2000
)

func newQueue(d *fleet.Delivery) *queue {
	q := &queue{seen: d.Cursor, ahead: map[string]int64{}, batch: d.Batch}
	maps.Copy(q.ahead, d.Ahead)
	return q
}

func (q *queue) full() bool { return len(q.open) >= maxOpen }

// add takes an item unless it was delivered before.
func (q *queue) add(it *item) {
	if _, done := q.ahead[it.id]; !done {
		q.open = append(q.open, it)
	}
}

// cursor is the revision up to which everything is done.
func (q *queue) cursor() int64 {
	if len(q.open) > 0 {
		return min(q.open[0].rev-1, q.seen)
	}
	return q.seen
}

// done removes items that were delivered or given up.
func (q *queue) done(items []*item) {
	for _, it := range items {
		q.ahead[it.id] = it.rev
	}
	q.open = slices.DeleteFunc(q.open, func(it *item) bool { _, done := q.ahead[it.id]; return done })
	if q.batch != nil && slices.ContainsFunc(items, q.frozen) {
		q.batch = nil
	}
	upTo := q.cursor()
	maps.DeleteFunc(q.ahead, func(_ string, rev int64) bool { return rev <= upTo })
	for id := range q.ahead {
		if len(q.ahead) <= maxAhead {
			break
		}
		delete(q.ahead, id)
	}
}

// ready are up to n messages that may be sent now: of each worker its oldest
// event, and of what is sent together all that is due. Those of workers for
// whom something urgent waits come first.
func (q *queue) ready(now time.Time, n int) [][]*item {
	var urgent, other [][]*item
	pressing, busy := q.pressing(now), map[string]bool{}
	for _, it := range q.open {
		s := it.stream()
		if busy[s] {
			continue
		}
		busy[s] = true
		m := q.message(it, now)
		switch {
		case len(m) == 0:
		case pressing[s]:
			urgent = append(urgent, m)
		default:
			other = append(other, m)
		}
	}
	out := append(urgent, other...)
	return out[:min(n, len(out))]
}

// pressing are the streams in which something urgent is due.
func (q *queue) pressing(now time.Time) map[string]bool {
	out := map[string]bool{}
	for _, it := range q.open {
		if it.urgent && !now.Before(it.due) {
			out[it.stream()] = true
		}
	}
	return out
}

func (it *item) ripe(now time.Time) bool { return !now.Before(it.due) && !now.Before(it.next) }

// message returns the next message of a stream, whose oldest item is first.
func (q *queue) message(first *item, now time.Time) []*item {
	if !first.together {
		if first.ripe(now) {
			return []*item{first}
		}
		return nil
	}
	if q.batch != nil {
		if q.unread() {
			return nil
		}
		var m []*item
		for _, it := range q.open {
			if it.together && q.frozen(it) {
				m = append(m, it)
			}
		}
		if len(m) > 0 {
			if !m[0].ripe(now) {
				return nil
			}
			return m
		}
		q.batch = nil // it is sent one by one now
	}
	var m []*item
	for _, it := range q.open {
		if first.ripe(now) && it.together && it.ripe(now) && len(m) < maxDigest {
			m = append(m, it)
		}
	}
	return m
}

// unread reports whether a part of what is sent together is still to be read from
// the log.
func (q *queue) unread() bool { return q.batch != nil && q.seen < q.batch.UpTo && !q.full() }

// frozen reports whether it belongs to what is sent together now.
func (q *queue) frozen(it *item) bool { return slices.Contains(q.batch.Items, it.id) }

// freeze fixes what is sent together, until it is done; it reports whether that
// is news.
func (q *queue) freeze(items []*item) bool {
	if !items[0].together || q.batch != nil {
		return false
	}
	q.batch = &fleet.Batch{}
	for _, it := range items {
		q.batch.Items = append(q.batch.Items, it.id)
		q.batch.UpTo = max(q.batch.UpTo, it.rev)
	}
	return true
}

// due counts what should have been sent by now.
func (q *queue) due(now time.Time) (n int) {
	for _, it := range q.open {
		if !now.Before(it.due) {
			n++
		}
	}
	return n
}

// maxDigest is how many events one message holds.
const maxDigest = 200

// wake is when the next item is ripe; zero if none waits.
func (q *queue) wake() time.Time {
	var at time.Time
	busy := map[string]bool{}
	for _, it := range q.open {
		if busy[it.stream()] || it.together && q.unread() {
			continue
		}
		busy[it.stream()] = true
		t := it.due
		if it.next.After(t) {
			t = it.next
		}
		if at.IsZero() || t.Before(at) {
			at = t
		}
	}
	return at
}

// inOrder sorts what was read from a listing, whose order is that of keys.
func inOrder(items []*item) {
	slices.SortStableFunc(items, func(a, b *item) int {
		return cmp.Or(cmp.Compare(a.rev, b.rev), cmp.Compare(a.key, b.key), cmp.Compare(a.index, b.index))
	})
}
