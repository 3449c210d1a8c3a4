package agentctl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"lull/internal/idle"
)

// DefaultSocket is where an agent answers (spec, section 9).
const DefaultSocket = "/run/lull/agent.sock"

// Client speaks to an agent. It is an Agent itself.
type Client struct {
	http *http.Client
	name string // of the agent's address, for sentences
}

var _ Agent = (*Client)(nil)

// Dial returns a client of the agent whose unix socket is at path.
func Dial(path string) *Client {
	return NewClient(path, func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	})
}

// NewClient returns a client that reaches its agent through dial.
func NewClient(name string, dial func(context.Context) (net.Conn, error)) *Client {
	return &Client{name: name, http: &http.Client{Transport: &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		DisableKeepAlives: true,
	}}}
}

func (c *Client) do(ctx context.Context, method, path string, in, out any) error {
	var payload io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		payload = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, payload)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("cannot reach the agent at %s: %w", c.name, err)
	}
	defer resp.Body.Close()
	const most = 64 << 20 // a history of many readings
	b, err := io.ReadAll(io.LimitReader(resp.Body, most))
	if err != nil {
		return fmt.Errorf("cannot read the agent's answer: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		e := &Error{}
		if json.Unmarshal(b, e) != nil || e.Sentence == "" {
			return fmt.Errorf("cannot read the agent's answer: status %s", resp.Status)
		}
		return e
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("cannot read the agent's answer: %w", err)
	}
	return nil
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

// HoldLease implements Agent.
func (c *Client) HoldLease(ctx context.Context, r LeaseRequest) (v idle.Lease, err error) {
	return v, c.do(ctx, "POST", "/v1/leases", r, &v)
}

// ReleaseLease implements Agent.
func (c *Client) ReleaseLease(ctx context.Context, holder string) error {
	var v struct{}
	return c.do(ctx, "DELETE", "/v1/leases/"+url.PathEscape(holder), nil, &v)
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
