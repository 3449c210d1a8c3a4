// Package why explains in sentences why an instance is in its state, now or at a
// past time.
package why

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// Reasons in records that Explain recognizes.
const (
	LetRun    = "it was let run while no daemon was there" // the reason of a resume
	Restarted = "restarted: "                              // the prefix of the reason of a restart
)

// Explain adds to y why its instance is in its state, and what would change that.
func Explain(y *hostctl.Why) {
	o := &y.Instance
	by := func(who, at string) string {
		s := "by " + cmp.Or(who, "nobody known")
		if at != "" {
			s += " at " + at
		}
		return s
	}
	when := func(t *time.Time) string {
		if t == nil {
			return ""
		}
		return t.Format(time.RFC3339)
	}
	switch power.Instance(o.State) {
	case power.Running:
		if o.BootedAnew != "" {
			y.Answer += " It was booted anew and not restored: " + o.BootedAnew + "."
		}
		if o.Trouble != "" {
			y.Answer += " Something keeps it from working: " + o.Trouble + "."
		}
		if o.StatusReason == LetRun {
			y.Answer += fmt.Sprintf(" It slept, and %s; that was found at %s.", LetRun, when(o.LastResumedAt))
		}
		if _, how, ok := strings.Cut(o.StatusReason, Restarted); ok {
			y.Answer += " It was restarted: " + how + "."
		}
	case power.Paused, power.Reclaimed, power.Hibernated:
		y.Question = "why is it " + o.State
		y.Answer = fmt.Sprintf("It was paused %s: %s.", by(o.LastPausedBy, when(o.LastPausedAt)), o.StatusReason)
		y.Change = []string{"lull resume " + o.Name}
		if o.WakesOnConnection {
			y.Change[0] = "a connection to it, or: " + y.Change[0]
		}
		open := "a connection is open"
		if o.Connections > 1 {
			open = fmt.Sprintf("%d connections are open", o.Connections)
		}
		switch {
		case o.StopAt != nil && o.Connections > 0:
			y.Answer += fmt.Sprintf(" It is stopped at %s without a new connection; until then %s and may not be ignored.", when(o.StopAt), open)
		case o.StopAt != nil && o.Deaf != "":
			y.Answer += fmt.Sprintf(" It is stopped at %s unless it is used before; from then on a connection does not start it: %s.", when(o.StopAt), o.Deaf)
		case o.StopAt != nil:
			y.Answer += fmt.Sprintf(" It is stopped at %s unless it is used before.", when(o.StopAt))
		case o.Connections > 0 && o.StopAfter > 0:
			y.Answer += fmt.Sprintf(" It is not stopped automatically while %s, because a stop would close them.", open)
		}
	default:
		y.Question = "why is it " + o.State
		y.Answer = fmt.Sprintf("It is %s since %s: %s.", o.State, when(o.StateSince), cmp.Or(o.StatusReason, "nothing is recorded"))
		y.Change = []string{}
		if o.State == string(power.Stopped) {
			y.Change = append(y.Change, "lull start "+o.Name)
			switch {
			case o.StartsOnConnection && o.Deaf == "":
				y.Change[0] = "a connection to it, or: " + y.Change[0]
			case o.Deaf != "" && o.Enabled:
				y.Answer += " A connection does not start it: " + o.Deaf + "."
			}
		}
		if !o.Enabled {
			y.Answer += " It is disabled: only a manual start resumes it."
		}
	}
	if o.Misset != "" {
		y.Answer += " Its settings do not fit together with the host's: " + o.Misset + "."
	}
	if o.Unavailable != "" {
		y.Question = "why is it not known how " + o.Name + " is"
		y.Answer = fmt.Sprintf("It was %s, and %s. It is retried automatically.", o.State, o.Unavailable)
		y.Change = []string{"its run answers, or: lull stop " + o.Name + ", which ends it as it is"}
	}
	if w := o.Waiting; w != nil {
		y.Answer += fmt.Sprintf(" It has been asked for at %s and waits, at place %d, until %s: %s.", when(&w.Since), w.Place, when(&w.Until), w.Reason)
		y.Change = []string{"others go to sleep, or: lull stop one of them, or a higher memory or wakes setting of the host"}
	}
}

// Unavailable explains, at now, why only the record of an instance is known.
func Unavailable(o hostctl.Instance, now time.Time) hostctl.Why {
	a := evidence.Account{Object: o.ID, Name: o.Name, Kind: evidence.KindInstance, At: now, State: o.State,
		Question: "why is it not known how " + o.Name + " is", Signals: []evidence.Signal{}, Leases: []idle.Lease{},
		Answer: fmt.Sprintf("It was %s, and nothing can be done with it: %s.", o.State, o.Unavailable),
		Change: []string{"the host is started with that runtime again"}}
	return hostctl.Why{Instance: o, Account: a}
}

// Journal holds the evidence of past checks and changes.
type Journal interface {
	Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error)
}

// Then explains the state of an instance at a past time. a identifies the
// instance, and y holds its present view.
func Then(ctx context.Context, j Journal, a evidence.Account, at time.Time, y hostctl.Why) (hostctl.Why, error) {
	a.At = at
	var c evidence.Recall
	var down *evidence.Record // the change in effect, if it is not to running
	var err error
	c.Missing, err = j.Read(ctx, evidence.Query{Object: a.Object, To: at}, func(r evidence.Record) error {
		c.Add(at, &r)
		if r.Change == nil || r.At.After(at) {
			return nil
		}
		a.State, down = r.Change.To, &r
		turn := &evidence.Turn{At: r.At, By: r.Change.By, Reason: r.Change.Reason}
		if r.Change.To == string(power.Running) {
			a.Resumed, down = turn, nil
		} else if r.Change.To == string(power.Paused) {
			a.Paused = turn
		}
		return nil
	})
	if err != nil {
		return y, err
	}
	paused, resumed := a.Paused, a.Resumed
	y.Account = evidence.Past(a, c)
	y.Paused, y.Resumed = paused, resumed
	if down != nil {
		y.Question, y.Change = "why was it "+a.State, []string{}
		y.Answer = fmt.Sprintf("It was %s since %s, by %s: %s.", a.State, down.At.Format(time.RFC3339), cmp.Or(down.Change.By, "nobody known"), cmp.Or(down.Change.Reason, "nothing is recorded"))
	}
	return y, nil
}
