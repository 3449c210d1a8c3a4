package ec2

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// Image is an AMI.
type Image struct {
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Description string    `json:"description,omitempty"`
	Created     time.Time `json:"created"`
	OwnerID     string    `json:"owner_id,omitempty"`
}

// ErrNoImage means that no available image has a name that matches.
var ErrNoImage = fmt.Errorf("no available image matches that name")

// Machine is the combination of an image and an instance type.
type Machine struct {
	// Hibernates reports whether an instance launched from the image with the
	// type can hibernate. If not, Why is the reason.
	Hibernates bool   `json:"hibernates"`
	Why        string `json:"why,omitempty"`
	MemoryMiB  int64  `json:"memory_mib"`
	RootDevice string `json:"root_device"` // such as "/dev/xvda"; empty for an instance-store image
	RootGiB    int32  `json:"root_gib"`    // size in the image; a root volume is never smaller
}

// hibernateBelow is a memory size in MiB. EC2 hibernates a Linux instance only if
// it has less memory.
const hibernateBelow = 150 << 10

// Machine describes what a launch of an instance type from an image would result
// in.
func (c *Client) Machine(ctx context.Context, imageID, instanceType string) (Machine, error) {
	images, err := c.api.DescribeImages(ctx, &ec2.DescribeImagesInput{ImageIds: []string{imageID}})
	if err != nil {
		return Machine{}, c.failed("DescribeImages", err)
	}
	kinds, err := c.api.DescribeInstanceTypes(ctx, &ec2.DescribeInstanceTypesInput{InstanceTypes: []types.InstanceType{types.InstanceType(instanceType)}})
	if err != nil {
		return Machine{}, c.failed("DescribeInstanceTypes", err)
	}
	if len(images.Images) != 1 || len(kinds.InstanceTypes) != 1 {
		return Machine{}, c.failed("DescribeImages", fmt.Errorf("found %d images and %d instance types for %s on %s, want one of each", len(images.Images), len(kinds.InstanceTypes), imageID, instanceType))
	}
	image, kind := images.Images[0], kinds.InstanceTypes[0]
	m := Machine{Hibernates: true}
	if image.RootDeviceType == types.DeviceTypeEbs {
		m.RootDevice = aws.ToString(image.RootDeviceName)
	}
	for _, d := range image.BlockDeviceMappings {
		if d.Ebs != nil && aws.ToString(d.DeviceName) == m.RootDevice {
			m.RootGiB = aws.ToInt32(d.Ebs.VolumeSize)
		}
	}
	if kind.MemoryInfo != nil {
		m.MemoryMiB = aws.ToInt64(kind.MemoryInfo.SizeInMiB)
	}
	for _, bar := range []struct {
		set bool
		why string
	}{
		{!aws.ToBool(kind.HibernationSupported), "instance type " + instanceType + " cannot hibernate"},
		{aws.ToBool(kind.BareMetal), "bare metal cannot hibernate"},
		{m.MemoryMiB <= 0, "the memory of " + instanceType + " is not known"},
		{m.MemoryMiB >= hibernateBelow, "instances with 150 GiB of memory or more cannot hibernate"},
		{m.RootDevice == "" || m.RootGiB <= 0, "the image has no EBS root volume"},
		{image.VirtualizationType != "" && image.VirtualizationType != types.VirtualizationTypeHvm, "the image is not HVM"},
	} {
		if bar.set {
			m.Hibernates, m.Why = false, bar.why
			break
		}
	}
	return m, nil
}

// NewestImage returns the newest available image whose name matches pattern (*
// and ?) and that belongs to one of owners. No owner means "self", because anyone
// can publish an image under any name. If no image matches, the error is
// ErrNoImage.
func (c *Client) NewestImage(ctx context.Context, pattern string, owners []string) (Image, error) {
	images, err := c.images(ctx, pattern, owners)
	if err != nil {
		return Image{}, err
	}
	if len(images) == 0 {
		return Image{}, fmt.Errorf("cannot find image %q in %s: %w", pattern, c.region, ErrNoImage)
	}
	return images[0], nil
}

// images returns the available images with a matching name, newest first.
func (c *Client) images(ctx context.Context, pattern string, owners []string) ([]Image, error) {
	const op = "DescribeImages"
	if pattern == "" {
		return nil, &Error{Op: op, Region: c.region, Kind: Invalid, Err: fmt.Errorf("the name pattern is empty")}
	}
	if len(owners) == 0 {
		owners = []string{"self"}
	}
	var found []Image
	err := pages(func(token *string) (*string, error) {
		out, err := c.api.DescribeImages(ctx, &ec2.DescribeImagesInput{
			Owners: owners, MaxResults: aws.Int32(pageSize), NextToken: token,
			Filters: []types.Filter{filter("name", pattern), filter("state", string(types.ImageStateAvailable))},
		})
		if err != nil {
			return nil, err
		}
		for _, i := range out.Images {
			created, err := time.Parse(time.RFC3339, aws.ToString(i.CreationDate))
			if err != nil {
				return nil, fmt.Errorf("image %s has an invalid creation date %q", aws.ToString(i.ImageId), aws.ToString(i.CreationDate))
			}
			if i.State != "" && i.State != types.ImageStateAvailable {
				continue
			}
			found = append(found, Image{
				ID: aws.ToString(i.ImageId), Name: aws.ToString(i.Name), Description: aws.ToString(i.Description),
				Created: created, OwnerID: aws.ToString(i.OwnerId),
			})
		}
		return out.NextToken, nil
	})
	if err != nil {
		return nil, c.failed(op, err)
	}
	slices.SortFunc(found, func(a, b Image) int {
		return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID))
	})
	return found, nil
}

func byID(a, b Instance) int { return cmp.Compare(a.ID, b.ID) }
