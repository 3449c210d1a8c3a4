package agentctl

import (
	"context"
	"net/url"
	"strconv"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/httpx"
)

// DefaultSocket is the default path of an agent's socket.
const DefaultSocket = "/run/lull/agent.sock"

// Client is a client of an agent. It implements Agent.
type Client struct{ api *httpx.Client }

var _ Agent = (*Client)(nil)

// Dial returns a client of the agent whose unix socket is at path.
func Dial(path string) *Client {
	return &Client{&httpx.Client{Peer: "lull agent", Start: "lull agent run", Where: path, Base: "http://agent", HTTP: httpx.Unix(path)}}
}

func (c *Client) do(ctx context.Context, method, path string, in, out any) error {
	_, err := c.api.Do(ctx, httpx.Request{Method: method, Path: path, In: in}, out)
	return err
}

// Status implements Agent.
func (c *Client) Status(ctx context.Context) (v Status, err error) {
	return v, c.do(ctx, "GET", "/v1/status", nil, &v)
}

// Why implements Agent.
func (c *Client) Why(ctx context.Context, at time.Time) (v Why, err error) {
	q := url.Values{}
	addTime(q, "at", at)
	return v, c.do(ctx, "GET", "/v1/why?"+q.Encode(), nil, &v)
}

// Reload implements Agent.
func (c *Client) Reload(ctx context.Context) (v Reload, err error) {
	return v, c.do(ctx, "POST", "/v1/reload", nil, &v)
}

// Snooze implements Agent.
func (c *Client) Snooze(ctx context.Context, r SnoozeRequest) (v Status, err error) {
	return v, c.do(ctx, "POST", "/v1/snooze", r, &v)
}

// Complete implements Agent.
func (c *Client) Complete(ctx context.Context, r CompleteRequest) (v Status, err error) {
	return v, c.do(ctx, "POST", "/v1/complete", r, &v)
}

// ExtendTTL implements Agent.
func (c *Client) ExtendTTL(ctx context.Context, r ExtendRequest) (v Status, err error) {
	return v, c.do(ctx, "POST", "/v1/ttl/extend", r, &v)
}

// HoldLease implements Agent.
func (c *Client) HoldLease(ctx context.Context, r LeaseRequest) (v idle.Lease, err error) {
	return v, c.do(ctx, "POST", "/v1/leases", r, &v)
}

// ReleaseLease implements Agent.
func (c *Client) ReleaseLease(ctx context.Context, holder string) error {
	return c.do(ctx, "DELETE", "/v1/leases/"+url.PathEscape(holder), nil, nil)
}

// Leases implements Agent.
func (c *Client) Leases(ctx context.Context) (v []idle.Lease, err error) {
	return v, c.do(ctx, "GET", "/v1/leases", nil, &v)
}

// History implements Agent.
func (c *Client) History(ctx context.Context, h HistoryQuery) (v []Entry, err error) {
	q := url.Values{}
	addTime(q, "since", h.Since)
	addTime(q, "until", h.Until)
	if h.Limit > 0 {
		q.Set("limit", strconv.Itoa(h.Limit))
	}
	return v, c.do(ctx, "GET", "/v1/history?"+q.Encode(), nil, &v)
}

// Halt implements Agent.
func (c *Client) Halt(ctx context.Context, r HaltRequest) (v Status, err error) {
	return v, c.do(ctx, "POST", "/v1/halt", r, &v)
}

func addTime(q url.Values, name string, t time.Time) {
	if !t.IsZero() {
		q.Set(name, t.Format(time.RFC3339Nano))
	}
}
