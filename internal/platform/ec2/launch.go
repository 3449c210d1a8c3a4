package ec2

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// Launch contains all parameters of a launch. It is stored before the call, so
// that a retry sends exactly the same: for a known client token EC2 returns the
// first launch, and refuses different parameters.
type Launch struct {
	// ClientToken makes the launch idempotent, 1 to 64 printable ASCII bytes.
	ClientToken        string            `json:"client_token"`
	ImageID            string            `json:"image_id"`
	InstanceType       string            `json:"instance_type"`
	SubnetID           string            `json:"subnet_id,omitempty"`
	SecurityGroupIDs   []string          `json:"security_group_ids,omitempty"`
	KeyName            string            `json:"key_name,omitempty"`
	IAMInstanceProfile string            `json:"iam_instance_profile,omitempty"` // name or ARN
	UserData           string            `json:"user_data,omitempty"`            // plain text, at most 16 KiB
	Tags               map[string]string `json:"tags,omitempty"`                 // tags of the instance and its volumes
	Hibernation        bool              `json:"hibernation,omitempty"`
	RootVolume         *RootVolume       `json:"root_volume,omitempty"`
	Spot               bool              `json:"spot,omitempty"`
}

// RootVolume replaces the root volume of the image. Hibernation requires an
// encrypted volume with room for the instance's memory.
type RootVolume struct {
	Device    string `json:"device"` // such as "/dev/sda1", the image's root device
	SizeGiB   int32  `json:"size_gib"`
	Type      string `json:"type,omitempty"` // such as "gp3"
	Encrypted bool   `json:"encrypted,omitempty"`
}

// maxUserData is EC2's limit of the user data in bytes, before the base64
// encoding.
const maxUserData = 16 << 10

func (l Launch) validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	printable := !strings.ContainsFunc(l.ClientToken, func(r rune) bool { return r < '!' || r > '~' })
	check(l.ClientToken != "" && len(l.ClientToken) <= 64 && printable, "client_token: %q is not 1 to 64 printable ASCII bytes", l.ClientToken)
	check(l.ImageID != "", "image_id is empty")
	check(l.InstanceType != "", "instance_type is empty")
	check(len(l.UserData) <= maxUserData, "user_data: %d bytes are more than %d", len(l.UserData), maxUserData)
	check(len(l.Tags) <= 50, "tags: %d are more than 50", len(l.Tags))
	if v := l.RootVolume; v != nil {
		check(v.Device != "" && v.SizeGiB > 0, "root_volume: device %q of %d GiB", v.Device, v.SizeGiB)
	}
	return errors.Join(errs...)
}

// input returns the request. It is identical for identical launches: tags are
// sorted.
func (l Launch) input() *ec2.RunInstancesInput {
	in := &ec2.RunInstancesInput{
		MinCount: aws.Int32(1), MaxCount: aws.Int32(1),
		ClientToken: aws.String(l.ClientToken), ImageId: aws.String(l.ImageID),
		InstanceType:                      types.InstanceType(l.InstanceType),
		SecurityGroupIds:                  l.SecurityGroupIDs,
		InstanceInitiatedShutdownBehavior: types.ShutdownBehaviorStop,
		MetadataOptions: &types.InstanceMetadataOptionsRequest{
			HttpEndpoint: types.InstanceMetadataEndpointStateEnabled, HttpTokens: types.HttpTokensStateRequired,
			InstanceMetadataTags: types.InstanceMetadataTagsStateEnabled,
		},
	}
	if l.SubnetID != "" {
		in.SubnetId = aws.String(l.SubnetID)
	}
	if l.KeyName != "" {
		in.KeyName = aws.String(l.KeyName)
	}
	if p := l.IAMInstanceProfile; strings.HasPrefix(p, "arn:") {
		in.IamInstanceProfile = &types.IamInstanceProfileSpecification{Arn: aws.String(p)}
	} else if p != "" {
		in.IamInstanceProfile = &types.IamInstanceProfileSpecification{Name: aws.String(p)}
	}
	if l.UserData != "" {
		in.UserData = aws.String(base64.StdEncoding.EncodeToString([]byte(l.UserData)))
	}
	if tags := awsTags(l.Tags); len(tags) > 0 {
		in.TagSpecifications = []types.TagSpecification{
			{ResourceType: types.ResourceTypeInstance, Tags: tags},
			{ResourceType: types.ResourceTypeVolume, Tags: tags},
		}
	}
	if l.Hibernation {
		in.HibernationOptions = &types.HibernationOptionsRequest{Configured: aws.Bool(true)}
	}
	if v := l.RootVolume; v != nil {
		ebs := &types.EbsBlockDevice{VolumeSize: aws.Int32(v.SizeGiB), VolumeType: types.VolumeType(v.Type)}
		if v.Encrypted {
			ebs.Encrypted = aws.Bool(true)
		}
		in.BlockDeviceMappings = []types.BlockDeviceMapping{{DeviceName: aws.String(v.Device), Ebs: ebs}}
	}
	if l.Spot {
		in.InstanceMarketOptions = &types.InstanceMarketOptionsRequest{MarketType: types.MarketTypeSpot,
			SpotOptions: &types.SpotMarketOptions{
				SpotInstanceType: types.SpotInstanceTypePersistent, InstanceInterruptionBehavior: types.InstanceInterruptionBehaviorStop,
			}}
	}
	return in
}

func awsTags(tags map[string]string) []types.Tag {
	var out []types.Tag
	for _, key := range slices.Sorted(maps.Keys(tags)) {
		out = append(out, types.Tag{Key: aws.String(key), Value: aws.String(tags[key])})
	}
	return out
}

// Run launches one instance. If it is called again with the same launch, after an
// error or a crash, it returns the instance of the first call.
func (c *Client) Run(ctx context.Context, l Launch) (Instance, error) {
	const op = "RunInstances"
	if err := l.validate(); err != nil {
		return Instance{}, &Error{Op: op, Region: c.region, Kind: Invalid, Err: err}
	}
	out, err := c.api.RunInstances(ctx, l.input())
	if err != nil {
		return Instance{}, c.failed(op, err)
	}
	if len(out.Instances) != 1 || !ValidID(aws.ToString(out.Instances[0].InstanceId)) {
		return Instance{}, c.failed(op, fmt.Errorf("the answer holds %d instances, or one without an id", len(out.Instances)))
	}
	launched := instanceOf(out.Instances[0])
	launched.State = cmp.Or(launched.State, Pending)
	return launched, nil
}
