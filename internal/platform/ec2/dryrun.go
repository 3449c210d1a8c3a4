package ec2

import (
	"context"
	"errors"
	"fmt"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// DryRun asks EC2 whether it would accept a call, without making it. It returns
// nil if EC2 would. op is StartInstances, StopInstances, TerminateInstances or
// CreateTags.
func (c *Client) DryRun(ctx context.Context, op, id string) error {
	ids, dry := []string{id}, aws.Bool(true)
	var err error
	switch op {
	case "StartInstances":
		_, err = c.api.StartInstances(ctx, &ec2.StartInstancesInput{InstanceIds: ids, DryRun: dry})
	case "StopInstances":
		_, err = c.api.StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: ids, DryRun: dry})
	case "TerminateInstances":
		_, err = c.api.TerminateInstances(ctx, &ec2.TerminateInstancesInput{InstanceIds: ids, DryRun: dry})
	case "CreateTags":
		_, err = c.api.CreateTags(ctx, &ec2.CreateTagsInput{Resources: ids, DryRun: dry, Tags: []types.Tag{{Key: aws.String("lull:doctor"), Value: aws.String("")}}})
	default:
		return fmt.Errorf("cannot dry-run %s: unsupported call", op)
	}
	if err == nil {
		return nil
	}
	if err = c.failed(op, err, id); CodeOf(err) == "DryRunOperation" {
		return nil
	}
	return err
}

// CodeOf returns EC2's code in the *Error in err's tree, or "".
func CodeOf(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
