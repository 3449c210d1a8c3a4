// Package board computes the overview of a fleet: the roster's data about all
// workers, combined with what is known live about each.
//
// A worker without live data is shown as unknown, never as idle. Every worker
// has exactly one standing. Every change that the store had accepted before the
// request is in the answer. Live verdicts are at most Fresh old. The package
// changes nothing, and leaves authorization to the caller.
package board

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/roster"
)

// Fresh is the maximum age of verdicts before they are read again.
const Fresh = 2 * time.Second

// MaxAttention is the maximum number of urgent workers in an overview.
const MaxAttention = 20

// Board computes overviews. It is safe for concurrent use. Create it with New.
type Board struct {
	roster   *roster.Roster
	observed func(context.Context) map[string]worker.IdleStatus

	asking chan struct{} // held by the caller that reads verdicts
	view   *view
}

// view is the state at one moment. Workers that have not changed since are not
// judged again.
type view struct {
	verdicts map[string]worker.IdleStatus
	at       time.Time

	mu   sync.Mutex
	rows map[*roster.Line]*control.WorkerRow
}

// of returns the rows of lines, in the same order. Rows are shared and must not
// be modified.
func (v *view) of(lines []*roster.Line) []*control.WorkerRow {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([]*control.WorkerRow, len(lines))
	for i, l := range lines {
		if out[i] = v.rows[l]; out[i] != nil {
			continue
		}
		var st *worker.IdleStatus
		if s, ok := v.verdicts[l.Worker.ID]; ok {
			st = &s
		}
		r := Row(&l.Worker, st, v.at)
		v.rows[l], out[i] = &r, &r
	}
	return out
}

// New returns a Board over a running roster. observed returns the idle status
// of every observed worker, by ID; nil means that none is observed.
func New(r *roster.Roster, observed func(context.Context) map[string]worker.IdleStatus) *Board {
	return &Board{roster: r, observed: observed, asking: make(chan struct{}, 1)}
}

// Query selects rows. Empty fields select all.
type Query struct {
	Search   string // each of its words must occur in the worker
	Region   string
	Standing control.Standing
	Sort     string // name, idle, pause or attention; empty means name
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

// order sorts rows that are sorted by name. The sort is stable.
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

// compareTimes orders the earliest first and nil last.
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

// Seen returns the idle status of every observed worker, by ID, at most Fresh
// old. The result must not be modified.
func (b *Board) Seen(ctx context.Context, now time.Time) (map[string]worker.IdleStatus, error) {
	v, err := b.known(ctx, now)
	if err != nil {
		return nil, err
	}
	return v.verdicts, nil
}

// known returns the present view, at most Fresh old. One caller at a time reads
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
