package ec2

import (
	"context"
	"errors"
	"fmt"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// A Change is a request that EC2 accepted. It is not done yet: observe it.
type Change struct {
	Previous State `json:"previous"`
	Current  State `json:"current"`
}

// Start starts a stopped instance.
func (c *Client) Start(ctx context.Context, id string) (Change, error) {
	const op = "StartInstances"
	out, err := c.api.StartInstances(ctx, &ec2.StartInstancesInput{InstanceIds: []string{id}})
	if err != nil {
		return Change{}, c.failed(op, err, id)
	}
	return c.change(op, id, out.StartingInstances)
}

// A Stop is an accepted stop.
type Stop struct {
	Change
	// Hibernating says that the memory is kept.
	Hibernating bool `json:"hibernating"`
	// Fallback is why a plain stop was made where hibernation was asked for;
	// empty if there was no need.
	Fallback string `json:"fallback,omitempty"`
}

// Stop stops a running instance, hibernating it if asked. Where EC2 says that
// the instance cannot hibernate it is stopped plainly, and the answer says so;
// any other failure is returned without a second try.
func (c *Client) Stop(ctx context.Context, id string, hibernate bool) (Stop, error) {
	change, err := c.stop(ctx, id, hibernate)
	var e *Error
	if !hibernate || !errors.As(err, &e) || e.Kind != HibernateUnsupported {
		return Stop{Change: change, Hibernating: hibernate && err == nil}, err
	}
	fallback := fmt.Sprintf("%s: %s", e.Code, e.Message)
	if change, err = c.stop(ctx, id, false); err != nil {
		return Stop{Fallback: fallback}, err
	}
	return Stop{Change: change, Fallback: fallback}, nil
}

func (c *Client) stop(ctx context.Context, id string, hibernate bool) (Change, error) {
	const op = "StopInstances"
	in := &ec2.StopInstancesInput{InstanceIds: []string{id}}
	if hibernate {
		in.Hibernate = aws.Bool(true)
	}
	out, err := c.api.StopInstances(ctx, in)
	if err != nil {
		return Change{}, c.failed(op, err, id)
	}
	return c.change(op, id, out.StoppingInstances)
}

// Terminate ends an instance forever.
func (c *Client) Terminate(ctx context.Context, id string) (Change, error) {
	const op = "TerminateInstances"
	out, err := c.api.TerminateInstances(ctx, &ec2.TerminateInstancesInput{InstanceIds: []string{id}})
	if err != nil {
		return Change{}, c.failed(op, err, id)
	}
	return c.change(op, id, out.TerminatingInstances)
}

func (c *Client) change(op, id string, changes []types.InstanceStateChange) (Change, error) {
	for _, ch := range changes {
		if aws.ToString(ch.InstanceId) == id && ch.CurrentState != nil {
			out := Change{Current: State(ch.CurrentState.Name)}
			if ch.PreviousState != nil {
				out.Previous = State(ch.PreviousState.Name)
			}
			return out, nil
		}
	}
	return Change{}, c.failed(op, errors.New("the answer does not name the instance"), id)
}
