package ec2

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
)

// api holds the SDK's calls in use, as function values. With an *ec2.Client in a
// field, the linker would keep all 700 methods of the client, 28 MB of code,
// because reflection can reach them.
type api struct {
	CreateTags                call[ec2.CreateTagsInput, ec2.CreateTagsOutput]
	DeleteTags                call[ec2.DeleteTagsInput, ec2.DeleteTagsOutput]
	DescribeAddresses         call[ec2.DescribeAddressesInput, ec2.DescribeAddressesOutput]
	DescribeImages            call[ec2.DescribeImagesInput, ec2.DescribeImagesOutput]
	DescribeInstanceAttribute call[ec2.DescribeInstanceAttributeInput, ec2.DescribeInstanceAttributeOutput]
	DescribeInstanceStatus    call[ec2.DescribeInstanceStatusInput, ec2.DescribeInstanceStatusOutput]
	DescribeInstanceTypes     call[ec2.DescribeInstanceTypesInput, ec2.DescribeInstanceTypesOutput]
	DescribeInstances         call[ec2.DescribeInstancesInput, ec2.DescribeInstancesOutput]
	DescribeRegions           call[ec2.DescribeRegionsInput, ec2.DescribeRegionsOutput]
	DescribeTags              call[ec2.DescribeTagsInput, ec2.DescribeTagsOutput]
	DescribeVolumes           call[ec2.DescribeVolumesInput, ec2.DescribeVolumesOutput]
	RunInstances              call[ec2.RunInstancesInput, ec2.RunInstancesOutput]
	StartInstances            call[ec2.StartInstancesInput, ec2.StartInstancesOutput]
	StopInstances             call[ec2.StopInstancesInput, ec2.StopInstancesOutput]
	TerminateInstances        call[ec2.TerminateInstancesInput, ec2.TerminateInstancesOutput]
}

type call[I, O any] func(context.Context, *I, ...func(*ec2.Options)) (*O, error)

func newAPI(cfg aws.Config, option func(*ec2.Options)) api {
	c := ec2.NewFromConfig(cfg, option)
	return api{
		CreateTags:                c.CreateTags,
		DeleteTags:                c.DeleteTags,
		DescribeAddresses:         c.DescribeAddresses,
		DescribeImages:            c.DescribeImages,
		DescribeInstanceAttribute: c.DescribeInstanceAttribute,
		DescribeInstanceStatus:    c.DescribeInstanceStatus,
		DescribeInstanceTypes:     c.DescribeInstanceTypes,
		DescribeInstances:         c.DescribeInstances,
		DescribeRegions:           c.DescribeRegions,
		DescribeTags:              c.DescribeTags,
		DescribeVolumes:           c.DescribeVolumes,
		RunInstances:              c.RunInstances,
		StartInstances:            c.StartInstances,
		StopInstances:             c.StopInstances,
		TerminateInstances:        c.TerminateInstances,
	}
}
