package ec2

import (
	"context"
	"encoding/json"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
)

// CreateTags sets tags on resources, at most 200 per call, and does not affect
// other tags. Calls that set the same tags on one resource each are joined.
func (c *Client) CreateTags(ctx context.Context, ids []string, tags map[string]string) error {
	if len(ids) == 0 || len(tags) == 0 {
		return nil
	}
	if len(ids) == 1 {
		kind, err := json.Marshal(tags) // with sorted keys
		if err == nil {
			_, err = c.tagging.do(ctx, string(kind), ids[0])
		}
		if err != nil && KindOf(err) == "" {
			err = c.failed("CreateTags", err, ids...)
		}
		return err
	}
	return batches(ids, func(part []string) error {
		if _, err := c.api.CreateTags(ctx, &ec2.CreateTagsInput{Resources: part, Tags: awsTags(tags)}); err != nil {
			return c.failed("CreateTags", err, part...)
		}
		return nil
	})
}

// DeleteTags removes tags by key, whatever their values.
func (c *Client) DeleteTags(ctx context.Context, ids []string, keys []string) error {
	if len(ids) == 0 || len(keys) == 0 {
		return nil
	}
	var tags []types.Tag
	for _, k := range keys {
		tags = append(tags, types.Tag{Key: aws.String(k)})
	}
	return batches(ids, func(part []string) error {
		if _, err := c.api.DeleteTags(ctx, &ec2.DeleteTagsInput{Resources: part, Tags: tags}); err != nil {
			return c.failed("DeleteTags", err, part...)
		}
		return nil
	})
}

// Tags returns the tags of resources, by id. A resource without tags looks like
// one that does not exist: neither is in the result.
func (c *Client) Tags(ctx context.Context, ids []string) (map[string]map[string]string, error) {
	found := map[string]map[string]string{}
	err := batches(ids, func(part []string) error {
		return pages(func(token *string) (*string, error) {
			out, err := c.api.DescribeTags(ctx, &ec2.DescribeTagsInput{
				Filters: []types.Filter{filter("resource-id", part...)}, MaxResults: aws.Int32(pageSize), NextToken: token,
			})
			if err != nil {
				return nil, err
			}
			for _, t := range out.Tags {
				id := aws.ToString(t.ResourceId)
				if found[id] == nil {
					found[id] = map[string]string{}
				}
				found[id][aws.ToString(t.Key)] = aws.ToString(t.Value)
			}
			return out.NextToken, nil
		})
	})
	if err != nil {
		return nil, c.failed("DescribeTags", err, ids...)
	}
	return found, nil
}
