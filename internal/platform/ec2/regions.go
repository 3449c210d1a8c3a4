package ec2

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
)

// Regions returns the names of the regions that the account may use.
func (c *Client) Regions(ctx context.Context) ([]string, error) {
	out, err := c.api.DescribeRegions(ctx, &ec2.DescribeRegionsInput{})
	if err != nil {
		return nil, c.failed("DescribeRegions", err)
	}
	names := make([]string, 0, len(out.Regions))
	for _, r := range out.Regions {
		names = append(names, aws.ToString(r.RegionName))
	}
	return names, nil
}
