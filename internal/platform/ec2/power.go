package ec2

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// Change is a request to change an instance's state that EC2 accepted. The change
// may not have completed; only the instance's state shows that.
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
	return c.changed(op, id, changes(out.StartingInstances)[id], nil)
}

// Stop is an accepted stop.
type Stop struct {
	Change
	// Hibernating reports that the instance hibernates, so its memory is kept.
	Hibernating bool `json:"hibernating"`
	// Fallback is why the instance was stopped plainly although hibernation was
	// requested; otherwise empty.
	Fallback string `json:"fallback,omitempty"`
}

// Stop stops a running instance, hibernating it if hibernate is set. If EC2
// reports that the instance cannot hibernate, Stop stops it plainly and sets
// Fallback. Any other failure is returned without a retry.
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
	kind := plain
	if hibernate {
		kind = hibernating
	}
	change, err := c.stopping.do(ctx, kind, id)
	return c.changed("StopInstances", id, change, err)
}

// Terminate terminates an instance, permanently.
func (c *Client) Terminate(ctx context.Context, id string) (Change, error) {
	change, err := c.terminating.do(ctx, plain, id)
	return c.changed("TerminateInstances", id, change, err)
}

// Kinds of calls that are joined across instances.
const (
	plain       = ""
	hibernating = "hibernate"
)

// join sets up the joiners of c.
func (c *Client) join() {
	c.reading = joiner[Instance]{limit: c.reads, gather: 500 * time.Millisecond, call: func(ctx context.Context, _ string, ids []string) (map[string]Instance, error) {
		found := map[string]Instance{}
		return found, c.known(ctx, slices.Compact(slices.Sorted(slices.Values(ids))), found)
	}}
	c.addresses = joiner[elasticIP]{limit: c.reads, gather: 500 * time.Millisecond, call: c.elasticIPs}
	c.stopping = joiner[Change]{limit: c.writes, gather: 50 * time.Millisecond, call: func(ctx context.Context, kind string, ids []string) (map[string]Change, error) {
		in := &ec2.StopInstancesInput{InstanceIds: ids}
		if kind == hibernating {
			in.Hibernate = aws.Bool(true)
		}
		out, err := c.api.StopInstances(ctx, in)
		if err != nil {
			return nil, c.failed("StopInstances", err, ids...)
		}
		return changes(out.StoppingInstances), nil
	}}
	c.terminating = joiner[Change]{limit: c.writes, gather: 50 * time.Millisecond, call: func(ctx context.Context, _ string, ids []string) (map[string]Change, error) {
		out, err := c.api.TerminateInstances(ctx, &ec2.TerminateInstancesInput{InstanceIds: ids})
		if err != nil {
			return nil, c.failed("TerminateInstances", err, ids...)
		}
		return changes(out.TerminatingInstances), nil
	}}
	c.tagging = joiner[struct{}]{limit: c.writes, gather: 50 * time.Millisecond, call: func(ctx context.Context, kind string, ids []string) (map[string]struct{}, error) {
		var tags map[string]string
		if err := json.Unmarshal([]byte(kind), &tags); err != nil {
			return nil, err
		}
		if _, err := c.api.CreateTags(ctx, &ec2.CreateTagsInput{Resources: ids, Tags: awsTags(tags)}); err != nil {
			return nil, c.failed("CreateTags", err, ids...)
		}
		return nil, nil
	}}
}

// changed returns the outcome of a joined call for one instance.
func (c *Client) changed(op, id string, change Change, err error) (Change, error) {
	switch {
	case KindOf(err) != "":
		return Change{}, err
	case err != nil:
		return Change{}, c.failed(op, err, id)
	case change.Current == "":
		return Change{}, c.failed(op, errors.New("the answer does not name the instance"), id)
	}
	return change, nil
}

// changes returns the changes in an answer, by instance.
func changes(all []types.InstanceStateChange) map[string]Change {
	out := make(map[string]Change, len(all))
	for _, ch := range all {
		if ch.CurrentState == nil {
			continue
		}
		change := Change{Current: State(ch.CurrentState.Name)}
		if ch.PreviousState != nil {
			change.Previous = State(ch.PreviousState.Name)
		}
		out[aws.ToString(ch.InstanceId)] = change
	}
	return out
}
