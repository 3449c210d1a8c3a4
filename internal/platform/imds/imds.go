// Package imds reads an EC2 instance's identity and tags from version 2 of the
// metadata service.
//
// Every call is bounded in time. A failure is an *Error with a Kind, because the
// caller must distinguish the causes. NotAllowed means that the instance does not
// expose its tags, so they must be read elsewhere. Unreachable may mean a machine
// outside EC2, or a hop limit too low for a container. No failure means that
// there are no tags.
//
// The package does not read credentials; the SDK's own chain does.
package imds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/ratelimit"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"
)

// Kind classifies an Error.
type Kind string

// The kinds of failure.
const (
	Unreachable Kind = "unreachable" // no answer in time: no EC2, a hop limit too low, or a blocked route
	NotAllowed  Kind = "not_allowed" // 404 on tags: instance-metadata-tags is not enabled
	Disabled    Kind = "disabled"    // 403: the service is disabled for the instance
	BadToken    Kind = "bad_token"   // 401, even after a fresh token
	Unavailable Kind = "unavailable" // 5xx or throttled
	Malformed   Kind = "malformed"   // an answer that cannot be read
)

// Error is a failed request.
type Error struct {
	What   string // what was requested
	Kind   Kind
	Status int // HTTP status; 0 without an answer
	Err    error
}

