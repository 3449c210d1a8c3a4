// Package timeline returns the recorded signals, verdicts and power states of a
// worker, or of a machine with an agent, over a period.
//
// The number of points per signal is limited, whatever the length of the period. Of
// the readings that share a point, the most active one is shown. Unrecorded time is
// never shown as quiet; it is listed as missing unless the worker did not run.
package timeline

import (
	"cmp"
	"context"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/history"
)

// Limits of a timeline: the longest period, and the points per signal.
const (
	Longest   = 35 * 24 * time.Hour
	maxPoints = 2000
)

// Usual is the default period of a timeline.
const Usual = 24 * time.Hour

// Subject identifies the object of a timeline.
type Subject struct {
	Object  string                   // object ID of the records
	Worker  *worker.Worker           // nil if the machine is no worker
	Changes []control.TimelineChange // the worker's changes from before the period up to now
}

// Draw returns the timeline of [begin, end), a period that history.Period has
// validated. Each signal gets about points points, and at most twice as many.
func Draw(ctx context.Context, from history.Evidence, of Subject, begin, end time.Time, points int) (control.Timeline, error) {
	l := &lines{t: control.Timeline{From: begin, To: end, Signals: []control.TimelineSignal{}, Verdicts: []control.TimelineVerdict{},
		Changes: []control.TimelineChange{}, Missing: []evidence.Missing{}}, width: end.Sub(begin) / time.Duration(points), most: points}
	if of.Worker != nil {
		l.follows(of.Worker, of.Changes)
	}
	var follow evidence.Follow
	missing, err := history.Recorded(ctx, from, evidence.Query{Object: of.Object, From: begin, To: end}, func(r evidence.Record) error {
		follow.Add(&r, l.add)
		return nil
	})
	if err != nil {
		return control.Timeline{}, err
	}
	follow.End(end, l.add)
	for _, m := range missing {
		l.miss(m)
	}
	if of.Worker == nil {
		l.t.Power = seenUp(l.t.Verdicts, begin, end)
	}
	return l.done(), nil
}

// follows adds a worker's power states. Its changes reach up to now.
func (l *lines) follows(w *worker.Worker, changes []control.TimelineChange) {
	l.t.WorkerID, l.t.Power = w.ID, history.Powers(changes, string(w.Status), history.Later(l.t.From, w.CreatedAt), l.t.To)
	l.off = history.Stops(changes, string(w.Status), l.t.To)
	for _, c := range changes {
		if !c.At.Before(l.t.From) && c.At.Before(l.t.To) {
			l.t.Changes = append(l.t.Changes, c)
		}
	}
}

// seenUp returns the power states of a machine that is known only from its own
// reports: running when it reported, and unknown in between.
func seenUp(verdicts []control.TimelineVerdict, from, to time.Time) []control.TimelinePower {
	out := []control.TimelinePower{}
	add := func(status string, end time.Time) {
		if n := len(out); n > 0 && out[n-1].Status == status {
			out[n-1].To = end
		} else if from.Before(end) {
			out = append(out, control.TimelinePower{From: from, To: end, Status: status})
		}
		from = history.Later(from, end)
	}
	for _, v := range verdicts {
		if v.From.After(from) {
			add("", v.From)
		}
		add(string(power.WorkerRunning), v.To)
	}
	if from.Before(to) {
		add("", to)
	}
	return out
}

// lines builds a timeline as the records arrive.
type lines struct {
	t     control.Timeline
	off   []evidence.Off
	width time.Duration // duration that one point covers
	most  int
}

// add adds one stretch, except for the times at which the worker did not run.
func (l *lines) add(s evidence.Stretch) {
	for _, o := range l.off {
		if !o.To.After(s.From) || !o.From.Before(s.To) {
			continue
		}
		if o.From.After(s.From) {
			before := s
			before.To, before.Known = o.From, s.Covers(o.From)
			l.draw(before)
		}
		if s.From = o.To; !s.From.Before(s.To) {
			return
		}
		if s.Known {
			s.Known = false // readings before the stop do not apply after it
		}
	}
	l.draw(s)
}

