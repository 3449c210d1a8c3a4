package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/store"
)

// Marks index entries: keys that end like the entry's own key.
const (
	// markPrefix has one for each entry of a worker, below its ID.
	markPrefix = "audit-of/"
	// powerPrefix has one for each entry about power, with the part of it that
	// shows when a worker ran.
	powerPrefix = "audit-power/"
	// marked is the key that records that every entry has its marks. MarkAudit
	// adds them to a log begun by an earlier version.
	marked = "audit-marked-2"
	// maxCursor is the maximum length of the end of an entry's key.
	maxCursor = 64
)

// marksOf returns the marks of an entry: at most two.
func marksOf(e *Entry, name string) ([]store.Op, error) {
	if e.WorkerID == "" {
		return nil, nil
	}
	ops := []store.Op{store.Put(markPrefix+e.WorkerID+"/"+name, []byte("{}"))}
	if e.To == "" && !e.Pauses() {
		return ops, nil
	}
	short := *e
	short.Decision = nil
	data, err := entryCodec.Encode(powerPrefix+name, short)
	return append(ops, store.Put(powerPrefix+name, data)), err
}

// PowerAudit yields the entries that change the power of workers, or announce a
// change, from a time on, oldest first and without their decisions. It reads no
// others. Errors: those of yield and of the store.
func (log *Log) PowerAudit(ctx context.Context, from time.Time, yield func(*Entry) error) error {
	after := powerPrefix
	if !from.IsZero() {
		after += from.UTC().Format(timeLayout)
	}
	for {
		page, err := log.store.Range(ctx, store.Query{Keys: store.Prefix(powerPrefix), After: after, Limit: 500})
		if err != nil {
			return fmt.Errorf("cannot read the audit log: %w", err)
		}
		for _, v := range page.Values {
			after = v.Key
			e, err := DecodeEntry(v)
			if err == nil {
				err = yield(&e)
			}
			if err != nil {
				return err
			}
		}
		if !page.More {
			return nil
		}
	}
}

// PowerBefore yields the entries of PowerAudit for one worker before a time. It
// goes back only as far as necessary to determine who was stopping it or had
// stopped it then, and why: to the decision to stop it, or to when it last
// began to run. It gives up after maxScanned entries.
func (log *Log) PowerBefore(ctx context.Context, id string, at time.Time, yield func(*Entry) error) error {
	w, err := log.backward(ctx, &Query{WorkerID: id, To: at})
	if err != nil || w == nil {
		return err
	}
	var found []Entry        // newest first
	told, ran := false, true // before the entries found
	for scanned := 0; !told && w.end > w.oldest && scanned < maxScanned; {
		within, err := w.names(ctx)
		if err != nil {
			return fmt.Errorf("cannot read the audit log: %w", err)
		}
		for len(within) > 0 && !told {
			take := min(len(within), store.MaxOps)
			values, err := log.entries(ctx, powerPrefix, within[len(within)-take:])
			if err != nil {
				return fmt.Errorf("cannot read the audit log: %w", err)
			}
			within = within[:len(within)-take]
			scanned += take
			for _, v := range slices.Backward(values) {
				if !v.Exists() {
					continue // it is not about power
				}
				e, err := DecodeEntry(v)
				if err != nil {
					return err
				}
				found = append(found, e)
				if e.To != "" {
					ran = e.From == power.WorkerRunning || e.From == power.WorkerDraining
				}
				if told = e.To == power.WorkerRunning || ran && e.Pauses(); told {
					break
				}
			}
		}
	}
	for i := range slices.Backward(found) {
		if err := yield(&found[i]); err != nil {
			return err
		}
	}
	return nil
}

// MarkAudit adds marks to the entries of a log begun by an earlier version.
// Call it once before the log is read. It is safe to call from several
// processes.
func (log *Log) MarkAudit(ctx context.Context) error {
	_, err := store.Get(ctx, log.store, marked)
	if !errors.Is(err, store.ErrNotFound) {
		return err
	}
	for after, more := "", true; more; {
		page, err := log.store.Range(ctx, store.Query{Keys: store.Prefix(auditPrefix), After: after, Limit: store.MaxOps/2 - 1})
		if err != nil {
			return fmt.Errorf("cannot mark the audit log: %w", err)
		}
		var ops []store.Op
		for _, v := range page.Values {
			after = v.Key
			e, err := DecodeEntry(v)
			if err != nil {
				continue // it is found by reading the whole log
			}
			marks, err := marksOf(&e, strings.TrimPrefix(v.Key, auditPrefix))
			if err != nil {
				return err
			}
			ops = append(ops, marks...)
		}
		if more = page.More; !more {
			ops = append(ops, store.Put(marked, []byte("{}")))
		}
		if len(ops) == 0 {
			continue
		}
		if _, err := log.store.Commit(ctx, store.Txn{Then: ops}); err != nil {
			return fmt.Errorf("cannot mark the audit log: %w", err)
		}
	}
	return nil
}

