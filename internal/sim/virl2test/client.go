package virl2test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// Client is one user's session, as in the library. It is not safe for concurrent use.
type Client struct {
	// Do sends a request whose URL is https://Host/api/v0/...
	Do                       func(*http.Request) (*http.Response, error)
	Host, Username, Password string
	// Logins counts authentications.
	Logins int

	token string
	mu    sync.Mutex
	sent  map[string]int
}

// Sent returns how often each of Requests was sent and answered in the expected
// shape.
func (c *Client) Sent() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent
}

// Error is an error response.
type Error struct {
	Status      int
	Description string
}

func (e *Error) Error() string { return fmt.Sprintf("status %d: %s", e.Status, e.Description) }

// Status returns the HTTP status of an Error, and 0 for any other error.
func Status(err error) int {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Status
	}
	return 0
}

// Open does what the library does first: it checks the server's version without
// logging in, and then that a login works.
func (c *Client) Open(ctx context.Context) error {
	info, err := c.call(ctx, "system_information", true, nil, nil)
	if err != nil {
		return err
	}
	var major, minor int
	if _, err := fmt.Sscanf(info.(members)["version"].(string), "%d.%d", &major, &minor); err != nil || major != 2 {
		return fmt.Errorf("version %v", info.(members)["version"])
	}
	test := "authok"
	if minor >= 10 {
		test = "authentication"
	}
	_, err = c.Call(ctx, test, nil, nil)
	return err
}

// Upload sends an image file's name in the form that the library uses.
func (c *Client) Upload(ctx context.Context, name string) error {
	_, err := c.call(ctx, "upload image", false, nil, form(name))
	return err
}

type form string

// raw is a body that is sent unchanged, without a type.
type raw string

// Text returns a body that the library sends unchanged.
func Text(s string) any { return raw(s) }

// Call sends the request called name in Requests. at has the names in its path; other
// members of at become the query. The result is decoded JSON, other text as a string,
// or nil.
func (c *Client) Call(ctx context.Context, name string, at map[string]string, body any) (any, error) {
	return c.call(ctx, name, false, at, body)
}

func (c *Client) call(ctx context.Context, name string, open bool, at map[string]string, body any) (any, error) {
	r, ok := Requests[name]
	if !ok {
		return nil, fmt.Errorf("%s is no request of the library", name)
	}
	path, query := r.Path, url.Values{}
	for key, v := range at {
		if strings.Contains(path, "{"+key+"}") {
			path = strings.ReplaceAll(path, "{"+key+"}", url.PathEscape(v))
		} else {
			query.Set(key, v)
		}
	}
	if strings.Contains(path, "{") {
		return nil, fmt.Errorf("%s: the path %s is not complete", name, path)
	}
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	if err := r.fits(name, body); err != nil {
		return nil, err
	}
	status, answer, err := c.send(ctx, r.Method, path, open, body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	v, err := r.read(status, answer)
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", name, answer, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sent == nil {
		c.sent = map[string]int{}
	}
	c.sent[name]++
	return v, nil
}

// fits returns an error if a body does not fit the request's Fields.
func (r Request) fits(name string, body any) error {
	m, isObject := body.(map[string]any)
	switch {
	case r.Fields == "-" && body != nil:
	case (body == nil) != (r.Fields == ""):
		return fmt.Errorf("%s: a body and the fields %q", name, r.Fields)
	case body == nil:
	case !isObject:
		return fmt.Errorf("%s: the body is no object", name)
	}
	for key := range m {
		if r.Fields != "-" && !slices.Contains(strings.Fields(r.Fields), key) {
			return fmt.Errorf("%s: the library does not send %s", name, key)
		}
	}
	return nil
}

// send sends a request and, on 401, logs in and sends it once more.
func (c *Client) send(ctx context.Context, method, path string, open bool, body any) (int, []byte, error) {
	for again := false; ; again = true {
		if !open && c.token == "" {
			if err := c.login(ctx); err != nil {
				return 0, nil, err
			}
		}
		status, answer, err := c.once(ctx, method, path, open, body)
		if err != nil {
			return 0, nil, err
		}
		if status == http.StatusUnauthorized && !again && !open {
			c.token = ""
			continue
		}
		if status >= 400 {
			var e struct{ Description string }
			if json.Unmarshal(answer, &e) != nil || e.Description == "" {
				return 0, nil, fmt.Errorf("status %d without a description: %s", status, answer)
			}
			return 0, nil, &Error{status, e.Description}
		}
		return status, answer, nil
	}
}

func (c *Client) login(ctx context.Context) error {
	status, answer, err := c.once(ctx, "POST", "authenticate", true, map[string]any{"username": c.Username, "password": c.Password})
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return &Error{status, string(answer)}
	}
	c.Logins++
	return json.Unmarshal(answer, &c.token)
}

