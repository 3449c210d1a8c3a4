// Package roster lists workers without reading all of their records. It keeps the
// fields that listings select and sort by in memory, and follows the store.
//
// A listing contains every change that the store had accepted before the request,
// from any server: it asks the store for its revision and waits until it has followed
// that far. A worker takes about two kilobytes. Complete records stay in the store; a
// listing reads those of its page.
package roster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Query selects and orders workers.
type Query struct {
	worker.Filter
	// Name selects by the complete name. Text selects workers with that text in the
	// name, an ID, an address, a tag, the owner or the template, in any case.
	Name, Text string
	// Statuses are the selected statuses. If empty, all workers but those TERMINATED
	// are selected; WithTerminated adds those.
	Statuses []power.Worker
	Unarmed  bool   // only workers that were not armed yet
	ByName   bool   // order by name and then ID, otherwise by ID
	After    string // cursor of the previous page
	Limit    int    // at least 1
}

// Page is the result of a Query: the IDs of one page, in order.
type Page struct {
	IDs   []string
	Next  string // cursor of the next page; empty at the end
	Total int    // number of workers selected on all pages
}

// Line is the indexed part of a worker: its record without secrets and without fields
// that only the worker's own page shows. A Line is never modified; a change replaces
// it.
type Line struct {
	Worker worker.Worker
	text   string // the searchable text, in lower case
}

func lineOf(w *worker.Worker) *Line {
	parts := []string{w.Name, w.ID, w.EC2InstanceID, w.Owner, w.TemplateName, w.PublicIP, w.PrivateIP}
	for k, v := range w.Tags {
		parts = append(parts, k+"="+v)
	}
	kept := w.Public()
	kept.Launch, kept.RecentActivityEvents, kept.Contacts = nil, nil, nil
	return &Line{text: strings.ToLower(strings.Join(parts, "\n")), Worker: kept}
}

// Has reports whether a search for text matches the worker, in any case.
func (l *Line) Has(text string) bool { return strings.Contains(l.text, strings.ToLower(text)) }

func byID(a, b *Line) int { return cmp.Compare(a.Worker.ID, b.Worker.ID) }

func byName(a, b *Line) int { return cmp.Or(cmp.Compare(a.Worker.Name, b.Worker.Name), byID(a, b)) }

// waiter waits until the roster has reached a store revision.
type waiter struct {
	revision int64
	done     chan struct{}
}

// Roster is the index of a store's workers. Create it with New.
type Roster struct {
	store store.Store
	log   *slog.Logger
	ready chan struct{}

	mu      sync.Mutex
	at      int64 // every change up to it is included
	lines   map[string]*Line
	ids     []*Line // in order of ID
	names   []*Line // in order of name
	waiting []waiter
	loaded  bool
}

// New returns an empty Roster. Run fills it.
func New(s store.Store, log *slog.Logger) *Roster {
	return &Roster{store: s, log: log, ready: make(chan struct{}), lines: map[string]*Line{}}
}

// Ready is closed when all workers have been read.
func (r *Roster) Ready() <-chan struct{} { return r.ready }

// Run follows the store until ctx ends. It returns ctx's error.
func (r *Roster) Run(ctx context.Context) error {
	lines := map[string]*Line{}
	follower := store.Follower{
		// Watch all keys, so that the roster's revision follows the store's.
		Watch: store.Prefix(""),
		Listed: func(first bool, values []store.Value) {
			if first {
				clear(lines)
			}
			for _, v := range values {
				if l := r.line(v); l != nil {
					lines[l.Worker.ID] = l
				}
			}
		},
		Reset: func(p store.Page) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.lines, lines = lines, map[string]*Line{}
			r.ids = r.ids[:0]
			for _, l := range r.lines {
				r.ids = append(r.ids, l)
			}
			r.names = slices.Clone(r.ids)
			slices.SortFunc(r.ids, byID)
			slices.SortFunc(r.names, byName)
			r.reached(p.Revision)
			if !r.loaded {
				r.loaded = true
				close(r.ready)
			}
			return nil
		},
		Apply: func(b store.Batch) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, e := range b.Events {
				if worker.Keys().Contains(e.Value.Key) {
					r.change(e)
				}
			}
			r.reached(b.Revision)
			return nil
		},
	}
	var err error
	pprof.Do(ctx, pprof.Labels("part", "list"), func(ctx context.Context) { err = store.Follow(ctx, r.store, worker.Keys(), follower) })
	return err
}

// line converts a record, or returns nil if it cannot be read. Listings omit such a
// worker.
func (r *Roster) line(v store.Value) *Line {
	w, err := worker.Decode(v)
	if err != nil {
		r.log.Error("cannot list a worker", "key", v.Key, "err", err)
		return nil
	}
	return lineOf(&w)
}

