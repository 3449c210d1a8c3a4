package httpx

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
)

// maxAnswer bounds an answer that is decoded as a whole, in bytes. Ten thousand
// instances take about a tenth of it.
const maxAnswer = 256 << 20

// Client speaks JSON to one API. Set the fields before the first use; then it
// is safe for concurrent use.
type Client struct {
	Peer  string // name of the peer in errors, such as "lull host"
	Start string // the command that starts the peer
	Where string // address, for display
	Base  string // precedes every path, such as http://127.0.0.1:7070
	Token string // bearer token; not sent if empty
	HTTP  *http.Client
	// Tries is how often a request is sent if its connection breaks; 0 means
	// once. Mutating requests then carry an Idempotency-Key, which the API must
	// support.
	Tries int

	limit int64 // maximum size of an answer; 0 means maxAnswer
}

// Unix returns an HTTP client that connects to the socket at path. It keeps no
// connection open: a new one costs little, and a restart of the daemon between
// two requests causes no error.
func Unix(path string) *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}}}
}

// Request is one request to an API.
type Request struct {
	Method string
	Path   string    // begins with a slash
	In     any       // sent as it is instead of In; the request is then not repeated
	Body   io.Reader // sent unchanged instead of In; such a request is not repeated
	Header http.Header
	Once   bool // send only once, and without an Idempotency-Key
}

// UnreachableError means that no server answers at an address.
type UnreachableError struct {
	Peer, Start, Where string
	Err                error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("cannot reach a %s at %s: %v; start one with: %s", e.Peer, e.Where, e.Err, e.Start)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

// Open sends a request and returns the response with its body, which the caller
// reads and closes. ctx covers the whole exchange, including the body. The error
// is a *Problem for an error response, or a *UnreachableError if no connection
// was made.
func (c *Client) Open(ctx context.Context, r Request) (*http.Response, error) {
	var body []byte
	if r.In != nil {
		var err error
		if body, err = json.Marshal(r.In); err != nil {
			return nil, fmt.Errorf("cannot encode the request: %w", err)
		}
	}
	key := ""
	if c.Tries > 1 && !r.Once && r.Method != http.MethodGet {
		key = rand.Text()
	}
	for try := 1; ; try++ {
		res, err := c.send(ctx, r, body, key)
		if err == nil && res.StatusCode < 300 {
			return res, nil
		}
		if err == nil {
			return nil, readProblem(res)
		}
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
			return nil, &UnreachableError{c.Peer, c.Start, c.Where, op.Err}
		}
		if r.Once || r.Body != nil || try >= c.Tries || ctx.Err() != nil {
			return nil, fmt.Errorf("cannot ask the %s at %s: %w", c.Peer, c.Where, err)
		}
	}
}

func (c *Client) send(ctx context.Context, r Request, body []byte, key string) (*http.Response, error) {
	content := io.Reader(bytes.NewReader(body))
	if r.Body != nil {
		content = r.Body
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, c.Base+r.Path, content)
	if err != nil {
		return nil, err
	}
	for name, values := range r.Header {
		req.Header[name] = values
	}
	if r.In != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.Token)
	}
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	return c.HTTP.Do(req)
}

// Do sends a request, decodes the response into out unless out is nil, and
// returns the status. Its errors are those of Open.
func (c *Client) Do(ctx context.Context, r Request, out any) (status int, err error) {
	res, err := c.Open(ctx, r)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	if out == nil || res.StatusCode == http.StatusNoContent {
		return res.StatusCode, nil
	}
	err = json.NewDecoder(http.MaxBytesReader(nil, res.Body, cmp.Or(c.limit, maxAnswer))).Decode(out)
	if res.StatusCode == http.StatusAccepted && errors.Is(err, io.EOF) {
		return res.StatusCode, nil // an unfinished request has no result
	}
	if err != nil {
		return res.StatusCode, fmt.Errorf("cannot read the answer of the %s at %s: %w", c.Peer, c.Where, err)
	}
	return res.StatusCode, nil
}
