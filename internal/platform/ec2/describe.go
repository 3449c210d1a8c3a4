package ec2

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// pageSize is EC2's maximum page size.
const pageSize = 1000

// States returns the state of every instance of the region, by id, with one call
// per thousand instances. EC2 forgets terminated instances after about an hour.
// If a page cannot be read, States returns an error and no states.
func (c *Client) States(ctx context.Context) (map[string]State, error) {
	const op = "DescribeInstanceStatus"
	states := map[string]State{}
	if c.noStatus.Load() {
		return c.statesDescribed(ctx)
	}
	var reader statusReader
	err := pages(func(token *string) (*string, error) {
		out, err := c.api.DescribeInstanceStatus(ctx, &ec2.DescribeInstanceStatusInput{
			IncludeAllInstances: aws.Bool(true), MaxResults: aws.Int32(pageSize), NextToken: token,
		}, ec2.WithAPIOptions(reader.option))
		if err != nil {
			return nil, err
		}
		for _, s := range reader.states {
			states[s.id] = State(s.state)
		}
		for _, s := range out.InstanceStatuses {
			if s.InstanceState == nil || aws.ToString(s.InstanceId) == "" {
				return nil, errors.New("the answer holds an instance without id or state")
			}
			states[*s.InstanceId] = State(s.InstanceState.Name)
		}
		return out.NextToken, nil
	})
	if err == nil {
		return states, nil
	}
	failure := c.failed(op, err)
	if KindOf(failure) == Invalid { // the cloud may not have the operation
		if described, err := c.statesDescribed(ctx); err == nil {
			c.noStatus.Store(true)
			return described, nil
		}
	}
	return nil, failure
}

func (c *Client) statesDescribed(ctx context.Context) (map[string]State, error) {
	states := map[string]State{}
	err := c.describe(ctx, &ec2.DescribeInstancesInput{MaxResults: aws.Int32(pageSize)}, func(i Instance) { states[i.ID] = i.State })
	if err != nil {
		return nil, c.failed(opDescribe, err)
	}
	return states, nil
}

// Instances returns the instances with the given ids. missing lists the ids that
// EC2 does not know in this region and account, sorted and without duplicates;
// they do not affect the result for the others.
func (c *Client) Instances(ctx context.Context, ids []string) (found map[string]Instance, missing []string, err error) {
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	for _, id := range ids {
		if !ValidID(id) {
			return nil, nil, &Error{Op: opDescribe, Region: c.region, Kind: Invalid, IDs: []string{id},
				Err: fmt.Errorf("%q is not an instance id", id)}
		}
	}
	found = make(map[string]Instance, len(ids))
	err = batches(ids, func(part []string) error {
		return c.known(ctx, part, found)
	})
	if err != nil {
		return nil, nil, err
	}
	for _, id := range ids {
		if _, ok := found[id]; !ok {
			missing = append(missing, id)
		}
	}
	return found, missing, nil
}

const opDescribe = "DescribeInstances"

// known adds those of ids that EC2 knows to found. EC2 refuses a request with an
// unknown id and usually names it; the request is repeated without that id. If
// EC2 names none of ids, the request is halved.
func (c *Client) known(ctx context.Context, ids []string, found map[string]Instance) error {
	for len(ids) > 0 {
		err := c.describe(ctx, &ec2.DescribeInstancesInput{InstanceIds: ids}, func(i Instance) { found[i.ID] = i })
		if err == nil {
			return nil
		}
		failure := c.failed(opDescribe, err, ids...)
		var e *Error
		if !errors.As(failure, &e) || e.Kind != NotFound {
			return failure
		}
		named := idsIn(e.Message)
		rest := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return slices.Contains(named, id) })
		if len(rest) == len(ids) {
			if len(ids) == 1 {
				return nil
			}
			half := len(ids) / 2
			if err := c.known(ctx, ids[:half], found); err != nil {
				return err
			}
			rest = ids[half:]
		}
		ids = rest
	}
	return nil
}

var idInText = regexp.MustCompile(`\bi-[0-9a-f]{8,17}\b`)

// idsIn returns the instance ids in a message.
func idsIn(message string) []string { return idInText.FindAllString(message, -1) }

// describe calls each for every instance in a paginated answer.
func (c *Client) describe(ctx context.Context, in *ec2.DescribeInstancesInput, each func(Instance)) error {
	return pages(func(token *string) (*string, error) {
		in.NextToken = token
		out, err := c.api.DescribeInstances(ctx, in)
		if err != nil {
			return nil, err
		}
		for _, r := range out.Reservations {
			for _, i := range r.Instances {
				one := instanceOf(i)
				if one.ID == "" || one.State == "" {
					return nil, errors.New("the answer holds an instance without id or state")
				}
				each(one)
			}
		}
		return out.NextToken, nil
	})
}

// Query selects instances. Empty fields do not restrict.
type Query struct {
	// Tags must all be present; an empty value matches any.
	Tags map[string]string
	// ImageName is a pattern with * and ? for the name of the AMI, among the AMIs
	// of ImageOwners; no owner means "self". It does not match an instance whose
	// AMI is deregistered.
	ImageName   string
	ImageOwners []string
	// ClientToken is the token of the launch request.
	ClientToken string
	// Terminated includes instances that are terminated or shutting down.
	Terminated bool
}

// Find returns all instances that q selects, sorted by id.
func (c *Client) Find(ctx context.Context, q Query) ([]Instance, error) {
	filters := q.filters()
	groups := [][]types.Filter{filters}
	if q.ImageName != "" {
		images, err := c.images(ctx, q.ImageName, q.ImageOwners)
		if err != nil {
			return nil, err
		}
		groups = nil
		var ids []string
		for _, i := range images {
			ids = append(ids, i.ID)
		}
		for part := range slices.Chunk(ids, batch) {
			groups = append(groups, append(slices.Clone(filters), filter("image-id", part...)))
		}
	}
	var found []Instance
	for _, group := range groups {
		in := &ec2.DescribeInstancesInput{Filters: group, MaxResults: aws.Int32(pageSize)}
		if err := c.describe(ctx, in, func(i Instance) { found = append(found, i) }); err != nil {
			return nil, c.failed(opDescribe, err)
		}
	}
	slices.SortFunc(found, byID)
	return slices.CompactFunc(found, func(a, b Instance) bool { return a.ID == b.ID }), nil
}

func (q Query) filters() []types.Filter {
	var filters []types.Filter
	for key, value := range q.Tags {
		if value == "" {
			filters = append(filters, filter("tag-key", key))
			continue
		}
		filters = append(filters, filter("tag:"+key, value))
	}
	if q.ClientToken != "" {
		filters = append(filters, filter("client-token", q.ClientToken))
	}
	if !q.Terminated {
		filters = append(filters, filter("instance-state-name", string(Pending), string(Running), string(Stopping), string(Stopped)))
	}
	return filters
}

func filter(name string, values ...string) types.Filter {
	return types.Filter{Name: aws.String(name), Values: values}
}
