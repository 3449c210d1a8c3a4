package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/store"
)

// Marks find the entries of one worker without reading those of others: a key
// below markPrefix for each, which ends as the entry's own does.
const (
	markPrefix = "audit-of/"
	// marked is the key that tells that every entry has its mark. A log that
	// was begun by an earlier version is given them by MarkAudit.
	marked = "audit-marked"
	// maxCursor is the longest that the end of an entry's key is.
	maxCursor = 64
)

func markOf(worker, name string) store.Op { return store.Put(markPrefix+worker+"/"+name, []byte("{}")) }

// MarkAudit gives marks to the entries of a log that an earlier version began.
// It is to be called once before the log is read; any number of processes may.
func (f *Fleet) MarkAudit(ctx context.Context) error {
	_, err := store.Get(ctx, f.store, marked)
	if !errors.Is(err, store.ErrNotFound) {
		return err
	}
	after := ""
	for {
		page, err := f.store.Range(ctx, store.Query{Keys: store.Prefix(auditPrefix), After: after, Limit: store.MaxOps})
		if err != nil {
			return fmt.Errorf("cannot mark the audit log: %w", err)
		}
		var ops []store.Op
		for _, v := range page.Values {
			after = v.Key
			if e, err := DecodeEntry(v); err == nil && e.WorkerID != "" {
				ops = append(ops, markOf(e.WorkerID, strings.TrimPrefix(v.Key, auditPrefix)))
			}
		}
		if !page.More && len(ops) < store.MaxOps {
			ops = append(ops, store.Put(marked, []byte("{}")))
		}
		if len(ops) > 0 {
			if _, err := f.store.Commit(ctx, store.Txn{Then: ops}); err != nil {
				return fmt.Errorf("cannot mark the audit log: %w", err)
			}
		}
		if !page.More && (len(ops) < store.MaxOps || ops[len(ops)-1].Key == marked) {
			return nil
		}
	}
}

// keys are where the entries that q asks for are found, and what comes before
// their names.
func (q *AuditQuery) keys() store.Keys {
	if q.WorkerID != "" {
		return store.Prefix(markPrefix + q.WorkerID + "/")
	}
	return store.Prefix(auditPrefix)
}

// auditReader reads entries forward. Of a worker's it reads only those.
type auditReader struct {
	f     *Fleet
	q     AuditQuery
	after string // the name of the last one that was read
	have  []store.Value
	ended bool
}

// next is the next entry that the query selects; want is how many are wanted.
func (r *auditReader) next(ctx context.Context, want int) (Entry, bool, error) {
	for {
		if len(r.have) == 0 {
			if r.ended {
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
			continue // trimmed meanwhile
		}
		e, err := DecodeEntry(v)
		if err != nil {
			return Entry{}, false, err
		}
		if !r.q.To.IsZero() && !e.At.Before(r.q.To) {
			return Entry{}, false, nil
		}
		if r.q.WorkerID == "" || e.WorkerID == r.q.WorkerID {
			if r.q.Action == "" || e.Action == r.q.Action {
				return e, true, nil
			}
		}
	}
}

func (r *auditReader) fill(ctx context.Context, want int) error {
	keys := r.q.keys()
	limit := 500
	if r.q.WorkerID != "" {
		limit = store.MaxOps
	}
	if r.q.Action == "" {
		limit = min(limit, want)
	}
	page, err := r.f.store.Range(ctx, store.Query{Keys: keys, After: keys.Name() + r.after, Limit: limit, KeysOnly: r.q.WorkerID != ""})
	if err != nil {
		return err
	}
	r.ended, r.have = !page.More, page.Values
	if r.q.WorkerID == "" {
		return nil
	}
	r.have, err = r.f.entries(ctx, names(page.Values, keys))
	return err
}

func names(marks []store.Value, keys store.Keys) []string {
	out := make([]string, len(marks))
	for i, v := range marks {
		out[i] = strings.TrimPrefix(v.Key, keys.Name())
	}
	return out
}

// entries reads at most MaxOps entries by their names.
func (f *Fleet) entries(ctx context.Context, names []string) ([]store.Value, error) {
	if len(names) == 0 {
		return nil, nil
	}
	keys := make([]string, len(names))
	for i, n := range names {
		keys[i] = auditPrefix + n
	}
	res, err := f.store.Commit(ctx, store.Txn{Read: keys})
	return res.Read, err
}

// NewestAudit are the last n entries that q selects, newest first. It looks
// back over longer and longer spans, so that a long log costs no more than a
// short one. After and Limit of q are not used. Errors: those of the store.
func (f *Fleet) NewestAudit(ctx context.Context, q AuditQuery, n int) ([]Entry, error) {
	out := []Entry{}
	keys := q.keys()
	first, err := f.store.Range(ctx, store.Query{Keys: keys, Limit: 1, KeysOnly: true})
	if err != nil {
		return nil, fmt.Errorf("cannot read the audit log: %w", err)
	}
	if len(first.Values) == 0 {
		return out, nil
	}
	oldest := names(first.Values, keys)[0]
	oldest = oldest[:min(len(oldest), len(auditTime))]
	if !q.From.IsZero() {
		oldest = max(oldest, q.From.UTC().Format(auditTime))
	}
	end, to := "~", time.Now() // whatever is newer than now comes first
	if !q.To.IsZero() {
		to = q.To
		end = to.UTC().Format(auditTime)
	}
	for span := time.Minute; end > oldest && len(out) < n; span *= 2 {
		from := max(oldest, to.Add(-span).UTC().Format(auditTime))
		within, err := f.namesBetween(ctx, keys, from, end)
		if err != nil {
			return nil, fmt.Errorf("cannot read the audit log: %w", err)
		}
		for len(within) > 0 && len(out) < n {
			take := min(len(within), store.MaxOps)
			if q.Action == "" {
				take = min(take, n-len(out))
			}
			values, err := f.entries(ctx, within[len(within)-take:])
			if err != nil {
				return nil, fmt.Errorf("cannot read the audit log: %w", err)
			}
			within = within[:len(within)-take]
			for _, v := range slices.Backward(values) {
				if !v.Exists() {
					continue // trimmed meanwhile
				}
				e, err := DecodeEntry(v)
				if err != nil {
					return nil, err
				}
				if len(out) < n && (q.Action == "" || e.Action == q.Action) {
					out = append(out, e)
				}
			}
		}
		end = from
	}
	return out, nil
}

// namesBetween are the names of entries from a time until before another. No
// name is a time alone: all have more behind it.
func (f *Fleet) namesBetween(ctx context.Context, keys store.Keys, from, to string) ([]string, error) {
	var out []string
	after := keys.Name() + from
	for {
		page, err := f.store.Range(ctx, store.Query{Keys: keys, After: after, Limit: 500, KeysOnly: true})
		if err != nil {
			return nil, err
		}
		for _, n := range names(page.Values, keys) {
			if n >= to {
				return out, nil
			}
			out = append(out, n)
		}
		if !page.More {
			return out, nil
		}
		after = page.Values[len(page.Values)-1].Key
	}
}
