// Package account explains why an instance is in its state, at present or at a past
// time.
package account

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/protocol/hostctl"
)

// Reasons in records that Explain recognizes.
const (
	LetRun    = "it was thawed while no daemon was running" // reason of a resume
	Restarted = "restarted: "                               // prefix of the reason of a restart
)

// Explain adds to y why the instance is in its current state, and what would change
// that.
func Explain(y *hostctl.Why) {
	o := &y.Instance
	var none time.Time
	at := func(t *time.Time) time.Time {
		if t == nil {
			return none
		}
		return *t
	}
	connection := func(wakes bool) string {
		if wakes {
			return "a connection to it, or: "
		}
		return ""
	}
	switch power.Instance(o.State) {
	case power.Running:
		y.Note(why.BootedAnew, o.BootedAnew)
		y.Note(why.Trouble, o.Trouble)
		if o.StatusReason == LetRun {
			y.Add(why.LetRun, at(o.LastResumedAt), "", LetRun)
		}
		_, how, _ := strings.Cut(o.StatusReason, Restarted)
		y.Note(why.Restarted, how)
	case power.Paused, power.Reclaimed, power.Hibernated:
		y.NoRemedy()
		y.Ask("why is it "+o.State).Add(why.Paused, at(o.LastPausedAt), o.LastPausedBy, o.StatusReason)
		y.Advise(why.Resume, connection(o.WakesOnConnection), o.Name)
		open := "a connection is open"
		if o.Connections > 1 {
			open = fmt.Sprintf("%d connections are open", o.Connections)
		}
		switch {
		case o.StopAt != nil && o.Connections > 0:
			y.Add(why.StopsOpen, *o.StopAt, "", open)
		case o.StopAt != nil && o.Deaf != "":
			y.Add(why.StopsDeaf, *o.StopAt, "", o.Deaf)
		case o.StopAt != nil:
			y.Add(why.StopsUnused, *o.StopAt, "")
		case o.Connections > 0 && o.StopAfter > 0:
			y.Note(why.KeptOpen, open)
		}
	default:
		y.NoRemedy()
		y.Ask("why is it "+o.State).Add(why.InState, at(o.StateSince), "", o.State, cmp.Or(o.StatusReason, "nothing is recorded"))
		if o.State == string(power.Stopped) {
			y.Advise(why.StartOne, connection(o.StartsOnConnection && o.Deaf == ""), o.Name)
			if o.Enabled {
				y.Note(why.Deaf, o.Deaf)
			}
		}
		if !o.Enabled {
			y.Add(why.Disabled, none, "")
		}
	}
	y.Note(why.Misset, o.Misset)
	if o.Unavailable != "" {
		y.NoRemedy()
		y.Ask("why is its state unknown").Add(why.Unreached, none, "", o.State, o.Unavailable)
		y.Advise(why.EndRun, o.Name)
	}
	if w := o.Waiting; w != nil {
		y.NoRemedy()
		y.Add(why.Waiting, w.Since, "", w.Place, w.Until.Format(time.RFC3339), w.Reason)
		y.Advise(why.MakeRoom)
	}
}

// Unavailable explains why only the record of an instance is known. now is the time
// of the explanation.
func Unavailable(o hostctl.Instance, now time.Time) hostctl.Why {
	a := why.Account{Object: o.ID, Name: o.Name, Kind: why.KindInstance, At: now, State: o.State, Signals: []evidence.Signal{}, Leases: []idle.Lease{}}
	a.NoRemedy()
	a.Ask("why is its state unknown").Add(why.NoRuntime, time.Time{}, "", o.State, o.Unavailable)
	a.Advise(why.AddRuntime)
	return hostctl.Why{Instance: o, Account: a}
}

// Journal returns the evidence of past checks and changes.
type Journal interface {
	Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error)
}

// Then explains the state of an instance at a past time. a identifies the instance,
// and y is its current view.
func Then(ctx context.Context, j Journal, a why.Account, at time.Time, y hostctl.Why) (hostctl.Why, error) {
	a.At = at
	var c evidence.Recall
	var down *evidence.Record // the last change before at, if that was not to running
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
	y.Account = why.Past(a, c)
	y.Paused, y.Resumed = paused, resumed
	if down != nil {
		y.NoRemedy()
		y.Ask("why was it "+a.State).Add(why.SinceThen, down.At, down.Change.By, a.State, cmp.Or(down.Change.Reason, "nothing is recorded"))
	}
	return y, nil
}
