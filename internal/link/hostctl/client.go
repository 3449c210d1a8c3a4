package hostctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"lull/internal/base/delay"
	"lull/internal/base/httpx"
	"lull/internal/idle"
)

// Client speaks to one host daemon. It is safe for concurrent use. Errors:
// *httpx.Problem for an answer of no, *httpx.UnreachableError.
type Client struct{ api *httpx.Client }

// NewClient returns a client of address, "unix:///path" or a bare path.
func NewClient(address string) (*Client, error) {
	path := strings.TrimPrefix(address, "unix://")
	if path == "" || strings.Contains(path, "://") {
		return nil, fmt.Errorf("cannot use %q as a host: want unix:///path/of/the/socket", address)
	}
	return &Client{&httpx.Client{Peer: "lull host", Start: "lull host", Where: path, Base: "http://lull/api/v1", HTTP: httpx.Unix(path)}}, nil
}

func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	_, err := c.api.Do(ctx, httpx.Request{Method: method, Path: path, In: in}, out)
	return err
}

// follow opens an answer that goes on.
func (c *Client) follow(ctx context.Context, path string, q url.Values) (io.ReadCloser, error) {
	res, err := c.api.Open(ctx, httpx.Request{Method: "GET", Path: path + "?" + q.Encode()})
	if err != nil {
		return nil, err
	}
	return res.Body, nil
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

// Change changes what c names of an instance, from now on.
func (c *Client) Change(ctx context.Context, name string, in Change) (o Instance, err error) {
	return o, c.call(ctx, "PATCH", inst(name), in, &o)
}

// Snooze keeps it running until t; the zero time ends that.
func (c *Client) Snooze(ctx context.Context, name string, t time.Time) (o Instance, err error) {
	in := map[string]time.Time{}
	if !t.IsZero() {
		in["until"] = t
	}
	return o, c.call(ctx, "POST", inst(name)+"/snooze", in, &o)
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

// Halting switches all automatic actions off, or on again. Until is a time in
// any form that the host reads; empty is until it is ended.
type Halting struct {
	On     bool   `json:"on"`
	Reason string `json:"reason,omitempty"`
	Until  string `json:"until,omitempty"`
}

// Halt switches all automatic actions off, or on again.
func (c *Client) Halt(ctx context.Context, r Halting) (s Status, err error) {
	return s, c.call(ctx, "POST", "/halt", r, &s)
}

// Logs copies what an instance has printed to w.
func (c *Client) Logs(ctx context.Context, name string, l Logs, w io.Writer) error {
	q := url.Values{}
	if l.Tail >= 0 {
		q.Set("tail", strconv.Itoa(l.Tail))
	}
	if l.Follow {
		q.Set("follow", "true")
	}
	if l.Console {
		q.Set("console", "true")
	}
	logs, err := c.follow(ctx, inst(name)+"/logs", q)
	if err != nil {
		return err
	}
	defer logs.Close()
	if _, err = io.Copy(w, logs); err != nil && ctx.Err() == nil {
		return fmt.Errorf("cannot read the logs of %s: %w", name, err)
	}
	return nil
}

// Kept calls each for every event after since that the host keeps ("" for all,
// "now", or a number). missing is told why some before the next are not known.
func (c *Client) Kept(ctx context.Context, since string, missing func(why string), each func(Event) error) error {
	// A host of an earlier version goes on with what is to come: then a pause is
	// the end of what it keeps.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pause := time.AfterFunc(keptWithin, cancel)
	defer pause.Stop()
	stream, err := c.follow(ctx, "/events", url.Values{"since": {since}, "kept": {"true"}})
	if err != nil {
		return err
	}
	defer stream.Close()
	return readEvents(ctx, stream, missing, func(e Event) error {
		pause.Reset(keptWithin)
		return each(e)
	})
}

// Follow calls each for every event after since, as Kept has it, and for those
// that come, until ctx ends. A host that goes away is called again for a while;
// missing is told where another daemon answers, too: what happened between the
// two is not known. The error of each is returned as it is.
func (c *Client) Follow(ctx context.Context, since string, missing func(why string), each func(Event) error) error {
	var daemon time.Time // when the one began whose numbers since is of
	for try := 0; ; try++ {
		st, err := c.Status(ctx)
		if err == nil {
			if !daemon.IsZero() && !st.StartedAt.Equal(daemon) {
				since = ""
				missing("another daemon of the host has taken over")
			}
			daemon = st.StartedAt
			var own error
			var begun bool
			if begun, err = c.follows(ctx, since, missing, func(e Event) error {
				since, own = strconv.FormatUint(e.Seq, 10), each(e)
				return own
			}); own != nil {
				return own
			}
			if begun {
				try = 0
			}
		}
		p, refused := errors.AsType[*httpx.Problem](err)
		switch {
		case ctx.Err() != nil:
			return nil
		case refused && p.Status < 500, daemon.IsZero():
			return err
		case try >= 8:
			return fmt.Errorf("cannot follow the events any longer, the host has ended: %w", err)
		}
		if delay.For(ctx, min(5*time.Second, 50*time.Millisecond<<try)) != nil {
			return nil
		}
	}
}

// follows reads one connection. begun tells that it got as far as the stream.
func (c *Client) follows(ctx context.Context, since string, missing func(string), each func(Event) error) (begun bool, err error) {
	stream, err := c.follow(ctx, "/events", url.Values{"since": {since}})
	if err != nil {
		return false, err
	}
	defer stream.Close()
	if err := readEvents(ctx, stream, missing, each); err != nil {
		return true, err
	}
	return true, io.ErrUnexpectedEOF
}

func readEvents(ctx context.Context, stream io.Reader, missing func(why string), each func(Event) error) error {
	for ev, err := range httpx.ReadEvents(stream, maxEvent) {
		var e Event
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case ev.Name == "reset":
			var r Reset
			if err := json.Unmarshal(ev.Data, &r); err != nil {
				return fmt.Errorf("cannot read an event: %w", err)
			}
			missing(r.Reason)
			continue
		}
		if err := json.Unmarshal(ev.Data, &e); err != nil {
			return fmt.Errorf("cannot read an event: %w", err)
		}
		if err := each(e); err != nil {
			return err
		}
	}
	return nil
}

// keptWithin is the longest pause between two events that are kept.
const keptWithin = 5 * time.Second

// maxEvent bounds an event, in bytes.
const maxEvent = 1 << 20
