package hosts

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/protocol/control"
)

// Told returns what the last report of a host that cannot be asked says about
// an instance: its state then, and that its readings are unknown. unheard says
// why it cannot be asked. i is nil if nothing is known of the instance either.
func Told(v *control.HostView, i *control.HostInstance, at time.Time, unheard string) *control.HostWhy {
	y := &control.HostWhy{Host: v.Name, Readings: "unknown", Unheard: unheard, Instance: i}
	y.Account = evidence.Account{Kind: evidence.KindInstance, At: at, Signals: []evidence.Signal{}, Leases: []idle.Lease{}, Change: []string{}}
	if i == nil {
		y.At, y.Question, y.Answer = time.Now().UTC(), "why is it as it is", "Not known. "+unheard
		return y
	}
	y.Object, y.Name = i.ID, i.Name
	if !at.IsZero() {
		y.Question = "why was it as it was"
		y.Answer = "Not known: what was recorded of it then lies with its host. " + unheard
		return y
	}
	y.At = *v.HeardAt
	if !v.Heard {
		y.Question, y.Answer = "why is it "+i.LastState, "Not known. "+unheard+" It said then: "+said(i, i.LastState)
		return y
	}
	y.State, y.Question, y.Answer, y.Leases = i.State, "why is it "+i.State, said(i, i.State), i.Leases
	return y
}

// said returns an instance's last own explanation.
func said(i *control.HostInstance, state string) string {
	parts := []string{fmt.Sprintf("%s is %s.", i.Name, state)}
	if state != "running" && i.StatusReason != "" {
		parts = append(parts, i.StatusReason+".")
	}
	if state == "running" {
		for _, b := range i.Blocks {
			parts = append(parts, b.Sentence)
		}
	}
	return strings.Join(parts, " ")
}
