package ec2

import (
	"context"
	"errors"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// asgTag is the tag that an Auto Scaling group puts on its members.
const asgTag = "aws:autoscaling:groupName"

// A Check is one fact that is looked at before a stop.
type Check struct {
	Set bool `json:"set"`
	// Err is why it is not known; then Set means nothing.
	Err error `json:"-"`
}

// Preflight lists the obstacles to a stop of an instance.
type Preflight struct {
	Instance Instance `json:"instance"`
	// InstanceStore: the type has volumes that lose their content.
	InstanceStore Check `json:"instance_store"`
	// ChangesAddress: a public address that is not an Elastic IP would change.
	ChangesAddress Check `json:"changes_address"`
	// AutoScaling: a member of a group, which would replace it.
	AutoScaling Check `json:"auto_scaling"`
	Spot        Check `json:"spot"`
	// StopProtected and TerminationProtected are the instance's attributes
	// disableApiStop and disableApiTermination.
	StopProtected        Check `json:"stop_protected"`
	TerminationProtected Check `json:"termination_protected"`
}

// Preflight looks at everything that could make a stop of the instance a bad
// idea. It fails as a whole only if the instance itself cannot be read, with
// kind NotFound if EC2 does not know it; else each check fails alone.
func (c *Client) Preflight(ctx context.Context, id string) (Preflight, error) {
	found, _, err := c.Instances(ctx, []string{id})
	if err != nil {
		return Preflight{}, err
	}
	i, ok := found[id]
	if !ok {
		return Preflight{}, &Error{Op: opDescribe, Region: c.region, Kind: NotFound, IDs: []string{id}}
	}
	_, member := i.Tags[asgTag]
	return Preflight{
		Instance:             i,
		InstanceStore:        c.instanceStore(ctx, i),
		ChangesAddress:       c.changesAddress(ctx, i),
		AutoScaling:          Check{Set: member},
		Spot:                 Check{Set: i.Spot},
		StopProtected:        c.attribute(ctx, id, types.InstanceAttributeNameDisableApiStop),
		TerminationProtected: c.attribute(ctx, id, types.InstanceAttributeNameDisableApiTermination),
	}, nil
}

// instanceStore reports whether the type has instance-store volumes; a type's
// answer is asked for once.
func (c *Client) instanceStore(ctx context.Context, i Instance) Check {
	if i.RootDevice == string(types.DeviceTypeInstanceStore) {
		return Check{Set: true}
	}
	c.mu.Lock()
	has, known := c.types[i.Type]
	c.mu.Unlock()
	if known {
		return Check{Set: has}
	}
	const op = "DescribeInstanceTypes"
	out, err := c.api.DescribeInstanceTypes(ctx, &ec2.DescribeInstanceTypesInput{InstanceTypes: []types.InstanceType{types.InstanceType(i.Type)}})
	if err != nil {
		return Check{Err: c.failed(op, err)}
	}
	if len(out.InstanceTypes) != 1 || out.InstanceTypes[0].InstanceStorageSupported == nil {
		return Check{Err: c.failed(op, errors.New("the answer does not say whether the type has instance-store volumes"))}
	}
	has = *out.InstanceTypes[0].InstanceStorageSupported
	c.mu.Lock()
	defer c.mu.Unlock()
	c.types[i.Type] = has
	return Check{Set: has}
}

func (c *Client) changesAddress(ctx context.Context, i Instance) Check {
	if i.Address != AddressUnknown {
		return Check{Set: i.Address == AddressTransient}
	}
	out, err := c.api.DescribeAddresses(ctx, &ec2.DescribeAddressesInput{Filters: []types.Filter{filter("instance-id", i.ID)}})
	if err != nil {
		return Check{Err: c.failed("DescribeAddresses", err, i.ID)}
	}
	return Check{Set: len(out.Addresses) == 0}
}

func (c *Client) attribute(ctx context.Context, id string, name types.InstanceAttributeName) Check {
	const op = "DescribeInstanceAttribute"
	out, err := c.api.DescribeInstanceAttribute(ctx, &ec2.DescribeInstanceAttributeInput{InstanceId: aws.String(id), Attribute: name})
	if err != nil {
		return Check{Err: c.failed(op, err, id)}
	}
	value := out.DisableApiStop
	if name == types.InstanceAttributeNameDisableApiTermination {
		value = out.DisableApiTermination
	}
	if value == nil || value.Value == nil {
		return Check{Err: c.failed(op, errors.New("the answer does not hold "+string(name)), id)}
	}
	return Check{Set: *value.Value}
}
