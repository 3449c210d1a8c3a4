package agent

import (
	"context"
	"errors"
	"fmt"

	"lull/internal/lib/delay"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// call sends the action. If EC2 cannot hibernate the instance, the instance is
// stopped instead, and the outcome says so.
func (a *Agent) call(ctx context.Context, at *attempt) error {
	action := at.out.Action // nothing can change the action anymore
	cctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	fallback, err := a.send(cctx, action)
	if err != nil {
		return explain(action, err)
	}
	return a.durable(ctx, func() error {
		if at.out.EndedAt != nil {
			return nil // the machine went down and was resumed before the answer arrived
		}
		at.out.Phase = phaseAccepted
		if fallback != "" {
			action = actionStop
			at.out.Action, at.out.Detail = actionStop, fallback
			a.tagged.ended = tags.ActionStopping // the tag had announced a hibernation
			a.tellTags(a.now())
		}
		a.record(agentctl.Entry{Kind: "action", Sentence: action + " was accepted. " + at.out.Detail, Outcome: copyOf(at.out)})
		return nil
	})
}

// send performs the action by the cloud, or on the machine itself if there is no
// cloud. fallback is why the machine is stopped instead of hibernated; otherwise
// empty.
func (a *Agent) send(ctx context.Context, action string) (fallback string, err error) {
	cloud, power := a.o.Cloud, a.o.Power
	switch {
	case action == actionTerminate && cloud != nil:
		return "", cloud.Terminate(ctx)
	case action == actionTerminate:
		return "", errors.New("no cloud was detected that could terminate it")
	case cloud == nil && power == nil:
		return "", errors.New("no cloud was detected and no command to power off is configured")
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

// hibernate requests a hibernation. If EC2 stops the instance instead, it returns
// why.
func hibernate(ctx context.Context, cloud Cloud) (string, error) {
	fallback, err := cloud.Stop(ctx, true)
	if fallback != "" {
		fallback = "EC2 does not hibernate it (" + fallback + ") and it is stopped instead."
	}
	return fallback, err
}

// observe waits until the accepted action has happened. It returns an error if the
// machine still runs after acceptedWait.
func (a *Agent) observe(ctx context.Context, at *attempt) error {
	if err := delay.For(ctx, acceptedWait); err != nil {
		return err
	}
	return fmt.Errorf("the call was accepted %s ago, and the machine is still running", acceptedWait)
}
