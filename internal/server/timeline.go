package server

import (
	"cmp"
	"context"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// Limits of a timeline: its length, and the points per signal.
const (
	maxTimeline = 35 * 24 * time.Hour
	maxPoints   = 2000
)

func (s *Server) timelineRoutes() {
	register(s, route{id: "worker-timeline", method: "GET", path: workersPath + "/{worker_id}/timeline", role: access.Viewer,
		doc: "Its signals and verdicts over a time, as they were recorded"},
		func(ctx context.Context, in *struct {
			One
			Between
			Points int `query:"points" minimum:"10" maximum:"2000" default:"500" doc:"Approximate number of points per signal; never more than twice as many"`
		}) (*answer[control.Timeline], error) {
			w, err := s.fleet.Worker(ctx, in.ID)
			if err != nil {
				return nil, problem(err)
			}
			from, to, err := in.read()
			if err != nil {
				return nil, problem(err)
			}
			return ok(s.timeline(ctx, w.ID, &w, from, to, in.Points))
		})
}

// bound parses a bound of a question about the past. A time without a zone is
// in UTC.
func bound(field, text string) (time.Time, error) {
	t, err := when.Bound(time.Now().UTC(), text)
	if err != nil {
		err = invalid(field, err.Error())
	}
	return t, err
}

// Between is the time range of a question about the past.
type Between struct {
	From string `query:"from" maxLength:"80" doc:"RFC 3339, how long before now (2h), 18:00, fri 18:00 or 2006-01-02 15:04, in UTC or with a zone behind it"`
	To   string `query:"to" maxLength:"80" doc:"End, in the same format; default: now"`
}

func (b Between) read() (from, to time.Time, err error) {
	if from, err = bound("query.from", b.From); err == nil {
		to, err = bound("query.to", b.To)
	}
	return from, to, err
}

// Then is the past moment of a question.
type Then struct {
	At string `query:"at" maxLength:"80" doc:"RFC 3339, how long ago (2h), 18:00, fri 18:00 or 2006-01-02 15:04, in UTC or with a zone behind it; default now"`
}

func (t Then) read() (time.Time, error) {
	at, err := bound("query.at", t.At)
	return at.UTC(), err
}

// period validates the time range of a question about the past.
func period(from, to, now time.Time, usual, most time.Duration) (time.Time, time.Time, error) {
	if to.IsZero() || to.After(now) {
		to = now
	}
	if from.IsZero() {
		from = to.Add(-usual)
	}
	switch {
	case !from.Before(to):
		return from, to, invalid("from", "it is not before to, and not before now")
	case to.Sub(from) > most:
		return from, to, invalid("from", "it is more than "+most.String()+" before to")
	}
	return from.UTC(), to.UTC(), nil
}

// recorded reads evidence. Without a journal all of it is missing.
func (s *Server) recorded(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	if s.evidence == nil {
		return []evidence.Missing{{From: q.From, To: q.To, Why: "this server keeps no evidence"}}, nil
	}
	return s.evidence.Read(ctx, q, yield)
}

// timeline builds the timeline of an object from its records: of a worker, or
// of the agent of machine w; w is nil if no worker is that machine.
func (s *Server) timeline(ctx context.Context, object string, w *fleet.Worker, from, to time.Time, points int) (control.Timeline, error) {
	from, to, err := period(from, to, time.Now(), 24*time.Hour, maxTimeline)
	if err != nil {
		return control.Timeline{}, err
	}
	l := &lines{t: control.Timeline{From: from, To: to, Signals: []control.TimelineSignal{}, Verdicts: []control.TimelineVerdict{},
		Changes: []control.TimelineChange{}, Missing: []evidence.Missing{}}, width: to.Sub(from) / time.Duration(points), most: points}
	if w != nil {
		changes, err := s.changes(ctx, fleet.AuditQuery{WorkerID: w.ID, From: from})
		if err != nil {
			return control.Timeline{}, err
		}
		l.follows(w, changes[w.ID])
	}
	var follow evidence.Follow
	missing, err := s.recorded(ctx, evidence.Query{Object: object, From: from, To: to}, func(r evidence.Record) error {
		follow.Add(&r, l.add)
		return nil
	})
	if err != nil {
		return control.Timeline{}, err
	}
	follow.End(to, l.add)
	for _, m := range missing {
		l.miss(m)
	}
	if w == nil {
		l.t.Power = seenUp(l.t.Verdicts, from, to)
	}
	return l.done(), nil
}

// follows adds a worker's power changes, which reach to the present.
func (l *lines) follows(w *fleet.Worker, changes []control.TimelineChange) {
	l.t.WorkerID, l.t.Power = w.ID, powers(changes, string(w.Status), later(l.t.From, w.CreatedAt), l.t.To)
	l.off = stops(changes, string(w.Status), l.t.To)
	for _, c := range changes {
		if !c.At.Before(l.t.From) && c.At.Before(l.t.To) {
			l.t.Changes = append(l.t.Changes, c)
		}
	}
}

// seenUp returns the power of a machine that is known only by its own reports:
// it ran when it reported, and is unknown in between.
func seenUp(verdicts []control.TimelineVerdict, from, to time.Time) []control.TimelinePower {
	out := []control.TimelinePower{}
	add := func(status string, end time.Time) {
		if n := len(out); n > 0 && out[n-1].Status == status {
			out[n-1].To = end
		} else if from.Before(end) {
			out = append(out, control.TimelinePower{From: from, To: end, Status: status})
		}
		from = later(from, end)
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

// powers returns the statuses of a worker from one time to another, from its
// changes since from, which reach to the present, and its present status.
func powers(changes []control.TimelineChange, present string, from, to time.Time) []control.TimelinePower {
	out := []control.TimelinePower{}
	add := func(status string, end time.Time) {
		if end.After(to) {
			end = to
		}
		if n := len(out); n > 0 && out[n-1].Status == status {
			out[n-1].To = end
		} else if from.Before(end) {
			out = append(out, control.TimelinePower{From: from, To: end, Status: status})
		}
		from = later(from, end)
	}
	for i, c := range changes {
		add(c.From, c.At)
		if i == len(changes)-1 {
			present = c.To
		}
	}
	add(present, to)
	return out
}

// span is a time during which a worker did not run. A zero from means always
// before.
type span struct{ from, to time.Time }

func runs(status string) bool {
	return status == string(power.WorkerRunning) || status == string(power.WorkerDraining)
}

// stops returns the times until to during which a worker did not run, from its
// changes, which reach to the present, and its present status.
func stops(changes []control.TimelineChange, present string, to time.Time) []span {
	var out []span
	first := present
	if len(changes) > 0 {
		first = changes[0].From
	}
	down := !runs(first)
	if down {
		out = append(out, span{})
	}
	for _, c := range changes {
		switch {
		case runs(c.To) && down:
			out[len(out)-1].to = c.At
		case !runs(c.To) && !down:
			out = append(out, span{from: c.At})
		}
		down = !runs(c.To)
	}
	if down {
		out[len(out)-1].to = later(to, out[len(out)-1].from)
	}
	return out
}

func gone(status string) bool {
	return status == string(power.WorkerTerminating) || status == string(power.WorkerTerminated)
}

// ended returns when a worker terminated and ceased to cost or save anything;
// zero if it exists. If the termination is no longer recorded, it returns from.
func ended(changes []control.TimelineChange, present string, from time.Time) time.Time {
	if n := len(changes); n > 0 {
		present = changes[n-1].To
	}
	if !gone(present) {
		return time.Time{}
	}
	for _, c := range slices.Backward(changes) {
		if !gone(c.To) {
			break
		}
		from = c.At
	}
	return from
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// story collects power changes, by worker, from audit log entries in order.
type story struct {
	changes map[string][]control.TimelineChange
	pauses  map[string]evidence.Change // who decided the pause that is in progress, and why
}

func newStory() *story {
	return &story{changes: map[string][]control.TimelineChange{}, pauses: map[string]evidence.Change{}}
}

// add processes an entry. The controller carries out others' requests, so a
// change is attributed to the requester.
func (s *story) add(e *fleet.Entry) {
	if e.Reason != "" && e.Pauses() {
		s.pauses[e.WorkerID] = evidence.Change{By: e.By.Name, Reason: e.Reason, Policy: e.Policy}
	}
	if e.To == "" || e.WorkerID == "" {
		return
	}
	by, reason, held := e.By.Name, cmp.Or(e.Reason, e.Detail), ""
	switch e.To {
	case power.WorkerStopping, power.WorkerStopped, power.WorkerDraining:
		p := s.pauses[e.WorkerID]
		by, reason = cmp.Or(p.By, by), cmp.Or(p.Reason, reason)
		held = p.Policy
	default:
		if delete(s.pauses, e.WorkerID); slices.Contains(e.Events, fleet.EventResumed) {
			by = cmp.Or(e.Detail, by)
		}
	}
	s.changes[e.WorkerID] = append(s.changes[e.WorkerID], control.TimelineChange{At: e.At,
		Change: evidence.Change{From: string(e.From), To: string(e.To), By: by, Reason: reason, Policy: held}})
}

// changes returns the power changes in the audit log since q.From, by worker,
// preceded by those that show the state at q.From: since it last began to run.
// For the complete fleet only entries about power are read.
func (s *Server) changes(ctx context.Context, q fleet.AuditQuery) (map[string][]control.TimelineChange, error) {
	out := newStory()
	add := func(e *fleet.Entry) error { out.add(e); return nil }
	if q.WorkerID == "" {
		b := beginnings{known: map[string]bool{}, decided: map[string][]fleet.Entry{}}
		err := s.fleet.PowerAudit(ctx, q.From, func(e *fleet.Entry) error {
			if !q.From.IsZero() && !b.known[e.WorkerID] {
				return b.begin(e, out, func() error { return s.fleet.PowerBefore(ctx, e.WorkerID, q.From, add) })
			}
			return add(e)
		})
		return out.changes, err
	}
	if !q.From.IsZero() {
		if err := s.fleet.PowerBefore(ctx, q.WorkerID, q.From, add); err != nil {
			return nil, err
		}
	}
	q.Limit = 1000
	for {
		page, err := s.fleet.Audit(ctx, q)
		if err != nil {
			return nil, err
		}
		for i := range page.Entries {
			out.add(&page.Entries[i])
		}
		if q.After = page.Next; q.After == "" {
			return out.changes, nil
		}
	}
}

// beginnings tracks workers whose first power change has not been read yet.
type beginnings struct {
	known   map[string]bool          // workers whose first change was read
	decided map[string][]fleet.Entry // the pauses before it
}

// begin processes an entry of a worker that is not known yet. It calls before,
// to read further back, only if the first change does not show that the worker
// ran and why it stopped running.
func (b *beginnings) begin(e *fleet.Entry, to *story, before func() error) error {
	id := e.WorkerID
	if e.To == "" {
		b.decided[id] = append(b.decided[id], *e)
		return nil
	}
	b.known[id] = true
	if told := len(b.decided[id]) > 0 || e.Pauses() || runs(string(e.To)); !runs(string(e.From)) || !told {
		if err := before(); err != nil {
			return err
		}
	}
	for i := range b.decided[id] {
		to.add(&b.decided[id][i])
	}
	delete(b.decided, id)
	to.add(e)
	return nil
}

// lines builds a timeline as the records arrive.
type lines struct {
	t     control.Timeline
	off   []span
	width time.Duration // of the time that one point stands for
	most  int
}

// add adds one stretch, without the times at which the worker did not run.
func (l *lines) add(s evidence.Stretch) {
	for _, o := range l.off {
		if !o.to.After(s.From) || !o.from.Before(s.To) {
			continue
		}
		if o.from.After(s.From) {
			before := s
			before.To, before.Known = o.from, s.Covers(o.from)
			l.draw(before)
		}
		if s.From = o.to; !s.From.Before(s.To) {
			return
		}
		if s.Known {
			s.Known = false // a state before the stop says nothing about the time after it
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

// point adds a reading, or merges it with the last one when both fall into the
// width of one point. The more active one is then shown, and unrecorded time
// between them makes the point unknown rather than quiet. So there are at most
// two points per width.
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

// weight orders points by what must not be lost: use first, then unknown, then
// the higher value.
func weight(p control.TimelinePoint) float64 {
	w := map[idle.State]float64{idle.Active: 3, idle.Unknown: 2, idle.Quiet: 1}[p.State] * 1e18
	if p.Value != nil {
		w += min(*p.Value, 1e17)
	}
	return w
}

// miss adds a missing time range, clipped to the timeline.
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
