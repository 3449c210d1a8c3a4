package hostctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/delay"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/hostctl/execstream"
)

// Client is a client of one host daemon. It is safe for concurrent use. Its
// methods return a *httpx.Problem for an error response, and a
// *httpx.UnreachableError if there is none.
type Client struct{ api *httpx.Client }

// NewClient returns a client of the daemon at address, which is "unix:///path" or
// a path.
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

// follow requests a streaming response and returns its body.
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

// ListWithMemory returns every instance with its memory use.
func (c *Client) ListWithMemory(ctx context.Context) (l []Instance, err error) {
	return l, c.call(ctx, "GET", "/instances?memory=true", nil, &l)
}

// Get returns one instance.
func (c *Client) Get(ctx context.Context, name string) (o Instance, err error) {
	return o, c.call(ctx, "GET", inst(name), nil, &o)
}

// Create creates an instance.
func (c *Client) Create(ctx context.Context, r Create) (o Instance, err error) {
	return o, c.call(ctx, "POST", "/instances", r, &o)
}

// Clone creates an instance from the snapshot of a hibernated one.
func (c *Client) Clone(ctx context.Context, from string, r Clone) (o Instance, err error) {
	return o, c.call(ctx, "POST", inst(from)+"/clone", r, &o)
}

// Adopt makes an instance of a running program or container.
func (c *Client) Adopt(ctx context.Context, r Adopt) (o Instance, err error) {
	return o, c.call(ctx, "POST", "/adopted", r, &o)
}

// DropIn returns the drop-in that an adoption of a unit would write.
func (c *Client) DropIn(ctx context.Context, r Adopt) (d DropIn, err error) {
	return d, c.call(ctx, "POST", "/adopted/drop-in", r, &d)
}

// Adopted returns the instances that lull did not start.
func (c *Client) Adopted(ctx context.Context) (l []Instance, err error) {
	return l, c.call(ctx, "GET", "/adopted", nil, &l)
}

// ReleaseAdopted removes an adopted instance and lets its program continue
// without lull.
func (c *Client) ReleaseAdopted(ctx context.Context, name string) error {
	return c.call(ctx, "DELETE", "/adopted/"+url.PathEscape(name), nil, nil)
}

// Images returns the cached images.
func (c *Client) Images(ctx context.Context) (l []Image, err error) {
	return l, c.call(ctx, "GET", "/images", nil, &l)
}

// Prune removes unused images older than the given age; 0 means any age.
func (c *Client) Prune(ctx context.Context, older time.Duration) (l []Image, err error) {
	return l, c.call(ctx, "POST", "/images/prune", map[string]float64{"older_seconds": older.Seconds()}, &l)
}

// Do executes start, stop, pause or resume, with the given query parameters.
func (c *Client) Do(ctx context.Context, name, verb string, query url.Values) (o Instance, err error) {
	path := inst(name) + "/" + verb
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return o, c.call(ctx, "POST", path, nil, &o)
}

// Remove stops and deletes an instance.
func (c *Client) Remove(ctx context.Context, name string) error {
	return c.call(ctx, "DELETE", inst(name), nil, nil)
}

// Why explains an instance's state at the given time. A zero at means now.
func (c *Client) Why(ctx context.Context, name string, at time.Time) (y Why, err error) {
	path := inst(name) + "/why"
	if !at.IsZero() {
		path += "?" + url.Values{"at": {at.UTC().Format(time.RFC3339Nano)}}.Encode()
	}
	return y, c.call(ctx, "GET", path, nil, &y)
}

// Change changes the settings of an instance that in contains.
func (c *Client) Change(ctx context.Context, name string, in Change) (o Instance, err error) {
	return o, c.call(ctx, "PATCH", inst(name), in, &o)
}

