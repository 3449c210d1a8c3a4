package control

import (
	"bytes"
	"context"
	"crypto/rand"
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

	"lull/internal/fleet"
)

// Client speaks to one server. It is safe for concurrent use.
type Client struct {
	base  *url.URL
	token string
	http  *http.Client
}

// NewClient makes a client of the server at address, an http or https URL.
// hc may be nil.
func NewClient(address, token string, hc *http.Client) (*Client, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("cannot use %q as a server: want http://host:port or https://host:port", address)
	}
	if hc == nil {
		hc = &http.Client{}
	}
	return &Client{base: u, token: token, http: hc}, nil
}

// Problem is an answer that is no success (RFC 9457).
type Problem struct {
	Type   string `json:"type"`
	Status int    `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Errors []struct {
		Message  string `json:"message"`
		Location string `json:"location"`
	} `json:"errors"`
}

// Code is the last part of the type: what a program can go by.
func (p *Problem) Code() string { return strings.TrimPrefix(p.Type, "urn:lull:problem:") }

func (p *Problem) Error() string {
	s := p.Detail
	if s == "" {
		s = p.Title
	}
	for _, e := range p.Errors {
		if !strings.Contains(s, e.Message) {
			s += "\n  " + e.Message
			if e.Location != "" {
				s += " (" + e.Location + ")"
			}
		}
	}
	return s
}

// UnreachableError says that no server answers.
type UnreachableError struct {
	Where string
	Err   error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("cannot reach a lull server at %s: %v; start one with: lull server", e.Where, e.Err)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

// maxAnswer bounds an answer that is decoded whole.
const maxAnswer = 64 << 20

// maxTries is how often a call is sent when the connection breaks: a mutating
// one carries a key that makes that harmless.
const maxTries = 3

func (c *Client) send(ctx context.Context, method, path string, in any, header http.Header) (*http.Response, error) {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return nil, fmt.Errorf("cannot encode the request: %w", err)
		}
	}
	key := rand.Text()
	for try := 1; ; try++ {
		req, err := http.NewRequestWithContext(ctx, method, c.base.String()+path, bytes.NewReader(body))
		if err != nil {
			return nil, fmt.Errorf("cannot make the request: %w", err)
		}
		for k, v := range header {
			req.Header[k] = v
		}
		if in != nil {
			req.Header.Set("Content-Type", "application/json")
		}
		if c.token != "" && req.Header.Get("Authorization") == "" {
			req.Header.Set("Authorization", "Bearer "+c.token)
		}
		if method != http.MethodGet {
			req.Header.Set("Idempotency-Key", key)
		}
		res, err := c.http.Do(req)
		if err == nil && res.StatusCode < 400 {
			return res, nil
		}
		if err == nil {
			return nil, readProblem(res)
		}
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return nil, &UnreachableError{Where: c.base.String(), Err: op.Err}
		}
		if try == maxTries || ctx.Err() != nil {
			return nil, fmt.Errorf("cannot ask the server: %w", err)
		}
	}
}

func readProblem(res *http.Response) error {
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	p := &Problem{Status: res.StatusCode, Title: res.Status}
	if err != nil || json.Unmarshal(b, p) != nil || p.Detail == "" {
		p.Detail = strings.TrimSpace(res.Status + " " + string(b[:min(len(b), 200)]))
	}
	return p
}

// Call asks for path, which begins with a slash, and decodes the answer into
// out unless that is nil. It tells whether the server answered 202: durable,
// and not finished. Errors: *Problem, *UnreachableError.
func (c *Client) Call(ctx context.Context, method, path string, in, out any) (unfinished bool, err error) {
	res, err := c.send(ctx, method, path, in, nil)
	if err != nil {
		return false, err
	}
	defer res.Body.Close()
	unfinished = res.StatusCode == http.StatusAccepted
	if out == nil || res.StatusCode == http.StatusNoContent {
		return unfinished, nil
	}
	if err := json.NewDecoder(io.LimitReader(res.Body, maxAnswer)).Decode(out); err != nil && !(unfinished && errors.Is(err, io.EOF)) {
		return unfinished, fmt.Errorf("cannot read the server's answer: %w", err)
	}
	return unfinished, nil
}

const api = "/api/v1"

// WorkerPath is the path of a worker, or of what is below it.
func WorkerPath(id string, below ...string) string {
	p := api + "/workers/" + url.PathEscape(id)
	for _, b := range below {
		p += "/" + b
	}
	return p
}

func get[T any](ctx context.Context, c *Client, path string) (out T, err error) {
	_, err = c.Call(ctx, "GET", path, nil, &out)
	return out, err
}

// All reads every page of a listing.
func All[T any](ctx context.Context, c *Client, path string, q url.Values) ([]T, error) {
	out := []T{}
	if q == nil {
		q = url.Values{}
	}
	q.Set("limit", "1000")
	for {
		page, err := get[List[T]](ctx, c, path+"?"+q.Encode())
		if err != nil {
			return nil, err
		}
		out = append(out, page.Items...)
		if page.Next == "" {
			return out, nil
		}
		q.Set("after", page.Next)
	}
}

// Workers lists the workers that q selects (see the query parameters of the
// route).
func (c *Client) Workers(ctx context.Context, q url.Values) ([]fleet.Worker, error) {
	return All[fleet.Worker](ctx, c, api+"/workers", q)
}

// Worker finds a worker by its id or, if no other has it, its name.
func (c *Client) Worker(ctx context.Context, ref string) (fleet.Worker, error) {
	w, err := get[fleet.Worker](ctx, c, WorkerPath(ref))
	p, missing := errors.AsType[*Problem](err)
	if !missing || p.Status != http.StatusNotFound {
		return w, err
	}
	l, listed := c.Workers(ctx, url.Values{"name": {ref}})
	switch {
	case listed != nil:
		return w, listed
	case len(l) == 1:
		return l[0], nil
	case len(l) > 1:
		return w, &Problem{Status: http.StatusConflict, Detail: fmt.Sprintf("cannot tell which worker %q is: %d have that name; give an id", ref, len(l))}
	}
	return w, err
}

// Do sends a verb to a worker and returns the worker after it.
func (c *Client) Do(ctx context.Context, id, verb string, in any) (w fleet.Worker, unfinished bool, err error) {
	method := "POST"
	if verb == "license" && in == nil {
		method = "DELETE"
	}
	unfinished, err = c.Call(ctx, method, WorkerPath(id, verb), in, &w)
	return w, unfinished, err
}

// Why answers why a worker runs or not, now or at a past time; zero is now.
func (c *Client) Why(ctx context.Context, id string, at time.Time) (Why, error) {
	path := WorkerPath(id, "why")
	if !at.IsZero() {
		path += "?" + url.Values{"at": {at.UTC().Format(time.RFC3339Nano)}}.Encode()
	}
	return get[Why](ctx, c, path)
}

// DetectIdle checks a worker now, and waits for the answer until ctx ends.
func (c *Client) DetectIdle(ctx context.Context, id string) (r fleet.Request, err error) {
	_, err = c.Call(ctx, "POST", WorkerPath(id, "detect-idle"), nil, &r)
	for err == nil && r.AnsweredAt == nil {
		if err = Pause(ctx, time.Second); err == nil {
			r, err = get[fleet.Request](ctx, c, api+"/requests/"+url.PathEscape(r.ID))
		}
	}
	return r, err
}

// Pause waits, or returns the context's error.
func Pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Read asks for one object below /api/v1.
func Read[T any](ctx context.Context, c *Client, path string) (T, error) {
	return get[T](ctx, c, api+path)
}

// Write changes something below /api/v1.
func Write[T any](ctx context.Context, c *Client, method, path string, in any) (out T, err error) {
	_, err = c.Call(ctx, method, api+path, in, &out)
	return out, err
}

// Export copies the audit log as JSON lines to w.
func (c *Client) Export(ctx context.Context, q url.Values, w io.Writer) error {
	res, err := c.send(ctx, "GET", api+"/audit/export?"+q.Encode(), nil, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if _, err := io.Copy(w, res.Body); err != nil {
		return fmt.Errorf("cannot read the audit log to its end: %w", err)
	}
	return nil
}

// Backup is the whole state as the server sends it; the reader closes it.
func (c *Client) Backup(ctx context.Context) (io.ReadCloser, error) {
	res, err := c.send(ctx, "GET", "/admin/backup", nil, nil)
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

// Profile is a profile of the server in pprof's form: kind is cpu, over some
// seconds, or heap.
func (c *Client) Profile(ctx context.Context, kind string, seconds int) ([]byte, error) {
	res, err := c.send(ctx, "GET", fmt.Sprintf("/admin/profile?kind=%s&seconds=%d", kind, seconds), nil, nil)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	return io.ReadAll(io.LimitReader(res.Body, maxAnswer))
}

// lastID makes a header of where a stream goes on.
func lastID(id int64) http.Header {
	h := http.Header{"Accept": {"text/event-stream"}}
	if id > 0 {
		h.Set("Last-Event-ID", strconv.FormatInt(id, 10))
	}
	return h
}
