package agent

import (
	"context"
	"errors"
	"fmt"

	"lull/internal/base/delay"
	"lull/internal/link/agentctl"
)

// call sends the action. What EC2 cannot hibernate is stopped instead, which
// is said.
func (a *Agent) call(ctx context.Context, at *attempt) error {
	action := at.out.Action // what can change it has ended
	cctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	detail, err := a.send(cctx, at, action)
	if err != nil {
		return explain(action, err)
	}
	return a.durable(ctx, func() error {
		if at.out.EndedAt != nil {
			return nil // the machine slept and woke before the answer came
		}
		at.out.Phase, at.out.Detail = phaseAccepted, detail
		a.record(agentctl.Entry{Kind: "action", Sentence: action + " was accepted. " + detail, Outcome: copyOf(at.out)})
		return nil
	})
}

// send asks the cloud, or the machine itself where there is none.
func (a *Agent) send(ctx context.Context, at *attempt, action string) (detail string, err error) {
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
		return hibernate(ctx, cloud, at)
	}
	_, err = cloud.Stop(ctx, false)
	return "", err
}

// hibernate asks for it where the instance was launched for it, and stops
// where it was not.
func hibernate(ctx context.Context, cloud Cloud, at *attempt) (string, error) {
	if at.cannotHibernate {
		_, err := cloud.Stop(ctx, false)
		return "The instance was not launched for hibernation and is stopped instead.", err
	}
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
