package history

import (
	"context"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/core/savings"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/roster"
)

// Evidence reads the recorded checks of all servers.
type Evidence interface {
	// Read yields records in order of time, and returns what is missing.
	Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error)
}

// Recorded reads from's evidence. If from is nil, it returns all of it as missing.
func Recorded(ctx context.Context, from Evidence, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	if from == nil {
		return []evidence.Missing{{From: q.From, To: q.To, Why: "this server stores no evidence"}}, nil
	}
	return from.Read(ctx, q, yield)
}

// Roster lists all workers. *roster.Roster implements it.
type Roster interface {
	All(ctx context.Context) (lines []*roster.Line, revision int64, err error)
}

// Templates reads templates. *fleet.Fleet implements it.
type Templates interface {
	Template(ctx context.Context, name string) (launch.Template, error)
}

// Reader reads the past of many workers. All fields but Evidence are required.
type Reader struct {
	Log       Log
	Roster    Roster
	Templates Templates
	Evidence  Evidence // nil: none is kept
}

// Period completes and validates a period in the past, and returns it in UTC. A zero
// or future to means now; a zero from means usual before to. The error is
// *failure.Invalid if from is not before to, or by more than most.
func Period(from, to, now time.Time, usual, most time.Duration) (time.Time, time.Time, error) {
	if to.IsZero() || to.After(now) {
		to = now
	}
	if from.IsZero() {
		from = to.Add(-usual)
	}
	switch {
	case !from.Before(to):
		return from, to, &failure.Invalid{Field: "from", Detail: "want a time before to and before now"}
	case to.Sub(from) > most:
		return from, to, &failure.Invalid{Field: "from", Detail: "more than " + most.String() + " before to"}
	}
	return from.UTC(), to.UTC(), nil
}

// Skew is how far a caller's clock may be ahead: a moment up to Skew after now counts
// as now.
const Skew = 5 * time.Second

// Past is the recorded past of a worker over a period, or that of a machine with an
// agent, which need not be a worker.
type Past struct {
	Worker   worker.Worker // only its region is set if the machine is no worker
	Machine  string        // of an agent; empty for a worker's own past
	Template *launch.Template
	Policy   string // policy under which its use is grouped; set by the caller
	Volumes  []savings.Volume
	Off      []evidence.Off // when it did not run, in order
	Ended    time.Time      // time of termination; zero if it is not terminated

	follow evidence.Follow
}

// Until returns to, or the time of termination if that is earlier.
func (p *Past) Until(to time.Time) time.Time {
	if !p.Ended.IsZero() && p.Ended.Before(to) {
		return p.Ended
	}
	return to
}

