package ec2

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// attributeWithin bounds the read of an attribute, including the wait for the
// rate limit.
const attributeWithin = time.Second

// asgTag is the tag that an Auto Scaling group sets on its members.
const asgTag = "aws:autoscaling:groupName"

// Check is the result of one preflight check.
type Check struct {
	Set bool `json:"set"`
	// Err is the reason why the result is unknown; Set is then meaningless.
	Err error `json:"-"`
}

// Preflight lists the obstacles to a stop of an instance.
type Preflight struct {
	Instance Instance `json:"instance"`
	// InstanceStore is set if the instance type has instance-store volumes, which
	// lose their content in a stop.
	InstanceStore Check `json:"instance_store"`
	// ChangesAddress is set if the instance has a public address that is not an
	// Elastic IP and would change.
	ChangesAddress Check `json:"changes_address"`
	// AutoScaling is set for a member of an Auto Scaling group, because the group
	// would replace a stopped instance.
	AutoScaling Check `json:"auto_scaling"`
	Spot        Check `json:"spot"`
	// StopProtected is set if the instance's attribute disableApiStop is. The
	// attribute needs one call per instance. If the rate limit does not allow
	// that within attributeWithin, Err is of kind Throttled or Canceled.
	StopProtected Check `json:"stop_protected"`
}

// Preflight checks every known obstacle to a stop of the instance. It fails as
// a whole only if the instance itself cannot be read, with kind NotFound if EC2
// does not know it. Otherwise each check fails on its own.
func (c *Client) Preflight(ctx context.Context, id string) (Preflight, error) {
	i, err := c.reading.do(ctx, plain, id)
	switch {
	case KindOf(err) != "":
		return Preflight{}, err
	case err != nil:
		return Preflight{}, c.failed(opDescribe, err, id)
	case i.ID == "":
		return Preflight{}, &Error{Op: opDescribe, Region: c.region, Kind: NotFound, IDs: []string{id}}
	}
	_, member := i.Tags[asgTag]
	return Preflight{
		Instance:       i,
		InstanceStore:  c.instanceStore(ctx, i),
		ChangesAddress: c.changesAddress(ctx, i),
		AutoScaling:    Check{Set: member},
		Spot:           Check{Set: i.Spot},
		StopProtected:  c.stopProtected(ctx, id),
	}, nil
}

// instanceStore reports whether the type has instance-store volumes. The answer
// for a type is cached.
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

// changesAddress reports whether a stop changes the public address. EC2's
// description of the instance contains the kind of the address. On other clouds,
// the Elastic IPs are read, for many instances at once.
func (c *Client) changesAddress(ctx context.Context, i Instance) Check {
	if i.Address != AddressUnknown {
		return Check{Set: i.Address == AddressTransient}
	}
	e, err := c.addresses.do(ctx, plain, i.ID)
	if err = cmp.Or(err, e.err); err != nil {
		return Check{Err: c.failed("DescribeAddresses", err, i.ID)}
	}
	return Check{Set: !e.has}
}

// elasticIP reports whether an instance has an Elastic IP. If err is not nil,
// that is unknown. err is the same for all instances of a joined call, so that
// the call is not halved.
type elasticIP struct {
	has bool
	err error
}

// elasticIPs reads the Elastic IPs of instances.
func (c *Client) elasticIPs(ctx context.Context, _ string, ids []string) (map[string]elasticIP, error) {
	out, err := c.api.DescribeAddresses(ctx, &ec2.DescribeAddressesInput{Filters: []types.Filter{filter("instance-id", slices.Clone(ids)...)}})
	found := make(map[string]elasticIP, len(ids))
	for _, id := range ids {
		found[id] = elasticIP{err: err}
	}
	if err == nil {
		for _, a := range out.Addresses {
			found[aws.ToString(a.InstanceId)] = elasticIP{has: true}
		}
	}
	return found, nil
}

func (c *Client) stopProtected(ctx context.Context, id string) Check {
	const op = "DescribeInstanceAttribute"
	ctx, cancel := context.WithTimeout(ctx, attributeWithin)
	defer cancel()
	// These calls cannot be joined. Only a few at a time wait for the rate limit,
	// so that in a large fleet other reads get their turn.
	select {
	case c.attributes <- struct{}{}:
		defer func() { <-c.attributes }()
	case <-ctx.Done():
		return Check{Err: c.failed(op, &limitError{context.Cause(ctx)}, id)}
	}
	out, err := c.api.DescribeInstanceAttribute(ctx, &ec2.DescribeInstanceAttributeInput{InstanceId: aws.String(id), Attribute: types.InstanceAttributeNameDisableApiStop})
	if err != nil {
		return Check{Err: c.failed(op, err, id)}
	}
	if out.DisableApiStop == nil || out.DisableApiStop.Value == nil {
		return Check{Err: c.failed(op, errors.New("the answer does not contain disableApiStop"), id)}
	}
	return Check{Set: *out.DisableApiStop.Value}
}