// Link is a link that signs a browser in to the host's dashboard. It works once.
type Link struct {
	URL       string    `json:"url"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Open returns a sign-in link for the host's dashboard.
func (c *Client) Open(ctx context.Context) (l Link, err error) {
	return l, c.call(ctx, "POST", "/dashboard/links", nil, &l)
}

// Snooze protects an instance from pauses until t. The zero time ends the snooze.
func (c *Client) Snooze(ctx context.Context, name string, t time.Time) (o Instance, err error) {
	in := map[string]time.Time{}
	if !t.IsZero() {
		in["until"] = t
	}
	return o, c.call(ctx, "POST", inst(name)+"/snooze", in, &o)
}

// WakeAt sets the time at which an instance must run. The zero time clears it.
func (c *Client) WakeAt(ctx context.Context, name string, t time.Time) (o Instance, err error) {
	in := map[string]time.Time{}
	if !t.IsZero() {
		in["at"] = t
	}
	return o, c.call(ctx, "POST", inst(name)+"/wake-at", in, &o)
}

// Hold takes or renews a lease.
func (c *Client) Hold(ctx context.Context, name string, r LeaseRequest) (l []idle.Lease, err error) {
	return l, c.call(ctx, "POST", inst(name)+"/leases", r, &l)
}

// Release drops a holder's lease.
func (c *Client) Release(ctx context.Context, name, holder string) (l []idle.Lease, err error) {
	return l, c.call(ctx, "DELETE", inst(name)+"/leases/"+url.PathEscape(holder), nil, &l)
}

// Exec runs a command inside an instance.
func (c *Client) Exec(ctx context.Context, name string, r ExecRequest) (x ExecResult, err error) {
	return x, c.call(ctx, "POST", inst(name)+"/exec", r, &x)
}

// OpenExec starts a command inside an instance and returns the connection for
// execstream.Run, which the caller closes. Closing it ends the command. ctx
// limits only the start.
func (c *Client) OpenExec(ctx context.Context, name string, q execstream.Request) (io.ReadWriteCloser, error) {
	live, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	res, err := c.api.Open(live, httpx.Request{Method: "POST", Path: inst(name) + "/exec/stream", In: q,
		Header: http.Header{"Connection": {"Upgrade"}, "Upgrade": {execstream.Protocol}}})
	if err != nil {
		cancel()
		return nil, err
	}
	stop()
	rw, ok := res.Body.(io.ReadWriteCloser)
	if !ok {
		res.Body.Close()
		cancel()
		return nil, fmt.Errorf("cannot stream a command: the host answered with status %d", res.StatusCode)
	}
	return closing{rw, cancel}, nil
}

// closing is a connection that cancels its context when it is closed.
type closing struct {
	io.ReadWriteCloser
	cancel func()
}

func (c closing) Close() error {
	defer c.cancel()
	return c.ReadWriteCloser.Close()
}

// Halting starts or ends a halt. Until is a time in any form that the host
// accepts; empty means until the halt is lifted.
type Halting struct {
	On     bool   `json:"on"`
	Reason string `json:"reason,omitempty"`
	Until  string `json:"until,omitempty"`
}

// Halt starts or ends a halt.
func (c *Client) Halt(ctx context.Context, r Halting) (s Status, err error) {
	return s, c.call(ctx, "POST", "/halt", r, &s)
}

// Logs copies an instance's output to w.
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
	if l.Times {
		q.Set("timestamps", "true")
	}
	for name, t := range map[string]time.Time{"since": l.Since, "until": l.Until} {
		if !t.IsZero() {
			q.Set(name, t.UTC().Format(time.RFC3339Nano))
		}
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

// ReadFiles returns the file or tree at a path of an instance as a tar stream.
// The caller closes it.
func (c *Client) ReadFiles(ctx context.Context, name, path string) (io.ReadCloser, error) {
	return c.follow(ctx, inst(name)+"/files", url.Values{"path": {path}})
}

// WriteFiles unpacks a tar stream at a path of an instance: into the directory at
// path or, if it does not exist, under that name in its parent.
func (c *Client) WriteFiles(ctx context.Context, name, path string, archive io.Reader) error {
	_, err := c.api.Do(ctx, httpx.Request{Method: "PUT", Path: inst(name) + "/files?" + url.Values{"path": {path}}.Encode(), Body: archive}, nil)
	return err
}

// Kept calls each for every retained event after since ("" for all, "now", or an
// id). It calls missing first if some of those events are no longer retained.
func (c *Client) Kept(ctx context.Context, since string, missing func(why string), each func(Event) error) error {
	// Hosts of an earlier version do not end the stream after the retained
	// events, so a pause in it is taken as their end.
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

// Follow calls each for every retained event after since, as Kept does, and for
// new events until ctx ends. If the host becomes unreachable it retries for a
// while. It also calls missing when another daemon answers, because events in
// between may be missing. If each returns an error, Follow returns it unchanged.
func (c *Client) Follow(ctx context.Context, since string, missing func(why string), each func(Event) error) error {
	var daemon time.Time // start time of the daemon that issued the IDs in since
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
			return fmt.Errorf("event stream ended, because the host stopped: %w", err)
		}
		if delay.For(ctx, min(5*time.Second, 50*time.Millisecond<<try)) != nil {
			return nil
		}
	}
}

// follows reads the stream over one connection. begun reports whether the stream
// was opened.
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

// keptWithin is the pause in a stream after which no more retained events are
// expected.
const keptWithin = 5 * time.Second

// maxEvent limits an event, in bytes.
const maxEvent = 1 << 20
