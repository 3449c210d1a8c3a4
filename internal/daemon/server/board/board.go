// Package board is the overview of a fleet: what the roster has of all
// workers, with what is known live about each.
//
// It guarantees that a worker nobody can say anything about stands as unknown,
// never as idle; that every worker has one standing; and that every change
// that the store had taken when it was asked is in the answer. Live verdicts
// are at most Fresh old. It leaves out who may ask, and changes nothing.
package board

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/daemon/server/roster"
	"lull/internal/fleet"
	"lull/internal/link/control"
)

// Fresh is how long verdicts are used before they are asked for again.
const Fresh = 2 * time.Second

// MaxAttention is how many urgent workers an overview names.
const MaxAttention = 20

// Board is safe for concurrent use. Make it with New.
type Board struct {
	roster   *roster.Roster
	observed func(context.Context) map[string]fleet.IdleStatus

	asking chan struct{} // holds the one who asks for verdicts
	view   *view
}

// view is what was known at one moment. Workers that have not changed since are
// not judged again.
type view struct {
	verdicts map[string]fleet.IdleStatus
	at       time.Time

	mu   sync.Mutex
	rows map[*roster.Line]*control.WorkerRow
}

// of are the rows of lines, in their order. Rows are shared: nobody changes them.
func (v *view) of(lines []*roster.Line) []*control.WorkerRow {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([]*control.WorkerRow, len(lines))
	for i, l := range lines {
		if out[i] = v.rows[l]; out[i] != nil {
			continue
		}
		var st *fleet.IdleStatus
		if s, ok := v.verdicts[l.Worker.ID]; ok {
			st = &s
		}
		r := Row(&l.Worker, st, v.at)
		v.rows[l], out[i] = &r, &r
	}
	return out
}

// New makes a Board over a roster that runs. observed are the idle status of
// every worker that somebody observes, by id; nil says that nobody does.
func New(r *roster.Roster, observed func(context.Context) map[string]fleet.IdleStatus) *Board {
	return &Board{roster: r, observed: observed, asking: make(chan struct{}, 1)}
}

// Query selects rows. Empty fields select all.
type Query struct {
	Search   string // every word of it is somewhere in the worker
	Region   string
	Standing control.Standing
	Sort     string // name, idle, pause or attention; empty is name
	Offset   int
	Limit    int
}

// Overview answers q as of now. Errors: those of the store.
func (b *Board) Overview(ctx context.Context, q Query, now time.Time) (control.Overview, error) {
	v, err := b.known(ctx, now)
	if err != nil {
		return control.Overview{}, err
	}
	all, revision, err := b.roster.All(ctx)
	if err != nil {
		return control.Overview{}, err
	}
	out := control.Overview{At: now.UTC(), Revision: revision}
	gather(&out, all, v.of(all), q)
	return out, nil
}

// gather fills out from the workers, which are sorted by name, and their rows.
func gather(out *control.Overview, all []*roster.Line, shown []*control.WorkerRow, q Query) {
	out.Counts, out.Attention, out.Items = map[control.Standing]int{}, []control.WorkerRow{}, []control.WorkerRow{}
	words := strings.Fields(q.Search)
	regions := map[string]bool{}
	var rows, urgent []*control.WorkerRow
	for i, l := range all {
		r := shown[i]
		if r.Standing == control.StandingEnded {
			continue
		}
		out.Total++
		regions[r.AWSRegion] = true
		if r.Attention {
			urgent = append(urgent, r)
		}
		if q.Region != "" && r.AWSRegion != q.Region || slices.ContainsFunc(words, func(w string) bool { return !l.Has(w) }) {
			continue
		}
		out.Counts[r.Standing]++
		if q.Standing == "" || r.Standing == q.Standing {
			rows = append(rows, r)
		}
	}
	order(rows, q.Sort)
	order(urgent, "attention")
	out.Urgent, out.Matched, out.Regions = len(urgent), len(rows), slices.Sorted(maps.Keys(regions))
	for _, r := range urgent[:min(len(urgent), MaxAttention)] {
		out.Attention = append(out.Attention, *r)
	}
	out.Offset = min(q.Offset, len(rows))
	for _, r := range rows[out.Offset:min(len(rows), out.Offset+q.Limit)] {
		out.Items = append(out.Items, *r)
	}
}

// order sorts rows that are in order of their names, and keeps that order
// among equals.
func order(rows []*control.WorkerRow, by string) {
	switch by {
	case "idle":
		slices.SortStableFunc(rows, func(x, y *control.WorkerRow) int { return cmp.Compare(y.IdleMinutes, x.IdleMinutes) })
	case "pause":
		slices.SortStableFunc(rows, func(x, y *control.WorkerRow) int { return compareTimes(x.TargetPauseAt, y.TargetPauseAt) })
	case "attention":
		slices.SortStableFunc(rows, func(x, y *control.WorkerRow) int { return cmp.Compare(urgency(*y), urgency(*x)) })
	}
}

// compareTimes has the earliest first, and what has none last.
func compareTimes(x, y *time.Time) int {
	switch {
	case x == nil && y == nil:
		return 0
	case x == nil:
		return 1
	case y == nil:
		return -1
	}
	return x.Compare(*y)
}

// Seen are the idle status of every worker that somebody observes, by id, at
// most Fresh old. Nobody changes them.
func (b *Board) Seen(ctx context.Context, now time.Time) (map[string]fleet.IdleStatus, error) {
	v, err := b.known(ctx, now)
	if err != nil {
		return nil, err
	}
	return v.verdicts, nil
}

// known is what is known, at most Fresh old. One caller at a time asks for
// verdicts.
func (b *Board) known(ctx context.Context, now time.Time) (*view, error) {
	select {
	case b.asking <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	defer func() { <-b.asking }()
	if v := b.view; v == nil || now.Sub(v.at) >= Fresh || now.Before(v.at) {
		next := &view{at: now, rows: map[*roster.Line]*control.WorkerRow{}}
		if b.observed != nil {
			next.verdicts = b.observed(ctx)
		}
		b.view = next
	}
	return b.view, nil
}
