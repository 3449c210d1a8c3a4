package agent

import (
	"context"
	"fmt"

	"lull/internal/platform/ec2"
)

// EC2 is the Cloud of an EC2 instance. It is also a TagSource, which needs permission
// for DescribeTags.
type EC2 struct {
	Client *ec2.Client
	ID     string
}

var (
	_ Cloud     = EC2{}
	_ TagSource = EC2{}
)

// Describe implements Cloud.
func (e EC2) Describe(ctx context.Context) (Instance, error) {
	found, _, err := e.Client.Instances(ctx, []string{e.ID})
	if err != nil {
		return Instance{}, err
	}
	i, ok := found[e.ID]
	if !ok {
		return Instance{}, fmt.Errorf("cannot describe %s: EC2 does not know it in %s", e.ID, e.Client.Region())
	}
	return Instance{State: string(i.State), HibernationConfigured: i.Hibernation}, nil
}

// WriteTags implements Cloud.
func (e EC2) WriteTags(ctx context.Context, t map[string]string) error {
	return e.Client.CreateTags(ctx, []string{e.ID}, t)
}

// Stop implements Cloud.
func (e EC2) Stop(ctx context.Context, hibernate bool) (string, error) {
	s, err := e.Client.Stop(ctx, e.ID, hibernate)
	return s.Fallback, err
}

// Terminate implements Cloud.
func (e EC2) Terminate(ctx context.Context) error {
	_, err := e.Client.Terminate(ctx, e.ID)
	return err
}

// Tags implements TagSource with DescribeTags.
func (e EC2) Tags(ctx context.Context) (map[string]string, error) {
	found, err := e.Client.Tags(ctx, []string{e.ID})
	if err != nil {
		return nil, err
	}
	return found[e.ID], nil
}

// explain adds advice for the user to an error of EC2.
func explain(action string, err error) error {
	hint := ""
	switch ec2.KindOf(err) {
	case ec2.Unauthorized:
		hint = "this machine's role does not allow it (see lull agent iam): "
	case ec2.Throttled:
		hint = "EC2 throttles the calls: "
	case ec2.Protected:
		hint = "the instance is protected against it: "
	}
	return fmt.Errorf("cannot %s: %s%w", action, hint, err)
}
