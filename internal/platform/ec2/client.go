package ec2

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/smithy-go/middleware"
	"golang.org/x/time/rate"
)

// Limits are the rates at which one account is called in one region. EC2 allows a
// burst of 100 reads, refilled at 20/s, and of 5 launches, refilled at 2/s. The
// defaults are lower, because other programs use the account too.
type Limits struct {
	ReadRate   float64 // Describe calls per second; 0 means 10
	ReadBurst  int     // 0 means 50
	WriteRate  float64 // other calls per second; 0 means 2
	WriteBurst int     // 0 means 5
	// Attempts bounds the attempts per call; 0 means 4.
	Attempts int
	// MaxBackoff bounds the pause between two attempts; 0 means 10 s.
	MaxBackoff time.Duration
}

func (l Limits) withDefaults() Limits {
	l.ReadRate, l.ReadBurst = cmp.Or(l.ReadRate, 10), cmp.Or(l.ReadBurst, 50)
	l.WriteRate, l.WriteBurst = cmp.Or(l.WriteRate, 2), cmp.Or(l.WriteBurst, 5)
	l.Attempts, l.MaxBackoff = cmp.Or(l.Attempts, 4), cmp.Or(l.MaxBackoff, 10*time.Second)
	return l
}

// Client calls EC2 for one account in one region. It is safe for concurrent
// use; all callers share its rate limit.
type Client struct {
	region string
	api    api
	reads  *rate.Limiter
	writes *rate.Limiter

	reading     joiner[Instance]
	addresses   joiner[elasticIP]
	stopping    joiner[Change] // by kind: hibernating or plain
	terminating joiner[Change]
	tagging     joiner[struct{}] // by kind: the tags
	attributes  chan struct{}    // held while an attribute is read
	noStatus    atomic.Bool      // the cloud has no DescribeInstanceStatus

	mu    sync.Mutex
	types map[string]bool // whether each instance type in it has instance-store volumes
}

// New returns a client for the SDK's configuration of a region. endpoint
// replaces AWS's endpoint unless empty.
func New(cfg aws.Config, endpoint string, limits Limits) *Client {
	limits = limits.withDefaults()
	c := &Client{
		region: cfg.Region,
		reads:  rate.NewLimiter(rate.Limit(limits.ReadRate), limits.ReadBurst),
		writes: rate.NewLimiter(rate.Limit(limits.WriteRate), limits.WriteBurst),
		types:  map[string]bool{},

		attributes: make(chan struct{}, 4),
	}
	c.join()
	c.api = newAPI(cfg, func(o *ec2.Options) {
		if endpoint != "" {
			o.BaseEndpoint = aws.String(endpoint)
		}
		o.Retryer = retry.NewStandard(func(s *retry.StandardOptions) {
			s.MaxAttempts = limits.Attempts
			s.MaxBackoff = limits.MaxBackoff
		})
		o.APIOptions = append(o.APIOptions, c.limit)
	})
	return c
}

// Region returns the region that the client calls.
func (c *Client) Region() string { return c.region }

// limit adds a middleware that makes every attempt of a call wait for a token. It
// is placed after the SDK's retries, so that each retry waits too.
func (c *Client) limit(stack *middleware.Stack) error {
	wait := middleware.FinalizeMiddlewareFunc("RateLimit", func(
		ctx context.Context, in middleware.FinalizeInput, next middleware.FinalizeHandler,
	) (middleware.FinalizeOutput, middleware.Metadata, error) {
		if hasPaid(ctx) {
			return next.HandleFinalize(ctx, in)
		}
		bucket := c.writes
		if strings.HasPrefix(awsmiddleware.GetOperationName(ctx), "Describe") {
			bucket = c.reads
		}
		if err := bucket.Wait(ctx); err != nil {
			return middleware.FinalizeOutput{}, middleware.Metadata{}, &limitError{err}
		}
		return next.HandleFinalize(ctx, in)
	})
	return stack.Finalize.Insert(wait, "Retry", middleware.After)
}

// limitError means that our own rate limit would not have let a call start before
// its deadline.
type limitError struct{ err error }

func (e *limitError) Error() string { return "held back by the rate limit: " + e.err.Error() }
func (e *limitError) Unwrap() error { return e.err }

// Set holds a client for each account and region in use.
type Set struct {
	// Accounts contains the access to each account; the empty name is the default.
	Accounts map[string]Access
	// Endpoint replaces AWS's endpoint unless empty.
	Endpoint string
	Limits   Limits

	mu      sync.Mutex
	clients map[[2]string]*Client
}

// Client returns the client of an account and region. It is created at first
// use.
func (s *Set) Client(ctx context.Context, account, region string) (*Client, error) {
	if c := s.known(account, region); c != nil {
		return c, nil
	}
	access, ok := s.Accounts[account]
	if !ok && account != "" {
		return nil, fmt.Errorf("cannot call EC2: account %q is not configured", account)
	}
	cfg, err := access.Load(ctx, region)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := [2]string{account, region}
	if c := s.clients[key]; c != nil {
		return c, nil
	}
	if s.clients == nil {
		s.clients = map[[2]string]*Client{}
	}
	s.clients[key] = New(cfg, s.Endpoint, s.Limits)
	return s.clients[key], nil
}

func (s *Set) known(account, region string) *Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.clients[[2]string{account, region}]
}

// batch is the maximum number of ids or filter values in one request.
const batch = 200

// maxPages bounds the pages of one paginated answer.
const maxPages = 2000

// pages calls page for the first page, and then with each returned token until
// none is returned.
func pages(page func(token *string) (next *string, err error)) error {
	var token *string
	for range maxPages {
		next, err := page(token)
		if err != nil {
			return err
		}
		if aws.ToString(next) == "" {
			return nil
		}
		if token != nil && *token == *next {
			return fmt.Errorf("the answer's pages repeat the token %q", *next)
		}
		token = next
	}
	return fmt.Errorf("the answer has more than %d pages", maxPages)
}

// batches calls each with at most batch values at a time.
func batches(values []string, each func([]string) error) error {
	for part := range slices.Chunk(values, batch) {
		if err := each(part); err != nil {
			return err
		}
	}
	return nil
}