// keys returns the keys among which the entries of q are found.
func (q *Query) keys() store.Keys {
	if q.WorkerID != "" {
		return store.Prefix(markPrefix + q.WorkerID + "/")
	}
	return store.Prefix(auditPrefix)
}

// reader reads entries forward. For one worker it reads only that
// worker's.
type reader struct {
	log   *Log
	q     Query
	after string // the name of the last one read
	have  []store.Value
	ended bool
	// scanned is the number of entries read. At maxScanned the reader stops,
	// and bounded is set.
	scanned int
	bounded bool
}

// next returns the next entry that the query selects. want is how many are
// wanted.
func (r *reader) next(ctx context.Context, want int) (Entry, bool, error) {
	for {
		if len(r.have) == 0 {
			if r.ended {
				return Entry{}, false, nil
			}
			if r.bounded = r.scanned >= maxScanned; r.bounded {
				return Entry{}, false, nil
			}
			if err := r.fill(ctx, want); err != nil {
				return Entry{}, false, fmt.Errorf("cannot read the audit log: %w", err)
			}
			continue
		}
		v := r.have[0]
		r.have = r.have[1:]
		r.after = strings.TrimPrefix(v.Key, auditPrefix)
		if !v.Exists() {
			continue // the log was trimmed in the meantime
		}
		e, err := DecodeEntry(v)
		if err != nil {
			return Entry{}, false, err
		}
		if !r.q.To.IsZero() && !e.At.Before(r.q.To) {
			return Entry{}, false, nil
		}
		if r.q.WorkerID == "" || e.WorkerID == r.q.WorkerID {
			if r.q.Takes(&e) {
				return e, true, nil
			}
		}
	}
}

func (r *reader) fill(ctx context.Context, want int) error {
	keys := r.q.keys()
	limit := 500
	if r.q.WorkerID != "" {
		limit = store.MaxOps
	}
	if r.q.all() {
		limit = min(limit, want)
	}
	page, err := r.log.store.Range(ctx, store.Query{Keys: keys, After: keys.Name() + r.after, Limit: limit, KeysOnly: r.q.WorkerID != ""})
	if err != nil {
		return err
	}
	r.ended, r.have = !page.More, page.Values
	r.scanned += len(page.Values)
	if r.q.WorkerID == "" {
		return nil
	}
	r.have, err = r.log.entries(ctx, auditPrefix, names(page.Values, keys))
	return err
}

func names(marks []store.Value, keys store.Keys) []string {
	out := make([]string, len(marks))
	for i, v := range marks {
		out[i] = strings.TrimPrefix(v.Key, keys.Name())
	}
	return out
}

// entries reads at most MaxOps entries below a prefix by their names.
func (log *Log) entries(ctx context.Context, prefix string, names []string) ([]store.Value, error) {
	if len(names) == 0 {
		return nil, nil
	}
	keys := make([]string, len(names))
	for i, n := range names {
		keys[i] = prefix + n
	}
	res, err := log.store.Commit(ctx, store.Txn{Read: keys})
	return res.Read, err
}

// Limits of one page: how many entries are read for it, and how many names are
// handled together.
const (
	maxScanned = 5000
	manyNames  = 512
)