// change applies one event. r.mu must be held.
func (r *Roster) change(e store.Event) {
	old := r.lines[worker.IDOf(e.Value.Key)]
	var l *Line
	if !e.Deleted {
		l = r.line(e.Value)
	}
	if l != nil {
		r.lines[l.Worker.ID] = l
	} else if old != nil {
		delete(r.lines, old.Worker.ID)
	}
	r.ids, r.names = moved(r.ids, old, l, byID), moved(r.names, old, l, byName)
}

// moved returns s with old replaced by l, in order; either may be nil. Nearly every
// change keeps the worker's place, and then nothing else moves.
func moved(s []*Line, old, l *Line, order func(a, b *Line) int) []*Line {
	if old != nil && l != nil && order(old, l) == 0 {
		if i, found := slices.BinarySearchFunc(s, old, order); found {
			s[i] = l
			return s
		}
	}
	if old != nil {
		s = without(s, old, order)
	}
	if l != nil {
		s = with(s, l, order)
	}
	return s
}

func with(s []*Line, l *Line, order func(a, b *Line) int) []*Line {
	i, _ := slices.BinarySearchFunc(s, l, order)
	return slices.Insert(s, i, l)
}

func without(s []*Line, l *Line, order func(a, b *Line) int) []*Line {
	i, found := slices.BinarySearchFunc(s, l, order)
	if !found {
		return s
	}
	return slices.Delete(s, i, i+1)
}

// reached records the roster's revision and wakes waiters. r.mu must be held.
func (r *Roster) reached(revision int64) {
	r.at = max(r.at, revision)
	r.waiting = slices.DeleteFunc(r.waiting, func(w waiter) bool {
		if w.revision > r.at {
			return false
		}
		close(w.done)
		return true
	})
}

// waitLimit limits how long a listing waits for changes that the store has accepted.
// They arrive soon unless the store is unreachable.
const waitLimit = 10 * time.Second

// catchUp waits until the roster includes every change that the store has accepted so
// far.
func (r *Roster) catchUp(ctx context.Context) error {
	res, err := r.store.Commit(ctx, store.Txn{Read: []string{revisionOf}})
	if err != nil {
		return fmt.Errorf("cannot list the workers: %w", err)
	}
	r.mu.Lock()
	if r.loaded && r.at >= res.Revision {
		r.mu.Unlock()
		return nil
	}
	w := waiter{res.Revision, make(chan struct{})}
	r.waiting = append(r.waiting, w)
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting = slices.DeleteFunc(r.waiting, func(o waiter) bool { return o.done == w.done })
	return fmt.Errorf("cannot list the workers: changes of the store do not arrive: %w", errors.Join(store.ErrUnavailable, context.Cause(ctx)))
}

// revisionOf is a key that is read only to get the store's revision.
const revisionOf = "pool"

// Select returns one page of the workers that q selects.
func (r *Roster) Select(ctx context.Context, q Query) (Page, error) {
	if err := r.catchUp(ctx); err != nil {
		return Page{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	all, order := r.ids, byID
	if q.ByName || q.Name != "" {
		all, order = r.names, byName
	}
	if q.Name != "" {
		all = named(all, q.Name)
	}
	after := cursor(q.After, q.ByName || q.Name != "")
	var out Page
	for _, l := range all {
		if !q.selects(l) {
			continue
		}
		out.Total++
		if q.After != "" && order(l, after) <= 0 {
			continue
		}
		switch {
		case len(out.IDs) < q.Limit:
			out.IDs = append(out.IDs, l.Worker.ID)
		case out.Next == "":
			last := r.lines[out.IDs[len(out.IDs)-1]]
			if out.Next = last.Worker.ID; q.ByName || q.Name != "" {
				out.Next = last.Worker.Name + "/" + last.Worker.ID
			}
		}
	}
	return out, nil
}

// All returns the lines of all workers by name, and the store revision up to
// which changes are included.
func (r *Roster) All(ctx context.Context) ([]*Line, int64, error) {
	if err := r.catchUp(ctx); err != nil {
		return nil, 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.names), r.at, nil
}

// named returns the lines of the workers called name. s must be sorted by name.
func named(s []*Line, name string) []*Line {
	i, _ := slices.BinarySearchFunc(s, name, func(l *Line, name string) int { return cmp.Compare(l.Worker.Name, name) })
	n := i
	for n < len(s) && s[n].Worker.Name == name {
		n++
	}
	return s[i:n]
}

// cursor returns a Line that sorts like the last worker of the previous page.
func cursor(after string, byName bool) *Line {
	l := &Line{}
	l.Worker.ID = after
	if i := strings.LastIndexByte(after, '/'); byName && i >= 0 {
		l.Worker.Name, l.Worker.ID = after[:i], after[i+1:]
	}
	return l
}

func (q *Query) selects(l *Line) bool {
	f := q.Filter
	if len(q.Statuses) > 0 {
		if !slices.Contains(q.Statuses, l.Worker.Status) {
			return false
		}
		f.WithTerminated = true
	}
	return f.Matches(&l.Worker) && (!q.Unarmed || !l.Worker.Armed) && (q.Name == "" || l.Worker.Name == q.Name) &&
		(q.Text == "" || l.Has(q.Text))
}
