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

// Marks index entries. The last part of a mark's key is that of its entry's key.
const (
	// markPrefix has a mark below the worker's ID for each entry about a worker.
	markPrefix = "audit-of/"
	// powerPrefix has a mark for each entry about power. Its data is the part of the
	// entry that shows when the worker ran.
	powerPrefix = "audit-power/"
	// marked exists once every entry has its marks. For a log begun by an earlier
	// version, MarkAudit adds them.
	marked = "audit-marked-2"
	// maxCursor is the maximum length of the last part of an entry's key.
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

// PowerAudit yields the entries since from that change a worker's power or announce a
// change, oldest first and without their decisions. It reads no other entries.
// Errors: those of yield and of the store.
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

// PowerBefore yields the entries of PowerAudit for one worker before at, oldest
// first. It goes back until they show who had stopped the worker by then, and why: to
// the decision to stop it, or to its last start. It gives up after maxScanned
// entries.
func (log *Log) PowerBefore(ctx context.Context, id string, at time.Time, yield func(*Entry) error) error {
	w, err := log.backward(ctx, &Query{WorkerID: id, To: at})
	if err != nil || w == nil {
		return err
	}
	var found []Entry        // newest first
	told, ran := false, true // told ends the search; ran is whether the worker ran before the entries found
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
					continue // not about power
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

// MarkAudit adds missing marks to the entries of a log begun by an earlier version.
// It must be called once before the log is read. Several processes may call it at
// once.
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
				continue // a query of the whole log still finds the entry
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

// keys returns the keys to search for the entries that q selects.
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
	after string // name of the last entry read
	have  []store.Value
	ended bool
	// scanned is the number of entries read. At maxScanned the reader stops and sets
	// bounded.
	scanned int
	bounded bool
}

// next returns the next entry that the query selects; false if there is none. want is
// how many entries the caller still wants, to read that many at once.
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
			continue // trimmed from the log meanwhile
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

// entries reads the entries called names below a prefix, at most MaxOps of them.
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

// NewestAudit returns a page of the newest entries that q selects, newest first.
// Next, as q.After, continues with older ones. It adapts the length of the periods
// that it reads to how dense the log is, so that a long log costs no more than a
// short one. A page may be short or empty although Next is set. Errors: Invalid, and
// those of the store.
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
					continue // trimmed from the log meanwhile
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

// backward iterates over the names of entries, newest first.
type backward struct {
	log         *Log
	keys        store.Keys
	oldest, end string // the remaining range
	at          time.Time
	width       time.Duration // duration of the next period to read
}

// backward returns an iterator over the entries in the range of q; nil if there are
// none.
func (log *Log) backward(ctx context.Context, q *Query) (*backward, error) {
	w := &backward{log: log, keys: q.keys(), end: "~", at: time.Now(), width: time.Minute} // first read what is newer than now
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

// names returns the names in the next period, oldest first. It shortens the period
// until there are few enough of them.
func (w *backward) names(ctx context.Context) ([]string, error) {
	for {
		begin := w.at.Add(-w.width)
		from := max(w.oldest, begin.UTC().Format(timeLayout))
		most := manyNames
		if w.width <= time.Microsecond {
			most = 0 // the entries of one moment cannot be split
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

// namesBetween returns the names of entries from a time on, up to but excluding
// another. It returns false if there are more than most, unless most is 0. A name
// consists of a time and a suffix, so it never equals a time.
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