// NewestAudit returns a page of the newest entries that q selects, newest
// first. Its Next, as q.After, continues with older ones. It reads longer and
// longer periods, and shorter ones where the log is dense, so that a long log
// costs no more than a short one. If the filter selects little, a page may have
// fewer entries than q.Limit, or none, and a Next. Errors: Invalid, and those
// of the store.
func (log *Log) NewestAudit(ctx context.Context, q Query) (Page, error) {
	q, err := q.checked()
	if err != nil {
		return Page{}, err
	}
	out := Page{Entries: []Entry{}}
	w, err := log.backward(ctx, &q)
	if err != nil || w == nil {
		return out, err
	}
	for scanned := 0; w.end > w.oldest; {
		within, err := w.names(ctx)
		if err != nil {
			return Page{}, fmt.Errorf("cannot read the audit log: %w", err)
		}
		for len(within) > 0 {
			take := min(len(within), store.MaxOps)
			if q.all() {
				take = min(take, q.Limit-len(out.Entries))
			}
			values, err := log.entries(ctx, auditPrefix, within[len(within)-take:])
			if err != nil {
				return Page{}, fmt.Errorf("cannot read the audit log: %w", err)
			}
			within = within[:len(within)-take]
			scanned += take
			for _, v := range slices.Backward(values) {
				at := strings.TrimPrefix(v.Key, auditPrefix)
				if !v.Exists() {
					continue // the log was trimmed in the meantime
				}
				e, err := DecodeEntry(v)
				if err != nil {
					return Page{}, err
				}
				if !q.Takes(&e) {
					continue
				}
				if out.Entries = append(out.Entries, e); len(out.Entries) == q.Limit {
					out.Next = at
					return out, nil
				}
			}
			if scanned >= maxScanned {
				out.Next = strings.TrimPrefix(values[0].Key, auditPrefix)
				return out, nil
			}
		}
	}
	return out, nil
}

// backward iterates over the names of entries from the newest to the oldest.
type backward struct {
	log         *Log
	keys        store.Keys
	oldest, end string // the remaining range
	at          time.Time
	width       time.Duration // of the next span
}

// backward returns an iteration; nil if there is nothing to iterate over.
func (log *Log) backward(ctx context.Context, q *Query) (*backward, error) {
	w := &backward{log: log, keys: q.keys(), end: "~", at: time.Now(), width: time.Minute} // entries newer than now come first
	first, err := log.store.Range(ctx, store.Query{Keys: w.keys, Limit: 1, KeysOnly: true})
	if err != nil {
		return nil, fmt.Errorf("cannot read the audit log: %w", err)
	}
	if len(first.Values) == 0 {
		return nil, nil
	}
	w.oldest = names(first.Values, w.keys)[0]
	w.oldest = w.oldest[:min(len(w.oldest), len(timeLayout))]
	if !q.From.IsZero() {
		w.oldest = max(w.oldest, q.From.UTC().Format(timeLayout))
	}
	if !q.To.IsZero() {
		w.at = q.To
		w.end = w.at.UTC().Format(timeLayout)
	}
	if q.After != "" && q.After < w.end {
		if w.at, err = time.Parse(timeLayout, q.After[:min(len(q.After), len(timeLayout))]); err != nil {
			return nil, failure.Invalidf("after", "it is not a cursor")
		}
		w.end = q.After
	}
	return w, nil
}

// names returns those of the next span, which is shortened until it contains
// few enough of them.
func (w *backward) names(ctx context.Context) ([]string, error) {
	for {
		begin := w.at.Add(-w.width)
		from := max(w.oldest, begin.UTC().Format(timeLayout))
		most := manyNames
		if w.width <= time.Microsecond {
			most = 0 // all of one moment
		}
		out, all, err := w.log.namesBetween(ctx, w.keys, from, w.end, most)
		if err != nil {
			return nil, err
		}
		if all {
			if w.end, w.at = from, begin; len(out) < manyNames/2 {
				w.width *= 2
			}
			return out, nil
		}
		w.width /= 4
	}
}

// namesBetween returns the names of entries from a time until before another.
// It returns false if there are more than most, unless most is 0. No name
// consists of a time alone: every name has a suffix.
func (log *Log) namesBetween(ctx context.Context, keys store.Keys, from, to string, most int) (out []string, all bool, err error) {
	after := keys.Name() + from
	for {
		page, err := log.store.Range(ctx, store.Query{Keys: keys, After: after, Limit: manyNames, KeysOnly: true})
		if err != nil {
			return nil, false, err
		}
		for _, n := range names(page.Values, keys) {
			if n >= to {
				return out, true, nil
			}
			out = append(out, n)
		}
		if !page.More {
			return out, true, nil
		}
		if most > 0 && len(out) >= most {
			return nil, false, nil
		}
		after = page.Values[len(page.Values)-1].Key
	}
}
