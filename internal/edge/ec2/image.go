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

// An Image is an AMI.
type Image struct {
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Description string    `json:"description,omitempty"`
	Created     time.Time `json:"created"`
	OwnerID     string    `json:"owner_id,omitempty"`
}

// ErrNoImage says that no available image has a name of the pattern.
var ErrNoImage = fmt.Errorf("no available image has such a name")

// NewestImage finds the image with the latest creation date among the available
// ones whose name matches pattern (* and ?) and that belong to one of owners; no
// owner means "self", because anybody may publish an image of any name. Without
// any the error is ErrNoImage.
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

// images lists the available images of a name, newest first.
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
				return nil, fmt.Errorf("image %s has creation date %q", aws.ToString(i.ImageId), aws.ToString(i.CreationDate))
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
