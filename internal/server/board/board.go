// Package board computes the overview of a fleet. It combines the roster's data about
// all workers with the live status of each.
//
// A worker without a live status is shown as unknown, never as idle. Every worker has
// exactly one standing. The answer contains every change that the store had accepted
// before the request. Live verdicts are at most Fresh old. The package changes
// nothing, and leaves authorization to the caller.
package board

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/core/savings"
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
	prices   func(context.Context) (savings.Prices, error)

	asking chan struct{} // held by the caller that reads verdicts
	view   *view
}

// view is the fleet's state at one moment. Rows of workers that have not changed are
// reused in the next view.
type view struct {
	verdicts map[string]worker.IdleStatus
	prices   savings.Prices
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
		r.USDPerHour = v.prices.Hour(r.AWSRegion, r.InstanceType)
		v.rows[l], out[i] = &r, &r
	}
	return out
}

// New returns a Board over a running roster. observed returns the idle status of
// every observed worker, by ID; nil means that none is observed. prices returns the
// price table; if it fails, the last table is used, and prices are unknown if there
// is none.
func New(r *roster.Roster, observed func(context.Context) map[string]worker.IdleStatus, prices func(context.Context) (savings.Prices, error)) *Board {
	return &Board{roster: r, observed: observed, prices: prices, asking: make(chan struct{}, 1)}
}

// Query selects rows. Empty fields select all.
type Query struct {
	Search   string // each of its words must occur in the worker
	Region   string
	Standing control.Standing
	Sort     string // sort key, as in the API; empty means name
	Reverse  bool   // reverse the key's order; rows without a value stay last
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
		if !r.Armed {
			out.Unarmed++
		}
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
	order(rows, q.Sort, q.Reverse)
	order(urgent, "attention", false)
	out.Urgent, out.Matched, out.Regions = len(urgent), len(rows), slices.Sorted(maps.Keys(regions))
	for _, r := range urgent[:min(len(urgent), MaxAttention)] {
		out.Attention = append(out.Attention, *r)
	}
	out.Offset = min(q.Offset, len(rows))
	for _, r := range rows[out.Offset:min(len(rows), out.Offset+q.Limit)] {
		out.Items = append(out.Items, *r)
	}
}

// rank is the sort order of standings, by need of attention first.
var rank = map[control.Standing]int{control.StandingFailed: 0, control.StandingUnknown: 1, control.StandingBlocked: 2, control.StandingPausingSoon: 3, control.StandingIdle: 4,
	control.StandingActive: 5, control.StandingChecking: 6, control.StandingStarting: 7, control.StandingPaused: 8}

// compare compares two rows by a key, and returns whether each has a value for that
// key.
func compare(by string, x, y *control.WorkerRow) (c int, hasX, hasY bool) {
	text := func(a, b string) (int, bool, bool) {
		return cmp.Compare(strings.ToLower(a), strings.ToLower(b)), a != "", b != ""
	}
	number := func(a, b *float64) (int, bool, bool) {
		if a == nil || b == nil {
			return 0, a != nil, b != nil
		}
		return cmp.Compare(*b, *a), true, true // the highest first
	}
	moment := func(a, b *time.Time) (int, bool, bool) {
		if a == nil || b == nil {
			return 0, a != nil, b != nil
		}
		return a.Compare(*b), true, true
	}
	switch by {
	case "idle":
		return cmp.Compare(y.IdleMinutes, x.IdleMinutes), true, true
	case "pause":
		return moment(x.TargetPauseAt, y.TargetPauseAt)
	case "attention":
		return cmp.Compare(urgency(*y), urgency(*x)), true, true
	case "standing":
		return cmp.Compare(rank[x.Standing], rank[y.Standing]), true, true
	case "activity":
		c, hasX, hasY = moment(x.LastActivityAt, y.LastActivityAt)
		return -c, hasX, hasY
	case "owner":
		return text(x.Owner, y.Owner)
	case "region":
		return text(x.AWSRegion, y.AWSRegion)
	case "type":
		return text(x.InstanceType, y.InstanceType)
	case "template":
		return text(x.TemplateName, y.TemplateName)
	case "cpu":
		return number(x.CPU, y.CPU)
	case "cost":
		return number(x.USDPerHour, y.USDPerHour)
	}
	return text(x.Name, y.Name)
}

// order sorts rows by a key. The rows must be sorted by name, and rows with equal
// values stay so. Rows without a value come last.
func order(rows []*control.WorkerRow, by string, reverse bool) {
	if (by == "" || by == "name") && !reverse {
		return
	}
	slices.SortStableFunc(rows, func(x, y *control.WorkerRow) int {
		c, hasX, hasY := compare(by, x, y)
		switch {
		case hasX != hasY && hasX:
			return -1
		case hasX != hasY:
			return 1
		case reverse:
			return -c
		}
		return c
	})
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

// known returns a view at most Fresh old. Only one caller at a time reads verdicts.
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
		if next.prices, _ = b.prices(ctx); next.prices == nil && b.view != nil {
			next.prices = b.view.prices // the last table that could be read
		}
		b.view = next
	}
	return b.view, nil
}
