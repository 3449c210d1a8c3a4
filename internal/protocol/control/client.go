package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/lib/httpx"
)

// Client is a client of one server. It is safe for concurrent use. Its methods
// return a *httpx.Problem for an error response, and a *httpx.UnreachableError if
// there is none.
type Client struct{ api *httpx.Client }

// maxTries is how often a request is sent if connections break. Mutating requests
// carry an idempotency key, which makes that safe.
const maxTries = 3

// NewClient returns a client of the server at address, an http or https URL. hc
// may be nil.
func NewClient(address, token string, hc *http.Client) (*Client, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("cannot use %q as a server: want http://host:port or https://host:port", address)
	}
	if hc == nil {
		hc = &http.Client{}
	}
	return &Client{&httpx.Client{Peer: "lull server", Start: "lull server", Where: u.String(), Base: strings.TrimSuffix(u.String(), "/"),
		Token: token, HTTP: hc, Tries: maxTries}}, nil
}

// open sends a GET request and returns the response, which the caller reads and
// closes.
func (c *Client) open(ctx context.Context, path string, header http.Header) (io.ReadCloser, error) {
	res, err := c.api.Open(ctx, httpx.Request{Method: http.MethodGet, Path: path, Header: header})
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

// Call sends a request to path, which begins with a slash, and decodes the
// response into out unless out is nil. unfinished reports that the status was
// 202: the request is durable but not yet carried out.
func (c *Client) Call(ctx context.Context, method, path string, in, out any) (unfinished bool, err error) {
	status, err := c.api.Do(ctx, httpx.Request{Method: method, Path: path, In: in}, out)
	return status == http.StatusAccepted, err
}

const api = "/api/v1"

// WorkerPath returns the API path of a worker, or of a resource below it.
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

// Workers returns the workers that q selects; see the route's query parameters.
func (c *Client) Workers(ctx context.Context, q url.Values) ([]worker.Worker, error) {
	return All[worker.Worker](ctx, c, api+"/workers", q)
}

// Worker returns a worker by id or, if unique, by name.
func (c *Client) Worker(ctx context.Context, ref string) (worker.Worker, error) {
	w, err := get[worker.Worker](ctx, c, WorkerPath(ref))
	p, missing := errors.AsType[*httpx.Problem](err)
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
		return w, httpx.NewProblem(http.StatusConflict, "ambiguous", fmt.Sprintf("worker name %q is ambiguous: %d workers have it; give an id", ref, len(l)))
	}
	return w, err
}

// Known returns a worker like Worker. If there is none with that name, it returns
// the last terminated one.
func (c *Client) Known(ctx context.Context, ref string) (worker.Worker, error) {
	w, err := c.Worker(ctx, ref)
	p, missing := errors.AsType[*httpx.Problem](err)
	if !missing || p.Status != http.StatusNotFound {
		return w, err
	}
	l, listed := c.Workers(ctx, url.Values{"name": {ref}, "terminated": {"true"}})
	if listed != nil || len(l) == 0 {
		return w, err
	}
	return slices.MaxFunc(l, func(a, b worker.Worker) int { return a.StatusSince.Compare(b.StatusSince) }), nil
}

// Do executes an operation on a worker and returns its new record.
func (c *Client) Do(ctx context.Context, id, verb string, in any) (w worker.Worker, unfinished bool, err error) {
	method := "POST"
	if verb == "license" && in == nil {
		method = "DELETE"
	}
	unfinished, err = c.Call(ctx, method, WorkerPath(id, verb), in, &w)
	return w, unfinished, err
}

// Why explains why a worker is running or stopped at the given time. A zero at
// means now.
func (c *Client) Why(ctx context.Context, id string, at time.Time) (Why, error) {
	path := WorkerPath(id, "why")
	if !at.IsZero() {
		path += "?" + url.Values{"at": {at.UTC().Format(time.RFC3339Nano)}}.Encode()
	}
	return get[Why](ctx, c, path)
}

