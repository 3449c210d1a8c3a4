package agent

import (
	"context"
	"errors"
	"fmt"

	"lull/internal/base/delay"
	"lull/internal/link/agentctl"
	"lull/internal/link/tags"
)

// call sends the action. What EC2 cannot hibernate is stopped instead, which
// is said.
func (a *Agent) call(ctx context.Context, at *attempt) error {
	action := at.out.Action // what can change it has ended
	cctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	fallback, err := a.send(cctx, action)
	if err != nil {
		return explain(action, err)
	}
	return a.durable(ctx, func() error {
		if at.out.EndedAt != nil {
			return nil // the machine slept and woke before the answer came
		}
		at.out.Phase = phaseAccepted
		if fallback != "" {
			action = actionStop
			at.out.Action, at.out.Detail = actionStop, fallback
			a.tagged.ended = tags.ActionStopping // it says that it hibernates
			a.tellTags(a.now())
		}
		a.record(agentctl.Entry{Kind: "action", Sentence: action + " was accepted. " + at.out.Detail, Outcome: copyOf(at.out)})
		return nil
	})
}

// send asks the cloud, or the machine itself where there is none. fallback says
// why it is stopped instead of hibernated, if it is.
func (a *Agent) send(ctx context.Context, action string) (fallback string, err error) {
	cloud, power := a.o.Cloud, a.o.Power
	switch {
	case action == actionTerminate && cloud != nil:
		return "", cloud.Terminate(ctx)
	case action == actionTerminate:
		return "", errors.New("there is no cloud here to terminate it")
	case cloud == nil && power == nil:
		return "", errors.New("there is neither a cloud nor a way to power off")
	case action == actionHibernate && cloud == nil:
		if err = power.Hibernate(ctx); err == nil {
			return "", nil
		}
		return "It cannot hibernate (" + err.Error() + ") and is powered off instead.", power.PowerOff(ctx)
	case cloud == nil:
		return "", power.PowerOff(ctx)
	case action == actionHibernate:
		return hibernate(ctx, cloud)
	}
	_, err = cloud.Stop(ctx, false)
	return "", err
}

// hibernate asks for it, and says why it is a stop where EC2 does not.
func hibernate(ctx context.Context, cloud Cloud) (string, error) {
	fallback, err := cloud.Stop(ctx, true)
	if fallback != "" {
		fallback = "EC2 does not hibernate it (" + fallback + ") and it is stopped instead."
	}
	return fallback, err
}

// observe waits for an accepted action to happen. Accepted is not done: a
// machine that still runs after acceptedWait was not stopped.
func (a *Agent) observe(ctx context.Context, at *attempt) error {
	if err := delay.For(ctx, acceptedWait); err != nil {
		return err
	}
	return fmt.Errorf("the call was accepted %s ago, and the machine still runs", acceptedWait)
}
