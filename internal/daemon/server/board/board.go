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

	asking   chan struct{} // holds the one who asks for verdicts
	verdicts map[string]fleet.IdleStatus
	askedAt  time.Time
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
	verdicts := b.known(ctx, now)
	all, revision, err := b.roster.All(ctx)
	if err != nil {
		return control.Overview{}, err
	}
	out := control.Overview{At: now.UTC(), Revision: revision}
	gather(&out, all, verdicts, q, now)
	return out, nil
}

// gather fills out from the workers, which are sorted by name.
func gather(out *control.Overview, all []*roster.Line, verdicts map[string]fleet.IdleStatus, q Query, now time.Time) {
	out.Counts, out.Attention, out.Items = map[control.Standing]int{}, []control.WorkerRow{}, []control.WorkerRow{}
	words := strings.Fields(q.Search)
	regions := map[string]bool{}
	var rows, urgent []control.WorkerRow
	for _, l := range all {
		var st *fleet.IdleStatus
		if v, ok := verdicts[l.Worker.ID]; ok {
			st = &v
		}
		r := Row(&l.Worker, st, now)
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
	out.Attention = append(out.Attention, urgent[:min(len(urgent), MaxAttention)]...)
	out.Offset = min(q.Offset, len(rows))
	out.Items = append(out.Items, rows[out.Offset:min(len(rows), out.Offset+q.Limit)]...)
}

// order sorts rows that are in order of their names, and keeps that order
// among equals.
func order(rows []control.WorkerRow, by string) {
	switch by {
	case "idle":
		slices.SortStableFunc(rows, func(x, y control.WorkerRow) int { return cmp.Compare(y.IdleMinutes, x.IdleMinutes) })
	case "pause":
		slices.SortStableFunc(rows, func(x, y control.WorkerRow) int { return compareTimes(x.TargetPauseAt, y.TargetPauseAt) })
	case "attention":
		slices.SortStableFunc(rows, func(x, y control.WorkerRow) int { return cmp.Compare(urgency(y), urgency(x)) })
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

// known are the verdicts, at most Fresh old if they can be had in time. One
// caller at a time asks for them.
func (b *Board) known(ctx context.Context, now time.Time) map[string]fleet.IdleStatus {
	if b.observed == nil {
		return nil
	}
	select {
	case b.asking <- struct{}{}:
	case <-ctx.Done():
		return nil
	}
	defer func() { <-b.asking }()
	if b.verdicts == nil || now.Sub(b.askedAt) >= Fresh || now.Before(b.askedAt) {
		b.verdicts, b.askedAt = b.observed(ctx), now
	}
	return b.verdicts
}