// DetectIdle makes the server check a worker now. It waits for the result until
// ctx ends.
func (c *Client) DetectIdle(ctx context.Context, id string) (r fleet.Request, err error) {
	_, err = c.Call(ctx, "POST", WorkerPath(id, "detect-idle"), nil, &r)
	for err == nil && r.AnsweredAt == nil {
		if err = delay.For(ctx, time.Second); err == nil {
			r, err = get[fleet.Request](ctx, c, api+"/requests/"+url.PathEscape(r.ID))
		}
	}
	return r, err
}

// Read gets an object below /api/v1.
func Read[T any](ctx context.Context, c *Client, path string) (T, error) {
	return get[T](ctx, c, api+path)
}

// Write modifies an object below /api/v1.
func Write[T any](ctx context.Context, c *Client, method, path string, in any) (out T, err error) {
	_, err = c.Call(ctx, method, api+path, in, &out)
	return out, err
}

// Export copies the audit log to w as jsonl or csv.
func (c *Client) Export(ctx context.Context, q audit.Query, format string, w io.Writer) error {
	v := AuditValues(q)
	v.Set("format", format)
	log, err := c.open(ctx, api+"/audit/export?"+v.Encode(), nil)
	if err != nil {
		return err
	}
	defer log.Close()
	if _, err := io.Copy(w, log); err != nil {
		return fmt.Errorf("cannot read the audit log to its end: %w", err)
	}
	return nil
}

// AuditValues returns q as URL query parameters, without cursor and limit.
func AuditValues(q audit.Query) url.Values {
	v := url.Values{}
	for name, text := range map[string]string{"worker_id": q.WorkerID, "action": q.Action, "by": q.By, "kind": q.Kind} {
		if text != "" {
			v.Set(name, text)
		}
	}
	for name, t := range map[string]time.Time{"from": q.From, "to": q.To} {
		if !t.IsZero() {
			v.Set(name, t.Format(time.RFC3339Nano))
		}
	}
	return v
}

// Simulate requests a simulation of policies. tell is called with the completed
// share, from 0 to 1. If tell returns an error, the request is canceled.
func (c *Client) Simulate(ctx context.Context, in Simulate, tell func(share float64) error) (Simulation, error) {
	// With an idempotency key, the server would withhold the response until the
	// end.
	res, err := c.api.Open(ctx, httpx.Request{Method: http.MethodPost, Path: api + "/simulate/progress", In: in, Once: true})
	if err != nil {
		return Simulation{}, err
	}
	defer res.Body.Close()
	for steps := json.NewDecoder(res.Body); ; {
		var s SimulateStep
		switch err := steps.Decode(&s); {
		case err != nil:
			return Simulation{}, fmt.Errorf("cannot follow the simulation to its end: %w", err)
		case s.Fault != "":
			return Simulation{}, errors.New(s.Fault)
		case s.Simulation != nil:
			return *s.Simulation, nil
		}
		if err := tell(s.Share); err != nil {
			return Simulation{}, err
		}
	}
}

// Backup returns a backup of the whole state, as the server sends it. The caller
// closes it.
func (c *Client) Backup(ctx context.Context) (io.ReadCloser, error) {
	return c.open(ctx, "/admin/backup", nil)
}

// maxProfile limits a profile, in bytes.
const maxProfile = 64 << 20

// Profile returns a pprof profile of the server. kind is cpu (measured for the
// given number of seconds), heap or goroutine.
func (c *Client) Profile(ctx context.Context, kind string, seconds int) ([]byte, error) {
	profile, err := c.open(ctx, fmt.Sprintf("/admin/profile?kind=%s&seconds=%d", kind, seconds), nil)
	if err != nil {
		return nil, err
	}
	defer profile.Close()
	return io.ReadAll(io.LimitReader(profile, maxProfile))
}

// lastID returns the request header that resumes a stream after id.
func lastID(id int64) http.Header {
	h := http.Header{"Accept": {"text/event-stream"}}
	if id > 0 {
		h.Set("Last-Event-ID", strconv.FormatInt(id, 10))
	}
	return h
}