// Workers returns, by ID, the past over a period of the workers that q selects,
// including terminated ones.
func (r *Reader) Workers(ctx context.Context, q worker.Filter, from, to time.Time) (map[string]*Past, error) {
	changes, err := Changes(ctx, r.Log, audit.Query{From: from})
	if err != nil {
		return nil, err
	}
	q.WithTerminated = true
	lines, _, err := r.Roster.All(ctx)
	if err != nil {
		return nil, err
	}
	tmpls := map[string]*launch.Template{}
	out := map[string]*Past{}
	for _, l := range lines {
		w := l.Worker
		if !q.Matches(&w) {
			continue
		}
		tmpl, known := tmpls[w.TemplateName]
		if !known && w.TemplateName != "" {
			if t, err := r.Templates.Template(ctx, w.TemplateName); err == nil {
				tmpl = &t
			}
			tmpls[w.TemplateName] = tmpl
		}
		if out[w.ID], err = r.past(ctx, &w, tmpl, changes[w.ID], from, to); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// past returns the past of one worker from its changes since from. Without changes,
// its state then is its current one.
func (r *Reader) past(ctx context.Context, w *worker.Worker, tmpl *launch.Template, changes []control.TimelineChange, from, to time.Time) (*Past, error) {
	if changes == nil && !Runs(string(w.Status)) && w.Status != power.WorkerTerminated {
		before := newStory()
		if err := r.Log.PowerBefore(ctx, w.ID, from, func(e *audit.Entry) error { before.add(e); return nil }); err != nil {
			return nil, err
		}
		changes = before.changes[w.ID]
	}
	p := &Past{Worker: *w, Template: tmpl, Volumes: Volumes(w, tmpl), Ended: Ended(changes, string(w.Status), from)}
	p.Off = offs(w, changes, from, p.Until(to))
	return p, nil
}

// Volumes returns the volumes that a worker pays for: those that EC2 reported or, if
// unknown, the gp3 volumes of its template.
func Volumes(w *worker.Worker, tmpl *launch.Template) []savings.Volume {
	var out []savings.Volume
	for _, v := range w.Volumes {
		out = append(out, savings.Volume{Type: v.Type, GB: float64(v.GB)})
	}
	if out == nil && tmpl != nil && tmpl.Capacity.StorageGB > 0 {
		out = []savings.Volume{{Type: "gp3", GB: float64(tmpl.Capacity.StorageGB)}}
	}
	return out
}

// offs returns the periods within [from, to] in which a worker did not run.
func offs(w *worker.Worker, changes []control.TimelineChange, from, to time.Time) []evidence.Off {
	var out []evidence.Off
	why := func(at time.Time) (automatic bool, held string) {
		for _, c := range changes {
			if c.At.Equal(at) {
				return power.Reason(c.Reason).Automatic(), c.Policy
			}
		}
		return w.PauseReason.Automatic(), w.PausePolicy // the current pause, as in the record
	}
	for _, off := range Stops(changes, string(w.Status), to) {
		switch {
		case !off.From.IsZero():
			off.Automatic, off.Policy = why(off.From)
		case len(changes) == 0 && w.LastPausedAt != nil && w.Status == power.WorkerStopped:
			off.Automatic, off.Policy = w.PauseReason.Automatic(), w.PausePolicy // stopped since before the oldest known change
		}
		if off.From.Before(from) {
			off.From = from
		}
		if off.To.After(to) {
			off.To = to
		}
		if off.From.Before(off.To) {
			out = append(out, off)
		}
	}
	return out
}

// Replay joins the recorded checks of a period into stretches. It yields each stretch
// together with the past that it belongs to, cut off at the end of the period or of
// the worker. of returns the past for a record, or nil to skip the record; it may add
// a past to all. progress gets the share of the period that was read, from 0 to 1; an
// error of it ends the replay, as does the end of ctx. Replay returns which records
// are missing. Each past can be replayed only once.
func (r *Reader) Replay(ctx context.Context, all map[string]*Past, of func(*evidence.Record) *Past, from, to time.Time, yield func(*Past, evidence.Stretch), progress func(share float64) error) ([]evidence.Missing, error) {
	// The first check after to covers the time until then; the part beyond to is cut
	// off.
	give := func(p *Past) func(evidence.Stretch) {
		return func(x evidence.Stretch) {
			if end := p.Until(to); x.To.After(end) {
				x.To = end
			}
			if x.From.Before(x.To) {
				yield(p, x)
			}
		}
	}
	missing, err := Recorded(ctx, r.Evidence, evidence.Query{From: from, To: to}, func(rec evidence.Record) error {
		if ctx.Err() != nil {
			return context.Cause(ctx) // the caller has stopped waiting
		}
		if err := progress(min(1, max(0, float64(rec.At.Sub(from))/float64(to.Sub(from))))); err != nil {
			return err
		}
		if p := of(&rec); p != nil && !p.follow.Reached(to) {
			p.follow.Add(&rec, give(p))
		}
		return nil
	})
	for _, p := range all {
		p.follow.End(to, give(p))
	}
	if missing == nil {
		missing = []evidence.Missing{}
	}
	return missing, err
}

// Use returns the fields of a savings.Use that do not depend on the period. The cost
// of a machine that is no worker is unknown.
func (p *Past) Use() savings.Use {
	if p.Worker.ID == "" {
		return savings.Use{Worker: p.Machine, Name: p.Machine, Region: p.Worker.AWSRegion}
	}
	return savings.Use{Worker: p.Worker.ID, Name: p.Worker.Name, Region: p.Worker.AWSRegion, InstanceType: p.Worker.InstanceType, Policy: p.Policy, Tags: p.Worker.Tags, Volumes: p.Volumes}
}
