package ec2

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials/stscreds"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/smithy-go/logging"
)

const (
	maxAnswer      = 64 << 20         // bytes of one answer
	attemptTimeout = 30 * time.Second // limit of one attempt, unless the HTTP client has its own
)

// Access is the identity and the transport for calls to AWS.
type Access struct {
	// RoleARN is the role to assume in the account; empty means the identity of
	// the standard credential chain.
	RoleARN string
	// ExternalID and SessionName are passed when the role is assumed. SessionName
	// defaults to "lull".
	ExternalID, SessionName string
	// Credentials replace the standard chain unless nil.
	Credentials aws.CredentialsProvider
	// HTTP replaces the SDK's HTTP client, except for the calls by which the
	// standard chain obtains its credentials. If HTTP has no timeout, an attempt
	// ends after 30 s.
	HTTP *http.Client
	// STSEndpoint is the endpoint for assuming roles; empty means AWS's.
	STSEndpoint string
	// MetadataEndpoint is where the standard chain requests an instance's
	// credentials; empty means the metadata service's usual address.
	MetadataEndpoint string
}

// Load returns the SDK's configuration for a region, with an HTTP client that
// bounds the size of answers.
func (a Access) Load(ctx context.Context, region string) (aws.Config, error) {
	if region == "" {
		return aws.Config{}, errors.New("cannot load AWS configuration: no region is given")
	}
	// The SDK would log errors that it also returns.
	options := []func(*config.LoadOptions) error{config.WithRegion(region), config.WithLogger(logging.Nop{})}
	if a.Credentials != nil {
		options = append(options, config.WithCredentialsProvider(a.Credentials))
	}
	options = append(options, config.WithHTTPClient(awshttp.NewBuildableClient().WithTimeout(attemptTimeout)))
	if a.MetadataEndpoint != "" {
		options = append(options, config.WithEC2IMDSEndpoint(a.MetadataEndpoint))
	}
	cfg, err := config.LoadDefaultConfig(ctx, options...)
	if err != nil {
		return aws.Config{}, fmt.Errorf("cannot load AWS configuration for region %s: %w", region, err)
	}
	// The client is wrapped only here, because the SDK needs its own client type
	// to apply AWS_CA_BUNDLE.
	if a.HTTP != nil {
		client := *a.HTTP
		client.Timeout = cmp.Or(client.Timeout, attemptTimeout)
		cfg.HTTPClient = &client
	}
	cfg.HTTPClient = bounded{cfg.HTTPClient}
	if a.RoleARN == "" {
		return cfg, nil
	}
	assume := sts.NewFromConfig(cfg, func(o *sts.Options) {
		if a.STSEndpoint != "" {
			o.BaseEndpoint = aws.String(a.STSEndpoint)
		}
	})
	cfg.Credentials = aws.NewCredentialsCache(stscreds.NewAssumeRoleProvider(assume, a.RoleARN, func(o *stscreds.AssumeRoleOptions) {
		o.RoleSessionName = cmp.Or(a.SessionName, "lull")
		if a.ExternalID != "" {
			o.ExternalID = aws.String(a.ExternalID)
		}
	}))
	return cfg, nil
}

// bounded limits answers to maxAnswer.
//
// It also hides that the SDK's request bodies implement io.WriterTo. The SDK
// closes a body as soon as the headers of the answer arrive. If net/http checks
// for surplus bytes only then, the SDK's WriteTo returns io.EOF. net/http takes
// that for a failed request and closes the connection in the middle of the
// answer. Read does not have this problem.
type bounded struct{ client aws.HTTPClient }

func (b bounded) Do(r *http.Request) (*http.Response, error) {
	if r.Body != nil && r.Body != http.NoBody {
		r = r.WithContext(r.Context())
		r.Body = struct{ io.ReadCloser }{r.Body}
	}
	resp, err := b.client.Do(r)
	if err == nil {
		resp.Body = &boundedBody{resp.Body, maxAnswer}
	}
	return resp, err
}

type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("the answer is larger than %d bytes", maxAnswer)
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}
