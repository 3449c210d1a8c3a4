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
	rev   int64  // revision of the event's change
	key   string // key of the event's entry; orders the entries of one change
	index int    // orders the events of one entry
	event string
	entry audit.Entry
	due   time.Time
	// together means that items with the same due time are sent as one message.
	together bool
	urgent   bool

	tries int
	next  time.Time // earliest time to send it
}

// stream identifies the items that are sent in order: those of one worker, or those
// that are sent together.
func (it *item) stream() string {
	if it.together {
		return "digest"
	}
	return "worker " + it.entry.WorkerID
}

// queue contains the events that a channel has read from the log and not delivered
// yet, in the order of the log. It does no I/O.
type queue struct {
	seen  int64            // every entry up to this revision has been read
	open  []*item          // pending items, by rev, key and index
	ahead map[string]int64 // revision by ID of events that were delivered before an earlier one
	batch *channel.Batch   // the combined message being sent; nil if there is none
}

// maxOpen is the queue length at which reading the log stops. maxAhead is how many
// IDs of events delivered out of order are kept; if an event's ID is dropped, the
// event is delivered again after a restart.
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

// add queues an item unless the item was delivered already.
func (q *queue) add(it *item) {
	if _, done := q.ahead[it.id]; !done {
		q.open = append(q.open, it)
	}
}

// cursor returns the revision up to which every event is done.
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

// ready returns up to n messages that may be sent now: for each worker its oldest
// event, and one combined message of the events that are due together. Workers with a
// pending urgent event come first.
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

// message returns the next message of a stream. first is the stream's oldest item.
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
		q.batch = nil // send the remaining items one by one
	}
	var m []*item
	for _, it := range q.open {
		if first.ripe(now) && it.together && it.ripe(now) && len(m) < maxDigest {
			m = append(m, it)
		}
	}
	return m
}

// unread reports whether some events of the combined message must still be read from
// the log.
func (q *queue) unread() bool { return q.batch != nil && q.seen < q.batch.UpTo && !q.full() }

// frozen reports whether an item belongs to the combined message being sent.
func (q *queue) frozen(it *item) bool { return slices.Contains(q.batch.Items, it.id) }

// freeze fixes the content of the combined message until it is done. It reports
// whether the content is new.
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

// due returns the number of items that should have been sent by now.
func (q *queue) due(now time.Time) (n int) {
	for _, it := range q.open {
		if !now.Before(it.due) {
			n++
		}
	}
	return n
}

// maxDigest is the maximum number of events in one message.
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

// inOrder sorts items that were read from a listing by rev.
func inOrder(items []*item) {
	slices.SortStableFunc(items, func(a, b *item) int {
		return cmp.Or(cmp.Compare(a.rev, b.rev), cmp.Compare(a.key, b.key), cmp.Compare(a.index, b.index))
	})
}
