package cml

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"lull/internal/fleet/sealed"
)

// Limits of every call.
const (
	maxAnswer      = 4 << 20  // bytes of an answer other than telemetry events
	maxToken       = 16 << 10 // bytes of a session token
	dialTimeout    = 10 * time.Second
	headerTimeout  = 60 * time.Second
	defaultTimeout = 60 * time.Second
	// defaultEventsTimeout suffices for a history of a gigabyte on a slow line.
	defaultEventsTimeout = 10 * time.Minute
)

// Config configures the client of one worker.
type Config struct {
	// URL is the worker's base address, "https://host" with an optional port.
	// "http" is accepted only with TLS.Insecure, because it verifies nothing.
	URL string
	// Username and Password are the credentials of lull's account.
	Username string
	Password sealed.Plain
	TLS      TLS
	// Dial replaces the network; nil means net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// HTTP replaces the HTTP client; then TLS and Dial must be zero.
	HTTP *http.Client
	// Timeout bounds one call except the telemetry events; 0 means 60 s.
	Timeout time.Duration
	// EventsTimeout bounds the telemetry events; 0 means 10 min.
	EventsTimeout time.Duration
}

// Client is a client of one CML host. It is safe for concurrent use.
type Client struct {
	base     string
	host     string
	username string
	password sealed.Plain
	http     *http.Client
	timeout  time.Duration
	events   time.Duration

	login chan struct{} // held while authenticating
	mu    sync.Mutex
	token string
	// adminToken is the last token that was found to belong to an administrator.
	adminToken string
	offset     Offset // the last known offset
}

// New checks cfg and returns a client. It makes no connection.
func New(cfg Config) (*Client, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") ||
		u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("cannot use CML url %q: it is not of the form https://host[:port]", redact(u, cfg.URL))
	}
	if u.Scheme == "http" && !cfg.TLS.Insecure {
		return nil, fmt.Errorf("cannot use CML url %q: http needs insecure, because the host cannot be verified", cfg.URL)
	}
	c := &Client{
		base: u.Scheme + "://" + u.Host + "/api/v0", host: u.Host,
		username: cfg.Username, password: cfg.Password, http: cfg.HTTP,
		timeout: cmp.Or(cfg.Timeout, defaultTimeout),
		events:  cmp.Or(cfg.EventsTimeout, defaultEventsTimeout),
		login:   make(chan struct{}, 1),
	}
	if c.http != nil {
		if cfg.Dial != nil || len(cfg.TLS.CA) > 0 || cfg.TLS.Pin != "" {
			return nil, errors.New("cannot use CML client: a custom HTTP client excludes dial and TLS settings")
		}
		return c, nil
	}
	config, err := cfg.TLS.config()
	if err != nil {
		return nil, err
	}
	c.http = newHTTP(config, cfg.Dial)
	return c, nil
}

// redact replaces the password in the URL in an error message.
func redact(u *url.URL, raw string) string {
	if u == nil {
		return "(unreadable)"
	}
	if u.User != nil {
		return u.Redacted()
	}
	return raw
}

func newHTTP(config *tls.Config, dial func(context.Context, string, string) (net.Conn, error)) *http.Client {
	if dial == nil {
		dial = (&net.Dialer{Timeout: dialTimeout}).DialContext
	}
	return &http.Client{
		Transport: &http.Transport{
			DialContext: dial, TLSClientConfig: config, TLSHandshakeTimeout: dialTimeout,
			ResponseHeaderTimeout: headerTimeout, MaxResponseHeaderBytes: 64 << 10,
			MaxIdleConnsPerHost: 1, IdleConnTimeout: 10 * time.Second,
			ForceAttemptHTTP2: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Host returns the host and port of the server.
func (c *Client) Host() string { return c.host }

// call is one request to the API.
type call struct {
	op     string // operation, for errors
	method string
	path   string // below /api/v0
	body   any    // nil for none
	open   bool   // needs no session
}

// answer is a successful response; its body is open.
type answer struct {
	*http.Response
	offset   Offset
	received time.Time
}

// send makes a call. On a 401 it authenticates and repeats the call once.
func (c *Client) send(ctx context.Context, k call) (*answer, error) {
	var body []byte
	if k.body != nil {
		var err error
		if body, err = json.Marshal(k.body); err != nil {
			return nil, fmt.Errorf("cannot %s: %w", k.op, err)
		}
	}
	if k.open {
		return c.try(ctx, k, body, "")
	}
	token, err := c.session(ctx, "")
	if err != nil {
		return nil, err
	}
	a, err := c.try(ctx, k, body, token)
	var refused *Error
	if errors.As(err, &refused) && refused.Status == http.StatusUnauthorized {
		if token, err = c.session(ctx, token); err != nil {
			return nil, err
		}
		a, err = c.try(ctx, k, body, token)
		if errors.As(err, &refused) && refused.Status == http.StatusUnauthorized {
			c.forget(token)
		}
	}
	return a, err
}

// try makes a call once.
func (c *Client) try(ctx context.Context, k call, body []byte, token string) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, k.method, c.base+k.path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("cannot %s: %w", k.op, err)
	}
	req.Header.Set("Accept", "application/json")
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	sent := time.Now()
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(k.op, err)
	}
	received := time.Now()
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 16<<10)) // an unreadable body only costs the description
		e := &Error{Op: k.op, Host: c.host, Status: resp.StatusCode, Kind: kindOf(resp.StatusCode)}
		e.Code, e.Description = fault(text)
		return nil, e
	}
	return &answer{Response: resp, offset: c.measured(offsetOf(resp.Header, sent, received)), received: received}, nil
}