func (e *Error) Error() string {
	s := fmt.Sprintf("cannot read %s from the instance metadata: %s", e.What, e.Kind)
	switch e.Kind {
	case Unreachable:
		s += " (not on EC2, or the hop limit is too low for this network)"
	case NotAllowed:
		s += " (enable tags in instance metadata, or allow ec2:DescribeTags)"
	}
	if e.Status != 0 {
		s += fmt.Sprintf(" (status %d)", e.Status)
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// KindOf returns the kind of the *Error in err's tree, or "".
func KindOf(err error) Kind {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	return ""
}

// Options configure how the service is reached. The zero value reaches the
// service of the instance itself.
type Options struct {
	Endpoint string        // empty means the SDK's default
	HTTP     *http.Client  // nil means a plain one; its dialer decides how the service is reached
	Timeout  time.Duration // limit of one request; 0 means 2 s
	Attempts int           // 0 means 2
}

// Client is a client of the metadata service. It is safe for concurrent use.
type Client struct{ api *imds.Client }

// New returns a client. It makes no request.
func New(o Options) *Client {
	base := o.HTTP
	if base == nil {
		base = &http.Client{Transport: &http.Transport{MaxIdleConns: 1, IdleConnTimeout: 10 * time.Second}}
	}
	if o.Timeout <= 0 {
		o.Timeout = 2 * time.Second
	}
	if o.Attempts <= 0 {
		o.Attempts = 2
	}
	return &Client{api: imds.New(imds.Options{
		Endpoint:              o.Endpoint,
		EndpointMode:          imds.EndpointModeStateIPv4,
		HTTPClient:            timed{base, o.Timeout},
		EnableFallback:        aws.FalseTernary, // version 1 needs no token and is never used
		DisableDefaultTimeout: true,
		Retryer: retry.NewStandard(func(r *retry.StandardOptions) {
			r.MaxAttempts = o.Attempts
			r.MaxBackoff = 500 * time.Millisecond
			r.RateLimiter = ratelimit.None
		}),
	})}
}

// timed is a transport that bounds each request, including its body, in time.
type timed struct {
	next  *http.Client
	limit time.Duration
}

func (t timed) Do(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithTimeout(r.Context(), t.limit)
	resp, err := t.next.Do(r.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	if s, ok := r.Context().Value(statusKey{}).(*atomic.Int32); ok {
		s.Store(int32(resp.StatusCode))
	}
	resp.Body = &body{Reader: io.LimitReader(resp.Body, answerMax), Closer: resp.Body, cancel: cancel}
	return resp, nil
}

// statusKey is the context key of an *atomic.Int32 for the status of the last
// answer. The SDK's error about a rejected token does not contain the status.
type statusKey struct{}

func withStatus(ctx context.Context) (context.Context, *atomic.Int32) {
	s := new(atomic.Int32)
	return context.WithValue(ctx, statusKey{}, s), s
}

// answerMax bounds one answer in bytes. An identity document takes 1 KiB, 50 tag
// names 6 KiB.
const answerMax = 64 << 10

type body struct {
	io.Reader
	io.Closer
	cancel context.CancelFunc
}

func (b *body) Close() error { b.cancel(); return b.Closer.Close() }

// Identity identifies an instance.
type Identity struct {
	InstanceID, Region, Zone, Account, Type, ImageID, Architecture string
}

// Identity reads the identity of the instance.
func (c *Client) Identity(ctx context.Context) (Identity, error) {
	const what = "the instance's identity"
	ctx, status := withStatus(ctx)
	out, err := c.api.GetInstanceIdentityDocument(ctx, &imds.GetInstanceIdentityDocumentInput{})
	if err != nil {
		return Identity{}, failed(what, false, status, err)
	}
	i := Identity{InstanceID: out.InstanceID, Region: out.Region, Zone: out.AvailabilityZone, Account: out.AccountID,
		Type: out.InstanceType, ImageID: out.ImageID, Architecture: out.Architecture}
	if !strings.HasPrefix(i.InstanceID, "i-") || i.Region == "" || len(i.InstanceID) > 32 || len(i.Region) > 32 {
		return Identity{}, &Error{What: what, Kind: Malformed, Err: fmt.Errorf("instance %.40q in region %.40q", i.InstanceID, i.Region)}
	}
	return i, nil
}

// tagsMost is the maximum number of tags that are read. EC2 allows 50.
const tagsMost = 64

// Tags returns the instance's tags, an empty map if it has none. If the instance
// does not expose its tags, the error is of kind NotAllowed.
func (c *Client) Tags(ctx context.Context) (map[string]string, error) {
	const path = "tags/instance"
	list, err := c.get(ctx, path, "the list of tags", true)
	if err != nil {
		return nil, err
	}
	names := strings.FieldsFunc(list, func(r rune) bool { return r == '\n' || r == '\r' })
	if len(names) > tagsMost {
		return nil, &Error{What: "the list of tags", Kind: Malformed, Err: fmt.Errorf("%d names", len(names))}
	}
	tags := make(map[string]string, len(names))
	for _, n := range names {
		v, err := c.get(ctx, path+"/"+n, "tag "+n, false)
		if e, ok := errors.AsType[*Error](err); ok && e.Status == http.StatusNotFound {
			continue // deleted since the names were read
		}
		if err != nil {
			return nil, err
		}
		tags[n] = v
	}
	return tags, nil
}

func (c *Client) get(ctx context.Context, path, what string, tags bool) (string, error) {
	ctx, status := withStatus(ctx)
	out, err := c.api.GetMetadata(ctx, &imds.GetMetadataInput{Path: path})
	if err != nil {
		return "", failed(what, tags, status, err)
	}
	defer out.Content.Close()
	b, err := io.ReadAll(out.Content)
	if err != nil {
		return "", failed(what, tags, status, err)
	}
	if len(b) >= answerMax {
		return "", &Error{What: what, Kind: Malformed, Err: errors.New("the answer is larger than 64 KiB")}
	}
	return string(b), nil
}

// failed returns err as an *Error. tags means that a 404 is to be of kind
// NotAllowed, because the instance does not expose its tags.
func failed(what string, tags bool, status *atomic.Int32, err error) error {
	e := &Error{What: what, Kind: Unreachable, Err: err}
	switch e.Status = int(status.Load()); e.Status {
	case 0:
		return e
	case http.StatusOK:
		// The end of the answer did not arrive, or its content was not valid.
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
			e.Kind = Malformed
		}
		return e
	}
	switch {
	case e.Status == http.StatusNotFound && tags:
		e.Kind = NotAllowed
	case e.Status == http.StatusForbidden:
		e.Kind = Disabled
	case e.Status == http.StatusUnauthorized:
		e.Kind = BadToken
	case e.Status >= 500 || e.Status == http.StatusTooManyRequests:
		e.Kind = Unavailable
	default:
		e.Kind = Malformed
	}
	return e
}