func (c *Client) once(ctx context.Context, method, path string, open bool, body any) (int, []byte, error) {
	var text []byte
	var kind string
	header := http.Header{}
	switch b := body.(type) {
	case nil:
	case raw:
		text = []byte(b)
	case form:
		kind = "multipart/form-data; boundary=xxxx"
		header.Set("X-Original-File-Name", string(b))
		text = fmt.Appendf(nil, "--xxxx\r\nContent-Disposition: form-data; name=\"field0\"; filename=%q\r\n\r\nbytes\r\n--xxxx--\r\n", string(b))
	default:
		var err error
		if text, err = json.Marshal(body); err != nil {
			return 0, nil, err
		}
		kind = "application/json"
	}
	req, err := http.NewRequestWithContext(ctx, method, "https://"+c.Host+"/api/v0/"+path, bytes.NewReader(text))
	if err != nil {
		return 0, nil, err
	}
	header.Set("Accept", "*/*")
	header.Set("X-Client-UUID", "3f0f7f0e-9a5f-4b7e-8b53-3d1f0c6f2a11")
	header.Set("X-CML-CLIENT", "PCL")
	if kind != "" {
		header.Set("Content-Type", kind)
	}
	if !open {
		header.Set("Authorization", "Bearer "+c.token)
	}
	req.Header = header
	resp, err := c.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

// read decodes a response and checks its shape.
func (r Request) read(status int, answer []byte) (any, error) {
	switch r.Answer {
	case none:
		return status, nil
	case yaml:
		return string(answer), nil
	}
	var v any
	if err := json.Unmarshal(answer, &v); err != nil {
		return nil, err
	}
	return v, check("", v, r.Answer)
}

// check returns an error that lists where v does not have the shape want. at is the
// position of v.
func check(at string, v, want any) error {
	switch w := want.(type) {
	case members:
		m, ok := v.(map[string]any)
		if !ok {
			return fmt.Errorf("%s is no object", at)
		}
		var errs []error
		for key, kind := range w {
			x, ok := m[key]
			if !ok {
				errs = append(errs, fmt.Errorf("%s.%s is missing", at, key))
				continue
			}
			errs = append(errs, check(at+"."+key, x, kind))
		}
		return errors.Join(errs...)
	case elements:
		l, ok := v.([]any)
		if !ok {
			return fmt.Errorf("%s is no list", at)
		}
		var errs []error
		for k, x := range l {
			errs = append(errs, check(fmt.Sprintf("%s[%d]", at, k), x, w[0]))
		}
		return errors.Join(errs...)
	}
	kind, optional := strings.CutSuffix(want.(string), "?")
	if v == nil && optional {
		return nil
	}
	got := "null"
	switch v.(type) {
	case string:
		got = text
	case float64:
		got = number
	case bool:
		got = truth
	case []any:
		got = list
	case map[string]any:
		got = object
	}
	if got != kind {
		return fmt.Errorf("%s is %s and not %s", at, got, kind)
	}
	return nil
}

// Wait polls a lab as the library does, until the lab has converged.
func (c *Client) Wait(ctx context.Context, lab string) error {
	for range 500 {
		done, err := c.Call(ctx, "lab converged", map[string]string{"lab_id": lab}, nil)
		if err != nil || done == true {
			return err
		}
		time.Sleep(5 * time.Second)
	}
	return fmt.Errorf("lab %s has not converged", lab)
}

// Lab is a lab created by CreateLab.
type Lab struct {
	ID           string
	Nodes, Links []string
	Interfaces   []string
}

// CreateLab creates a lab of two nodes and a link between them, with the requests
// that the library would send.
func (c *Client) CreateLab(ctx context.Context, title string) (*Lab, error) {
	v, err := c.Call(ctx, "create lab", nil, map[string]any{"title": title})
	if err != nil {
		return nil, err
	}
	l := &Lab{ID: v.(members)["id"].(string)}
	at := map[string]string{"lab_id": l.ID}
	for k, label := range []string{"r1", "r2"} {
		// The library first checks whether the label is already used.
		if _, err := c.Call(ctx, "topology", map[string]string{"lab_id": l.ID, "exclude_configurations": "true"}, nil); err != nil {
			return nil, err
		}
		if v, err = c.Call(ctx, "create node", map[string]string{"lab_id": l.ID, "exclude_configurations": "false"},
			map[string]any{"label": label, "node_definition": "alpine", "x": 100 * k, "y": 0}); err != nil {
			return nil, err
		}
		l.Nodes = append(l.Nodes, v.(members)["id"].(string))
		if err := c.Wait(ctx, l.ID); err != nil {
			return nil, err
		}
		if v, err = c.Call(ctx, "create interface", at, map[string]any{"node": l.Nodes[k]}); err != nil {
			return nil, err
		}
		l.Interfaces = append(l.Interfaces, v.(members)["id"].(string))
	}
	if v, err = c.Call(ctx, "create link", at, map[string]any{"src_int": l.Interfaces[0], "dst_int": l.Interfaces[1]}); err != nil {
		return nil, err
	}
	l.Links = append(l.Links, v.(members)["id"].(string))
	return l, c.Wait(ctx, l.ID)
}

// Set starts, stops or wipes a lab and waits until it has converged.
func (c *Client) Set(ctx context.Context, op, lab string) error {
	if _, err := c.Call(ctx, op+" lab", map[string]string{"lab_id": lab}, nil); err != nil {
		return err
	}
	return c.Wait(ctx, lab)
}
