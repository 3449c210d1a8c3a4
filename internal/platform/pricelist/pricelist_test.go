package pricelist

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/core/savings"
)

// client returns a client of a server that answers with documents, and the filter
// fields of the last request.
func client(t *testing.T, status int, documents ...string) (*Client, map[string]string) {
	t.Helper()
	asked := map[string]string{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			ServiceCode string
			Filters     []struct{ Type, Field, Value string }
		}
		body, err := io.ReadAll(r.Body)
		if err == nil {
			err = json.Unmarshal(body, &in)
		}
		if err != nil || r.Header.Get("X-Amz-Target") != "AWSPriceListService.GetProducts" || in.ServiceCode != "AmazonEC2" {
			t.Errorf("asked for %q %s: %v", r.Header.Get("X-Amz-Target"), body, err)
		}
		clear(asked)
		for _, f := range in.Filters {
			asked[f.Field] = f.Value
		}
		w.Header().Set("Content-Type", "application/x-amz-json-1.1")
		w.WriteHeader(status)
		if status != http.StatusOK {
			_, _ = io.WriteString(w, `{"__type":"AccessDeniedException","message":"not authorized to perform: pricing:GetProducts"}`)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"FormatVersion": "aws_v1", "PriceList": documents})
	}))
	t.Cleanup(srv.Close)
	return New(aws.Config{Region: Region, BaseEndpoint: aws.String(srv.URL), Credentials: credentials.NewStaticCredentialsProvider("a", "b", ""),
		RetryMaxAttempts: 1}), asked
}

// priced returns a document as AWS writes it. It includes reserved terms, which
// must not count.
func priced(unit string, usd ...string) string {
	dims := ""
	for i, u := range usd {
		if i > 0 {
			dims += ","
		}
		dims += `"X.` + string(rune('A'+i)) + `":{"unit":"` + unit + `","endRange":"Inf","description":"$0.1 per On Demand Linux m5.large Instance Hour","appliesTo":[],"pricePerUnit":{"USD":"` + u + `"}}`
	}
	return `{"product":{"productFamily":"Compute Instance","attributes":{"instanceType":"m5.large","regionCode":"eu-west-1"},"sku":"X"},"serviceCode":"AmazonEC2",` +
		`"terms":{"OnDemand":{"X.T":{"priceDimensions":{` + dims + `},"sku":"X","effectiveDate":"2026-11-01T00:00:00Z"}},"Reserved":{"X.R":{"priceDimensions":{"X.R.1":{"unit":"Hrs","pricePerUnit":{"USD":"0.0010000000"}}}}}},"version":"20261101"}`
}

func TestRead(t *testing.T) {
	instance, storage := savings.Key{savings.Instance, "eu-west-1", "m5.large"}, savings.Key{savings.Storage, "eu-west-1", "gp3"}
	now := time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		key    savings.Key
		status int
		docs   []string
		want   float64
		fails  bool
	}{
		"an instance":                {key: instance, docs: []string{priced("Hrs", "0.1070000000")}, want: 0.107},
		"storage":                    {key: storage, docs: []string{priced("GB-Mo", "0.0880000000")}, want: 0.088},
		"nothing is listed":          {key: instance},
		"another unit":               {key: storage, docs: []string{priced("Hrs", "0.1")}},
		"two different prices":       {key: instance, docs: []string{priced("Hrs", "0.1"), priced("Hrs", "0.2")}},
		"two equal prices":           {key: instance, docs: []string{priced("Hrs", "0.1"), priced("Hrs", "0.10")}, want: 0.1},
		"a free offer beside it":     {key: instance, docs: []string{priced("Hrs", "0.0000000000", "0.3")}, want: 0.3},
		"only free":                  {key: instance, docs: []string{priced("Hrs", "0.0000000000")}},
		"no number":                  {key: instance, docs: []string{priced("Hrs", "NaN")}, fails: true},
		"negative":                   {key: instance, docs: []string{priced("Hrs", "-1")}, fails: true},
		"too high to be true":        {key: instance, docs: []string{priced("Hrs", "1e9")}, fails: true},
		"a document that is no JSON": {key: instance, docs: []string{"<html>"}, fails: true},
		"not allowed":                {key: instance, status: http.StatusBadRequest, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			if c.status == 0 {
				c.status = http.StatusOK
			}
			cl, asked := client(t, c.status, c.docs...)
			got, err := cl.Read(t.Context(), []savings.Key{c.key}, now)
			if (err != nil) != c.fails {
				t.Fatalf("error %v, want one: %t", err, c.fails)
			}
			p, ok := got[c.key]
			if ok != (c.want > 0) || p.USD != c.want || ok && !p.AsOf.Equal(now) {
				t.Errorf("%+v, want %g", got, c.want)
			}
			if asked["regionCode"] != "eu-west-1" || asked["instanceType"]+asked["volumeApiName"] != c.key.Name() {
				t.Errorf("asked for %v", asked)
			}
		})
	}
	cl, _ := client(t, http.StatusOK, priced("Hrs", "0.1"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := cl.Read(ctx, []savings.Key{instance}, now); err == nil || len(got) != 0 {
		t.Errorf("called off: %v, %v", got, err)
	}
}