// measured merges o, the offset measured by one response, into the known offset
// and returns the offset to use for that response.
func (c *Client) measured(o Offset) Offset {
	c.mu.Lock()
	defer c.mu.Unlock()
	o = c.offset.after(o)
	if o.Known {
		c.offset = o
	}
	return o
}

func (c *Client) unreachable(op string, err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err // without the URL, which is already in the message
	}
	return &Error{Op: op, Host: c.host, Kind: ErrUnreachable, Err: err}
}

// fetch makes a call and decodes the response into v, unless v is nil. It
// returns the status and the measured offset.
func (c *Client) fetch(ctx context.Context, k call, v any) (int, Offset, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	a, err := c.send(ctx, k)
	if err != nil {
		return 0, Offset{}, err
	}
	defer a.Body.Close()
	text, err := io.ReadAll(io.LimitReader(a.Body, maxAnswer+1))
	if err != nil {
		return 0, Offset{}, c.unreachable(k.op, err)
	}
	bad := func(err error) error {
		return &Error{Op: k.op, Host: c.host, Status: a.StatusCode, Kind: ErrBadAnswer, Err: err}
	}
	if len(text) > maxAnswer {
		return 0, Offset{}, bad(fmt.Errorf("it is larger than %d bytes", maxAnswer))
	}
	if v == nil {
		return a.StatusCode, a.offset, nil
	}
	if err := json.Unmarshal(text, v); err != nil {
		return 0, Offset{}, bad(err)
	}
	return a.StatusCode, a.offset, nil
}

// session returns a session token other than stale, authenticating if there is
// none. Only one goroutine authenticates at a time.
func (c *Client) session(ctx context.Context, stale string) (string, error) {
	if t := c.current(stale); t != "" {
		return t, nil
	}
	select {
	case c.login <- struct{}{}:
		defer func() { <-c.login }()
	case <-ctx.Done():
		return "", c.unreachable("authenticate", ctx.Err())
	}
	if t := c.current(stale); t != "" {
		return t, nil
	}
	token, err := c.authenticate(ctx)
	if err != nil {
		return "", err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.token = token
	return token, nil
}

func (c *Client) current(stale string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.token == stale {
		return ""
	}
	return c.token
}

// forget drops a token that was rejected.
func (c *Client) forget(token string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.token == token {
		c.token = ""
	}
}

type credentials struct {
	Username string `json:"username"`
	Password string `json:"password"`
}

// authenticate requests a token, which comes as a bare JSON string.
func (c *Client) authenticate(ctx context.Context) (string, error) {
	const op = "authenticate"
	body, err := json.Marshal(credentials{c.username, string(c.password)})
	if err != nil {
		return "", fmt.Errorf("cannot %s: %w", op, err)
	}
	a, err := c.try(ctx, call{op: op, method: http.MethodPost, path: "/authenticate"}, body, "")
	if err != nil {
		return "", err
	}
	defer a.Body.Close()
	text, err := io.ReadAll(io.LimitReader(a.Body, maxToken+1))
	if err != nil {
		return "", c.unreachable(op, err)
	}
	var token string
	if json.Unmarshal(text, &token) != nil || !validToken(token) {
		return "", &Error{Op: op, Host: c.host, Status: a.StatusCode, Kind: ErrBadAnswer,
			Err: fmt.Errorf("it is not a token of at most %d bytes in a JSON string", maxToken)}
	}
	return token, nil
}

// validToken reports whether s can be sent as a token in an HTTP header.
func validToken(s string) bool {
	return s != "" && len(s) < maxToken && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f })
}