func (l *lines) draw(s evidence.Stretch) {
	began := s.From
	if s.From.Before(l.t.From) {
		s.From = l.t.From
	}
	if s.To.After(l.t.To) {
		s.To = l.t.To
	}
	if !s.From.Before(s.To) {
		return
	}
	if !s.Known {
		l.miss(evidence.Missing{From: s.From, To: s.To, Why: "no check is recorded"})
		return
	}
	v := &s.Check.Verdict
	for i := range s.Check.Evidence.Readings {
		l.point(s.From, s.To, &s.Check.Evidence.Readings[i], began)
	}
	next := control.TimelineVerdict{From: s.From, To: s.To, IsIdle: v.IsIdle, Eligible: v.Eligible, Blocks: []idle.Code{}, Reason: "Idle for longer than the timeout."}
	for _, b := range v.Blocks {
		next.Blocks = append(next.Blocks, b.Code)
	}
	if len(v.Blocks) > 0 {
		next.Reason = v.Blocks[0].Sentence
	}
	if n := len(l.t.Verdicts); n > 0 {
		last := &l.t.Verdicts[n-1]
		same := last.IsIdle == next.IsIdle && last.Eligible == next.Eligible && slices.Equal(last.Blocks, next.Blocks)
		if last.To.Equal(next.From) && (same || n >= 2*l.most && next.To.Sub(next.From) < l.width) {
			last.To = next.To
			return
		}
	}
	l.t.Verdicts = append(l.t.Verdicts, next)
}

// point adds a reading as a point, or merges it into the last point if both are
// within one width. A merged point shows the more active reading, and is unknown
// rather than quiet if there is unrecorded time in between. There are at most two
// points per width.
func (l *lines) point(from, to time.Time, r *idle.Reading, at time.Time) {
	i := slices.IndexFunc(l.t.Signals, func(s control.TimelineSignal) bool { return s.Signal == r.Signal })
	if i < 0 {
		i = len(l.t.Signals)
		l.t.Signals = append(l.t.Signals, control.TimelineSignal{Signal: r.Signal, Points: []control.TimelinePoint{}})
	}
	s := &l.t.Signals[i]
	if r.Unit != "" {
		s.Unit = r.Unit
	}
	if r.Threshold != 0 {
		s.Threshold = r.Threshold
	}
	p := control.TimelinePoint{At: from, Until: to, State: r.StateAt(at)}
	if r.State == idle.Quiet || r.State == idle.Active {
		v := r.Value
		p.Value = &v
	}
	if n := len(s.Points); n > 0 {
		last := &s.Points[n-1]
		if from.Sub(last.At) < l.width && (p.State == last.State || to.Sub(from) < l.width) {
			shown := []control.TimelinePoint{p}
			if last.Until.Before(from) {
				shown = append(shown, control.TimelinePoint{State: idle.Unknown})
			}
			for _, q := range shown {
				if weight(q) > weight(*last) {
					last.State, last.Value = q.State, q.Value
				}
			}
			last.Until = to
			return
		}
	}
	s.Points = append(s.Points, p)
}

// weight orders points by importance: use, then unknown, then quiet; among equals the
// higher value.
func weight(p control.TimelinePoint) float64 {
	w := map[idle.State]float64{idle.Active: 3, idle.Unknown: 2, idle.Quiet: 1}[p.State] * 1e18
	if p.Value != nil {
		w += min(*p.Value, 1e17)
	}
	return w
}

// miss adds a missing period, clipped to the timeline.
func (l *lines) miss(m evidence.Missing) {
	if m.From.Before(l.t.From) {
		m.From = l.t.From
	}
	if m.To.IsZero() || m.To.After(l.t.To) {
		m.To = l.t.To
	}
	if m.To.Before(m.From) || len(l.t.Missing) >= maxPoints {
		return
	}
	if n := len(l.t.Missing); n > 0 && l.t.Missing[n-1].Why == m.Why && l.t.Missing[n-1].To.Equal(m.From) {
		l.t.Missing[n-1].To = m.To
		return
	}
	l.t.Missing = append(l.t.Missing, m)
}

func (l *lines) done() control.Timeline {
	slices.SortFunc(l.t.Signals, func(a, b control.TimelineSignal) int { return cmp.Compare(a.Signal, b.Signal) })
	return l.t
}
