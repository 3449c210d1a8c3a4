package httpx

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
)

// DefaultMaxAnswer bounds an answer that is read as a whole, in bytes.
const DefaultMaxAnswer = 16 << 20

// Client speaks JSON to one API. Header and HTTP may be changed before its
// first use; it is safe for concurrent use then.
type Client struct {
	Target    string      // as given to NewClient, for errors
	Header    http.Header // sent with every request, such as Authorization
	HTTP      *http.Client
	MaxAnswer int64 // 0 is DefaultMaxAnswer

	base string
}

// NewClient makes a client for unix:///path or an http or https URL, which may
// have a path that goes before every other. It does not connect.
func NewClient(target string) (*Client, error) {
	u, err := url.Parse(target)
	if err != nil {
		return nil, fmt.Errorf("cannot use the address %q: %w", target, err)
	}
	fault := func(what string) (*Client, error) {
		return nil, fmt.Errorf("cannot use the address %q: %s", target, what)
	}
	c := &Client{Target: target, Header: http.Header{}}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	switch u.Scheme {
	case "unix":
		if u.Host != "" || u.RawQuery != "" || u.Fragment != "" || !filepath.IsAbs(u.Path) {
			return fault("a unix socket is given as unix:///path")
		}
		path := u.Path
		transport.Proxy = nil
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}
		c.base = "http://lull"
	case "http", "https":
		if u.Host == "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
			return fault("it must be scheme, host and at most a path")
		}
		c.base = u.Scheme + "://" + u.Host + strings.TrimSuffix(u.EscapedPath(), "/")
	default:
		return fault("it must begin with unix://, http:// or https://")
	}
	c.HTTP = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse // a token must not follow to another host
	}}
	return c, nil
}

// UnreachableError says that no answer came. Whether anything was done is not
// known where the connection broke after the request was sent.
type UnreachableError struct {
	Target string
	Err    error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("cannot reach %s: %v", e.Target, e.Err)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

// Do sends in as JSON (nil is no body) and decodes the answer into out (nil
// drops it). An answer of 400 and above is a *Problem, no answer is an
// *UnreachableError.
func (c *Client) Do(ctx context.Context, method, path string, in, out any) error {
	body, err := c.Open(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer body.Close()
	data, err := c.whole(body)
	if err != nil {
		return fmt.Errorf("cannot read the answer of %s to %s %s: %w", c.Target, method, path, err)
	}
	if out == nil || len(data) == 0 {
		return nil
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("cannot read the answer of %s to %s %s: %w", c.Target, method, path, err)
	}
	return nil
}

// Open is Do for an answer that goes on: the caller reads and closes it. ctx
// holds for the whole stream.
func (c *Client) Open(ctx context.Context, method, path string, in any) (io.ReadCloser, error) {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("cannot encode the request %s %s: %w", method, path, err)
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return nil, fmt.Errorf("cannot make the request %s %s: %w", method, path, err)
	}
	for name, values := range c.Header {
		req.Header[name] = values
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		if e, ok := errors.AsType[*url.Error](err); ok {
			err = e.Err // the URL of a unix socket tells nobody anything
		}
		return nil, &UnreachableError{c.Target, err}
	}
	if resp.StatusCode < 300 {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	return nil, c.problem(resp)
}

// whole reads an answer within its limit.
func (c *Client) whole(r io.Reader) ([]byte, error) {
	limit := or(c.MaxAnswer, DefaultMaxAnswer)
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("the answer has more than %d bytes", limit)
	}
	return data, err
}

// problem makes the error of an answer that is none of success.
func (c *Client) problem(resp *http.Response) error {
	p := &Problem{}
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	data, err := c.whole(resp.Body)
	if err != nil || kind != "application/problem+json" || json.Unmarshal(data, p) != nil {
		p = &Problem{Detail: fmt.Sprintf("%s answered %s", c.Target, resp.Status)}
	}
	p.Status = resp.StatusCode
	p.RequestID = or2(p.RequestID, resp.Header.Get(RequestIDHeader))
	return p
}
