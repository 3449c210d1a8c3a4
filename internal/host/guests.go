package host

import (
	"context"
	"fmt"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/guest"
)

// ProgramBusy changes the number of connections on which the programs of an
// instance report work in progress.
func (h *Host) ProgramBusy(id string, change int) error {
	i, err := h.find(id)
	if err != nil {
		return err
	}
	i.setBusy(change)
	return nil
}

// FromProgram carries out a message of a program, other than Busy and Waiting. It
// may wait for the instance's lock until ctx ends.
//
// A frozen program cannot send. A message that arrives while the instance is paused
// was therefore sent before the freeze. If the message keeps the instance awake, it
// wakes it.
func (h *Host) FromProgram(ctx context.Context, id string, m guest.Message) error {
	i, err := h.find(id)
	if err != nil {
		return err
	}
	return h.fromGuest(ctx, i, m)
}

// FromHarness carries out a message that an instance's guest agent forwards. Busy
// means that one of the programs in the guest has work in progress, and Waiting
// that none has. It may wait for the instance's lock until ctx ends.
func (h *Host) FromHarness(ctx context.Context, id string, m guest.Message) error {
	i, err := h.find(id)
	if err != nil {
		return err
	}
	if m.Method != guest.Busy && m.Method != guest.Waiting {
		return h.fromGuest(ctx, i, m)
	}
	on := m.Method == guest.Busy
	i.mu.Lock()
	changed := i.says.inside != on
	i.says.inside = on
	i.mu.Unlock()
	switch {
	case changed && on:
		i.setBusy(+1)
	case changed:
		i.setBusy(-1)
	}
	return nil
}

// fromGuest carries out one message of a workload.
func (h *Host) fromGuest(ctx context.Context, i *inst, m guest.Message) error {
	p := m.Params
	switch m.Method {
	case guest.Keepalive:
		if err := h.Hold(ctx, i.id, idle.Lease{Holder: p.Holder, Reason: p.Reason}, p.TTL); err != nil {
			return err
		}
		if i.state().Asleep() {
			i.wantWake("the program asked for a lease")
		}
		return nil
	case guest.KeepaliveRelease:
		return h.ReleaseLease(ctx, i.id, p.Holder)
	case guest.Busy, guest.Waiting: // repeats a report that holds as long as the program's connection
	case guest.NextDue:
		at := p.At
		if at.IsZero() {
			at = h.Now().Add(p.In)
		}
		if at.Sub(h.Now()) > instance.MaxDeadline {
			return fmt.Errorf("cannot use next_due: %s is too far away", at.Format(time.RFC3339))
		}
		return i.setNextDue(ctx, at)
	default:
		return fmt.Errorf("cannot accept %s from a process: the host measures the activity of processes itself", m.Method)
	}
	return nil
}
