// Package pricelist reads on-demand prices from the AWS Price List API.
//
// It reads one price for each key: of instances with Linux on shared tenancy, and
// of a GB-month of storage. A price that AWS does not list, or lists with several
// values, is missing from the result and never estimated.
package pricelist

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/pricing"
	"github.com/aws/aws-sdk-go-v2/service/pricing/types"
	"golang.org/x/time/rate"

	"lull/internal/core/savings"
)

// Region is a region that serves the API. Its API has the prices of all regions.
const Region = "us-east-1"

// maxProducts bounds the products of one answer. A specific request has only one.
const maxProducts = 20

// Client reads the Price List API. It is safe for concurrent use.
type Client struct {
	limit *rate.Limiter
	// A function value instead of the SDK's client, so that the linker drops the
	// calls that are not used; see ec2.api.
	api struct {
		GetProducts func(context.Context, *pricing.GetProductsInput, ...func(*pricing.Options)) (*pricing.GetProductsOutput, error)
	}
}

// New returns a client. cfg should be for Region. New makes no connection.
func New(cfg aws.Config) *Client {
	c := &Client{limit: rate.NewLimiter(5, 5)}
	c.api.GetProducts = pricing.NewFromConfig(cfg).GetProducts
	return c
}

// Read returns the prices that AWS lists for keys, dated now. It stops at the
// first error and returns the prices read until then with it.
func (c *Client) Read(ctx context.Context, keys []savings.Key, now time.Time) (savings.Prices, error) {
	out := savings.Prices{}
	for _, k := range keys {
		usd, err := c.price(ctx, k)
		if err != nil {
			return out, fmt.Errorf("cannot read the price of %s %s in %s: %w", k.Kind(), k.Name(), k.Region(), err)
		}
		if usd > 0 {
			out[k] = savings.Price{USD: usd, AsOf: now}
		}
	}
	return out, nil
}

// price returns the price of k, 0 if AWS lists none or more than one.
func (c *Client) price(ctx context.Context, k savings.Key) (float64, error) {
	unit, fields := "Hrs", [][2]string{{"instanceType", k.Name()}, {"operatingSystem", "Linux"}, {"preInstalledSw", "NA"},
		{"tenancy", "Shared"}, {"capacitystatus", "Used"}, {"marketoption", "OnDemand"}}
	if k.Kind() == savings.Storage {
		unit, fields = "GB-Mo", [][2]string{{"productFamily", "Storage"}, {"volumeApiName", k.Name()}}
	}
	in := &pricing.GetProductsInput{ServiceCode: aws.String("AmazonEC2"), FormatVersion: aws.String("aws_v1"), MaxResults: aws.Int32(maxProducts),
		Filters: []types.Filter{term("regionCode", k.Region())}}
	for _, f := range fields {
		in.Filters = append(in.Filters, term(f[0], f[1]))
	}
	if err := c.limit.Wait(ctx); err != nil {
		return 0, err
	}
	out, err := c.api.GetProducts(ctx, in)
	if err != nil {
		return 0, err
	}
	if aws.ToString(out.NextToken) != "" {
		return 0, nil // several products
	}
	return onDemand(out.PriceList, unit)
}

func term(field, value string) types.Filter {
	return types.Filter{Type: types.FilterTypeTermMatch, Field: aws.String(field), Value: aws.String(value)}
}

// product contains the part of a product's document that is needed.
type product struct {
	Terms struct {
		OnDemand map[string]struct {
			PriceDimensions map[string]struct {
				Unit         string            `json:"unit"`
				PricePerUnit map[string]string `json:"pricePerUnit"`
			} `json:"priceDimensions"`
		}
	} `json:"terms"`
}

// onDemand returns the only on-demand price in documents, in USD per unit, or 0
// if there is none or there are several.
func onDemand(documents []string, unit string) (float64, error) {
	found := 0.0
	for _, text := range documents {
		var p product
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			return 0, fmt.Errorf("cannot read the answer: %w", err)
		}
		for _, t := range p.Terms.OnDemand {
			for _, d := range t.PriceDimensions {
				if d.Unit != unit || d.PricePerUnit["USD"] == "" {
					continue
				}
				usd, err := strconv.ParseFloat(d.PricePerUnit["USD"], 64)
				switch {
				case err != nil || !(usd >= 0 && usd < savings.MaxUSD):
					return 0, errors.New("the answer has an invalid price: " + strconv.Quote(d.PricePerUnit["USD"]))
				case usd == 0 || usd == found: // a price of zero belongs to another offer
				case found != 0:
					return 0, nil
				default:
					found = usd
				}
			}
		}
	}
	return found, nil
}
