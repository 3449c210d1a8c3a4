package hosts

import (
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/protocol/control"
)

// LastHeard explains the state of an instance from its host's last report, for a host
// that does not answer: what the state was then, and that its readings are unknown.
// unheard is why the host does not answer. i is nil if the instance is unknown too.
func LastHeard(v *control.HostView, i *control.HostInstance, at time.Time, unheard string) *control.HostWhy {
	y := &control.HostWhy{Host: v.Name, Readings: "unknown", Unheard: unheard, Instance: i, Events: []control.HostEvent{}}
	y.Account = why.Account{Kind: why.KindInstance, At: at, Signals: []evidence.Signal{}, Leases: []idle.Lease{}}
	y.NoRemedy()
	if i == nil {
		y.At = time.Now().UTC()
		y.Ask("why is it as it is").Note(why.Unknown, unheard)
		return y
	}
	y.Object, y.Name = i.ID, i.Name
	if !at.IsZero() {
		y.Ask("why was it as it was").Note(why.Unknown, "The records of that time are on its host. "+unheard)
		return y
	}
	y.At = *v.HeardAt
	state := i.State
	if v.Heard {
		y.State, y.Leases = state, i.Leases
		y.Ask("why is it " + state)
	} else {
		state = i.LastState
		y.Ask("why is it "+state).Note(why.Unknown, unheard+" It said then:")
	}
	y.Add(why.LastState, y.At, "", i.Name, state)
	if state != "running" {
		y.Note(why.LastReason, i.StatusReason)
		return y
	}
	for _, b := range i.Blocks {
		y.Block(b)
	}
	return y
}
