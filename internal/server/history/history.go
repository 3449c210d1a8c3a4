// Package history reads the past power states of a fleet's workers from the audit
// log, and joins them with the recorded checks.
//
// A power change is attributed to the actor who requested it, not to the controller
// that carried it out, even if the period begins after the request. What the log no
// longer contains is unknown, never guessed: the status before the first kept change
// is the status that this change started from. Errors are those of the log and of the
// evidence, and *failure.Invalid for an impossible period. The package changes
// nothing. Its functions are safe for concurrent use if the log is.
package history

import (
	"cmp"
	"context"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
)

// Entries reads pages of the audit log. *fleet.Fleet implements it.
type Entries interface {
	Audit(ctx context.Context, q audit.Query) (audit.Page, error)
	NewestAudit(ctx context.Context, q audit.Query) (audit.Page, error)
}

// Log reads the audit log's entries about power. *fleet.Fleet implements it.
type Log interface {
	Audit(ctx context.Context, q audit.Query) (audit.Page, error)
	PowerAudit(ctx context.Context, from time.Time, yield func(*audit.Entry) error) error
	PowerBefore(ctx context.Context, id string, at time.Time, yield func(*audit.Entry) error) error
}

// Powers returns the statuses of a worker from one time to another. changes are its
// changes since from, up to now, and present is its current status.
func Powers(changes []control.TimelineChange, present string, from, to time.Time) []control.TimelinePower {
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
		from = Later(from, end)
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

// Runs reports whether a worker of that status can run programs.
func Runs(status string) bool {
	return status == string(power.WorkerRunning) || status == string(power.WorkerDraining)
}

// Stops returns the periods before to in which a worker did not run. changes are its
// changes up to now, and present is its current status. A zero From means since
// before the first change. Who stopped it is not filled in.
func Stops(changes []control.TimelineChange, present string, to time.Time) []evidence.Off {
	var out []evidence.Off
	first := present
	if len(changes) > 0 {
		first = changes[0].From
	}
	down := !Runs(first)
	if down {
		out = append(out, evidence.Off{})
	}
	for _, c := range changes {
		switch {
		case Runs(c.To) && down:
			out[len(out)-1].To = c.At
		case !Runs(c.To) && !down:
			out = append(out, evidence.Off{From: c.At})
		}
		down = !Runs(c.To)
	}
	if down {
		out[len(out)-1].To = Later(to, out[len(out)-1].From)
	}
	return out
}

func gone(status string) bool {
	return status == string(power.WorkerTerminating) || status == string(power.WorkerTerminated)
}

// Ended returns when a worker terminated, after which it neither costs nor saves
// anything; zero if it still exists. If the termination is no longer recorded, it
// returns from.
func Ended(changes []control.TimelineChange, present string, from time.Time) time.Time {
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

// Later returns the later of two times.
func Later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// story collects power changes by worker. Entries must be added in the order of the
// log.
type story struct {
	changes map[string][]control.TimelineChange
	pauses  map[string]evidence.Change // decision of the pause in progress, by worker
}

func newStory() *story {
	return &story{changes: map[string][]control.TimelineChange{}, pauses: map[string]evidence.Change{}}
}

// add processes an entry. The controller carries out requests of others, so a change
// is attributed to the requester.
func (s *story) add(e *audit.Entry) {
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
		if delete(s.pauses, e.WorkerID); slices.Contains(e.Events, audit.EventResumed) {
			by = cmp.Or(e.Detail, by)
		}
	}
	s.changes[e.WorkerID] = append(s.changes[e.WorkerID], control.TimelineChange{At: e.At,
		Change: evidence.Change{From: string(e.From), To: string(e.To), By: by, Reason: reason, Policy: held}})
}

// Changes returns the power changes in the audit log since q.From, by worker. Before
// them come the earlier changes that determine the state at q.From: those since the
// worker last began to run. If q names no worker, only entries about power are read.
func Changes(ctx context.Context, log Log, q audit.Query) (map[string][]control.TimelineChange, error) {
	out := newStory()
	add := func(e *audit.Entry) error { out.add(e); return nil }
	if q.WorkerID == "" {
		b := beginnings{known: map[string]bool{}, decided: map[string][]audit.Entry{}}
		err := log.PowerAudit(ctx, q.From, func(e *audit.Entry) error {
			if !q.From.IsZero() && !b.known[e.WorkerID] {
				return b.begin(e, out, func() error { return log.PowerBefore(ctx, e.WorkerID, q.From, add) })
			}
			return add(e)
		})
		return out.changes, err
	}
	if !q.From.IsZero() {
		if err := log.PowerBefore(ctx, q.WorkerID, q.From, add); err != nil {
			return nil, err
		}
	}
	q.Limit = 1000
	for {
		page, err := log.Audit(ctx, q)
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

// beginnings tracks for which workers a first power change has been read.
type beginnings struct {
	known   map[string]bool          // workers whose first change has been read
	decided map[string][]audit.Entry // decisions to pause before the first change
}

// begin processes an entry of a worker whose first change has not been read. It calls
// before to read further back, unless the first change shows that the worker was
// running, and why it then stopped.
func (b *beginnings) begin(e *audit.Entry, to *story, before func() error) error {
	id := e.WorkerID
	if e.To == "" {
		b.decided[id] = append(b.decided[id], *e)
		return nil
	}
	b.known[id] = true
	if told := len(b.decided[id]) > 0 || e.Pauses() || Runs(string(e.To)); !Runs(string(e.From)) || !told {
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

// Power is a worker's power state at a past moment, and how it last stopped and
// started before.
type Power struct {
	State           string
	Paused, Resumed *evidence.Turn
	Decided         *audit.Entry // the decision of the last stop
	Created         *audit.Entry // the entry that created the worker, if it did not exist yet
}

// maxEntries is the maximum number of audit entries that At reads.
const maxEntries = 5000

// At returns a worker's power state at a past moment. It reads the audit log
// backwards until the state is known, at most maxEntries.
func At(ctx context.Context, log Entries, w *worker.Worker, at time.Time) (Power, error) {
	id := w.ID
	var out Power
	var back []audit.Entry // newest first
	q := audit.Query{WorkerID: id, To: at.Add(time.Nanosecond), Limit: 100}
	for {
		page, err := log.NewestAudit(ctx, q)
		if err != nil {
			return out, err
		}
		back = append(back, page.Entries...)
		if q.After = page.Next; q.After == "" || len(back) >= maxEntries || knowsPower(back) {
			break
		}
		q.Limit = 1000
	}
	slices.Reverse(back)
	story, resumes := newStory(), map[time.Time]bool{}
	for i := range back {
		e := &back[i]
		story.add(e)
		if resumes[e.At] = resumes[e.At] || slices.Contains(e.Events, audit.EventResumed); e.Pauses() {
			out.Decided = e
		}
	}
	for _, ch := range story.changes[id] {
		out.State = ch.To
		switch turn := (&evidence.Turn{At: ch.At, By: ch.By, Reason: ch.Reason}); {
		case Runs(ch.From) && !Runs(ch.To):
			out.Paused = turn
		case resumes[ch.At]: // imports of running workers and first launches do not count
			out.Resumed = turn
		}
	}
	if out.State != "" {
		return out, nil
	}
	// Without an earlier change, the state is the one from which the first later
	// change started.
	q = audit.Query{WorkerID: id, From: at, Limit: 1000}
	for read := 0; read < maxEntries; {
		page, err := log.Audit(ctx, q)
		if err != nil {
			return out, err
		}
		for _, e := range page.Entries {
			if e.To != "" {
				if out.State = string(e.From); e.From == "" {
					out.Created = &e
				}
				return out, nil
			}
		}
		read += len(page.Entries)
		if q.After = page.Next; q.After == "" {
			break
		}
	}
	out.State = string(w.Status) // no change since is known
	return out, nil
}

// knowsPower reports whether entries, newest first, reach back to the worker's last
// start. With why, they must also reach back to its last stop.
func knowsPower(back []audit.Entry) bool {
	up, down, why := false, false, false
	for i := range back {
		e := &back[i]
		up = up || e.To == power.WorkerRunning
		down = down || Runs(string(e.From)) && e.To != "" && !Runs(string(e.To))
		why = why || down && (slices.Contains(e.Events, audit.EventPaused) || e.Action == audit.DrainStarted)
	}
	return up && down && why
}
