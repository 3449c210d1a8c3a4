package ec2

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
)

// Volume is EC2's description of a volume.
type Volume struct {
	Type string // such as gp3
	GiB  int
}

// Volumes returns volumes by id, 200 per call. Volumes that EC2 does not know are
// missing from the result: the ids are sent as a filter, which EC2 accepts even
// if it does not know them.
func (c *Client) Volumes(ctx context.Context, ids []string) (map[string]Volume, error) {
	const op = "DescribeVolumes"
	found := make(map[string]Volume, len(ids))
	err := batches(ids, func(part []string) error {
		in := &ec2.DescribeVolumesInput{MaxResults: aws.Int32(500)}
		in.Filters = append(in.Filters, filter("volume-id", part...))
		return pages(func(token *string) (*string, error) {
			in.NextToken = token
			out, err := c.api.DescribeVolumes(ctx, in)
			if err != nil {
				return nil, err
			}
			for _, v := range out.Volumes {
				if v.Size != nil {
					found[aws.ToString(v.VolumeId)] = Volume{Type: string(v.VolumeType), GiB: int(*v.Size)}
				}
			}
			return out.NextToken, nil
		})
	})
	if err != nil {
		return nil, c.failed(op, err)
	}
	return found, nil
}
