package hostctl

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"lull/internal/idle"
)

// Client speaks to one host daemon. It is safe for concurrent use.
type Client struct {
	where string
	http  *http.Client
}

// NewClient returns a client of address, "unix:///path" or a bare path.
func NewClient(address string) (*Client, error) {
	path := strings.TrimPrefix(address, "unix://")
	if path == "" || strings.Contains(path, "://") {
		return nil, fmt.Errorf("cannot use %q as a host: want unix:///path/of/the/socket", address)
	}
	var d net.Dialer
	return &Client{where: path, http: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "unix", path) },
	}}}, nil
}

// Problem is an answer that is no success (RFC 9457).
type Problem struct {
	Status int    `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Errors []struct {
		Message  string `json:"message"`
		Location string `json:"location"`
	} `json:"errors"`
}

func (p *Problem) Error() string {
	s := p.Detail
	if s == "" {
		s = p.Title
	}
	for _, e := range p.Errors {
		s += "\n  " + e.Message
		if p.Status == http.StatusUnprocessableEntity && e.Location != "" {
			s += " (" + e.Location + ")"
		}
	}
	return s
}

// UnreachableError says that no daemon answers.
type UnreachableError struct {
	Where string
	Err   error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("cannot reach a lull host at %s: %v; start one with: lull host", e.Where, e.Err)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

// maxAnswer bounds an answer that is decoded whole.
const maxAnswer = 256 << 20

func (c *Client) send(ctx context.Context, method, path string, in any) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("cannot encode the request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://lull/api/v1"+path, body)
	if err != nil {
		return nil, fmt.Errorf("cannot make the request: %w", err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := c.http.Do(req)
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return nil, &UnreachableError{Where: c.where, Err: op.Err}
	}
	if err != nil {
		return nil, fmt.Errorf("cannot ask the host: %w", err)
	}
	if res.StatusCode >= 400 {
		defer res.Body.Close()
		b, _ := io.ReadAll(io.LimitReader(res.Body, 1<<20))
		p := &Problem{Status: res.StatusCode}
		if json.Unmarshal(b, p) != nil || p.Detail == "" && p.Title == "" {
			p.Detail = strings.TrimSpace(string(b))
		}
		return nil, p
	}
	return res, nil
}

func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	res, err := c.send(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(res.Body, maxAnswer)).Decode(out); err != nil {
		return fmt.Errorf("cannot read the host's answer: %w", err)
	}
	return nil
}

func inst(name string) string { return "/instances/" + url.PathEscape(name) }

// Status returns the daemon's own state.
func (c *Client) Status(ctx context.Context) (s Status, err error) {
	return s, c.call(ctx, "GET", "/status", nil, &s)
}

// List returns every instance.
func (c *Client) List(ctx context.Context) (l []Instance, err error) {
	return l, c.call(ctx, "GET", "/instances", nil, &l)
}

// ListWithMemory returns every instance with what it holds.
func (c *Client) ListWithMemory(ctx context.Context) (l []Instance, err error) {
	return l, c.call(ctx, "GET", "/instances?memory=true", nil, &l)
}

// Get returns one instance.
func (c *Client) Get(ctx context.Context, name string) (o Instance, err error) {
	return o, c.call(ctx, "GET", inst(name), nil, &o)
}

// Create makes an instance.
func (c *Client) Create(ctx context.Context, r Create) (o Instance, err error) {
	return o, c.call(ctx, "POST", "/instances", r, &o)
}

// Clone makes an instance out of what another one saved to disk.
func (c *Client) Clone(ctx context.Context, from string, r Clone) (o Instance, err error) {
	return o, c.call(ctx, "POST", inst(from)+"/clone", r, &o)
}

// Images lists what is kept of images.
func (c *Client) Images(ctx context.Context) (l []Image, err error) {
	return l, c.call(ctx, "GET", "/images", nil, &l)
}

// Prune removes images that nobody uses and that are older; 0 is any.
func (c *Client) Prune(ctx context.Context, older time.Duration) (l []Image, err error) {
	return l, c.call(ctx, "POST", "/images/prune", map[string]float64{"older_seconds": older.Seconds()}, &l)
}

// Do carries out a verb: start, stop, pause or resume, with its query.
func (c *Client) Do(ctx context.Context, name, verb string, query url.Values) (o Instance, err error) {
	path := inst(name) + "/" + verb
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return o, c.call(ctx, "POST", path, nil, &o)
}

// Remove stops an instance and forgets it.
func (c *Client) Remove(ctx context.Context, name string) error {
	return c.call(ctx, "DELETE", inst(name), nil, nil)
}

// Why asks why it runs or does not, now or at a past time; zero is now.
func (c *Client) Why(ctx context.Context, name string, at time.Time) (y Why, err error) {
	path := inst(name) + "/why"
	if !at.IsZero() {
		path += "?" + url.Values{"at": {at.UTC().Format(time.RFC3339Nano)}}.Encode()
	}
	return y, c.call(ctx, "GET", path, nil, &y)
}

// Snooze keeps it running until t.
func (c *Client) Snooze(ctx context.Context, name string, t time.Time) (o Instance, err error) {
	return o, c.call(ctx, "POST", inst(name)+"/snooze", map[string]time.Time{"until": t}, &o)
}

// Hold takes or renews a lease.
func (c *Client) Hold(ctx context.Context, name string, r LeaseRequest) (l []idle.Lease, err error) {
	return l, c.call(ctx, "POST", inst(name)+"/leases", r, &l)
}

// Release drops a holder's lease.
func (c *Client) Release(ctx context.Context, name, holder string) (l []idle.Lease, err error) {
	return l, c.call(ctx, "DELETE", inst(name)+"/leases/"+url.PathEscape(holder), nil, &l)
}

// Exec runs a command beside an instance.
func (c *Client) Exec(ctx context.Context, name string, r ExecRequest) (x ExecResult, err error) {
	return x, c.call(ctx, "POST", inst(name)+"/exec", r, &x)
}

// Halt switches all automatic actions off, or on again.
func (c *Client) Halt(ctx context.Context, on bool) (s Status, err error) {
	return s, c.call(ctx, "POST", "/halt", map[string]bool{"on": on}, &s)
}

// Logs copies an instance's output to w; tail is a number of lines, -1 for all.
func (c *Client) Logs(ctx context.Context, name string, tail int, follow bool, w io.Writer) error {
	q := url.Values{}
	if tail >= 0 {
		q.Set("tail", strconv.Itoa(tail))
	}
	if follow {
		q.Set("follow", "true")
	}
	res, err := c.send(ctx, "GET", inst(name)+"/logs?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if _, err = io.Copy(w, res.Body); err != nil && ctx.Err() == nil {
		return fmt.Errorf("cannot read the logs of %s: %w", name, err)
	}
	return nil
}

// Events calls each for every event after since ("" for all that are kept,
// "now", or a number) until ctx ends or the host goes away.
func (c *Client) Events(ctx context.Context, since string, each func(Event) error) error {
	res, err := c.send(ctx, "GET", "/events?since="+url.QueryEscape(since), nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	s := bufio.NewScanner(res.Body)
	s.Buffer(nil, 1<<20)
	kind := ""
	for s.Scan() {
		field, value, _ := strings.Cut(s.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "event":
			kind = value
		case "":
			kind = ""
		case "data":
			if kind == "reset" {
				continue
			}
			var e Event
			if err := json.Unmarshal([]byte(value), &e); err != nil {
				return fmt.Errorf("cannot read an event: %w", err)
			}
			if err := each(e); err != nil {
				return err
			}
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("cannot follow the events: %w", err)
	}
	return errors.New("cannot follow the events any longer: the host has ended")
}
