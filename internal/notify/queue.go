package notify

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
)

// item is one event that a channel must send.
type item struct {
	id    string
	rev   int64  // revision of its change
	key   string // key of its entry, which orders the entries of one change
	index int    // orders the events of one entry
	event string
	entry audit.Entry
	due   time.Time
	// together means that items with the same due time are one message.
	together bool
	urgent   bool

	tries int
	next  time.Time // earliest time to send it
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
	seen  int64            // every entry up to it has been read
	open  []*item          // by rev, key and index
	ahead map[string]int64 // delivered above the cursor, with its revision
	batch *channel.Batch   // what is being sent together, if anything
}

// maxOpen is the queue length at which reading the log stops. maxAhead is how
// many delivered IDs above the cursor are kept; an event whose ID was dropped
// is delivered again after a restart.
const (
	maxOpen  = 2000
	maxAhead = 2000
)

func newQueue(d *channel.Delivery) *queue {
	q := &queue{seen: d.Cursor, ahead: map[string]int64{}, batch: d.Batch}
	maps.Copy(q.ahead, d.Ahead)
	return q
}

func (q *queue) full() bool { return len(q.open) >= maxOpen }

// add queues an item unless it was delivered before.
func (q *queue) add(it *item) {
	if _, done := q.ahead[it.id]; !done {
		q.open = append(q.open, it)
	}
}

// cursor returns the revision up to which every entry is done.
func (q *queue) cursor() int64 {
	if len(q.open) > 0 {
		return min(q.open[0].rev-1, q.seen)
	}
	return q.seen
}

// done removes items that were delivered or abandoned.
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

// ready returns up to n messages that may be sent now: the oldest event of each
// worker, and everything due that is sent together. Workers with a pending
// urgent event come first.
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

// pressing returns the streams in which an urgent event is due.
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
		q.batch = nil // from now on items are sent one by one
	}
	var m []*item
	for _, it := range q.open {
		if first.ripe(now) && it.together && it.ripe(now) && len(m) < maxDigest {
			m = append(m, it)
		}
	}
	return m
}

// unread reports whether a part of the combined message must still be read from
// the log.
func (q *queue) unread() bool { return q.batch != nil && q.seen < q.batch.UpTo && !q.full() }

// frozen reports whether it belongs to the combined message being sent.
func (q *queue) frozen(it *item) bool { return slices.Contains(q.batch.Items, it.id) }

// freeze fixes the content of the combined message until it is done. It reports
// whether the content changed.
func (q *queue) freeze(items []*item) bool {
	if !items[0].together || q.batch != nil {
		return false
	}
	q.batch = &channel.Batch{}
	for _, it := range items {
		q.batch.Items = append(q.batch.Items, it.id)
		q.batch.UpTo = max(q.batch.UpTo, it.rev)
	}
	return true
}

// due counts items that should have been sent by now.
func (q *queue) due(now time.Time) (n int) {
	for _, it := range q.open {
		if !now.Before(it.due) {
			n++
		}
	}
	return n
}

// maxDigest is the maximum number of events of one message.
const maxDigest = 200

// wake returns when the next item is due; zero if there is none.
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

// inOrder sorts items read from a listing, which is sorted by key.
func inOrder(items []*item) {
	slices.SortStableFunc(items, func(a, b *item) int {
		return cmp.Or(cmp.Compare(a.rev, b.rev), cmp.Compare(a.key, b.key), cmp.Compare(a.index, b.index))
	})
}
