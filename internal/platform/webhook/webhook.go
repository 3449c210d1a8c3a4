// Package webhook sends notifications by HTTP: signed CloudEvents 1.0, and
// messages for Slack-compatible incoming webhooks.
//
// Signatures follow the Standard Webhooks specification: headers webhook-id,
// webhook-timestamp and webhook-signature, an HMAC-SHA256 of id.timestamp.body. A
// message whose answer was lost is sent again with the same id, so a receiver
// must remember the ids it has seen. It must also reject a timestamp that differs
// from its own clock by minutes.
//
// The package guarantees that redirects are not followed, that the size of the
// answer is bounded, and that no error contains the address, which may be a
// secret. The caller decides when to retry, and the given Dial decides where to
// connect.
package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
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

	"lull/internal/fleet/sealed"
)

// Config configures a Client. URL and Dial are required.
type Config struct {
	URL string
	// Key signs messages. It is either whsec_ followed by base64, or the key
	// itself. Empty means no signature.
	Key  sealed.Plain
	CA   string // PEM; empty means the system's roots
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Timeout bounds one message; 0 means 15 s.
	Timeout time.Duration
	Agent   string // User-Agent
}

// Client sends to one receiver. It is safe for concurrent use.
type Client struct {
	url, agent string
	key        []byte
	http       *http.Client
}

// Event is a CloudEvent 1.0.
type Event struct {
	SpecVersion string          `json:"specversion"` // 1.0
	ID          string          `json:"id"`
	Source      string          `json:"source"`
	Type        string          `json:"type"`
	Subject     string          `json:"subject,omitempty"`
	Time        time.Time       `json:"time"`
	ContentType string          `json:"datacontenttype,omitempty"`
	Sequence    string          `json:"sequence,omitempty"` // extension that orders the events of a source
	Data        json.RawMessage `json:"data,omitempty"`
}

// StatusError is an error response.
type StatusError struct {
	Status     int
	RetryAfter time.Duration // 0 if the receiver sent none
	Detail     string
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("the receiver answered %d %s", e.Status, http.StatusText(e.Status))
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

// Rejected reports whether the receiver rejected this particular message, so that
// it may still accept another one.
func (e *StatusError) Rejected() bool {
	switch e.Status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity:
		return true
	}
	return false
}

// New returns a Client. It does not connect.
func New(c Config) (*Client, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("cannot make a webhook: its address is not an http or https address")
	}
	key := []byte(c.Key)
	if text, ok := strings.CutPrefix(string(c.Key), "whsec_"); ok {
		if key, err = base64.StdEncoding.DecodeString(text); err != nil {
			return nil, errors.New("cannot make a webhook: its key is not base64 after whsec_")
		}
	}
	if c.Key != "" && len(key) < 16 {
		return nil, fmt.Errorf("cannot make a webhook: its key has %d bytes, want at least 16", len(key))
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM([]byte(c.CA)) {
			return nil, errors.New("cannot make a webhook: its CA contains no PEM certificate")
		}
	}
	if c.Timeout == 0 {
		c.Timeout = 15 * time.Second
	}
	return &Client{url: c.URL, agent: c.Agent, key: key, http: &http.Client{
		Timeout: c.Timeout,
		// Without a proxy, because a proxy would connect to the receiver itself,
		// past Dial, which enforces what is allowed.
		Transport: &http.Transport{DialContext: c.Dial, TLSClientConfig: conf, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 2,
			IdleConnTimeout: 30 * time.Second, MaxResponseHeaderBytes: 64 << 10},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Send sends one event, or several as a batch, under the given id. It returns a
// *StatusError or a connection error.
func (c *Client) Send(ctx context.Context, id string, events ...Event) error {
	var body []byte
	var err error
	kind := "application/cloudevents+json"
	if len(events) == 1 {
		body, err = json.Marshal(events[0])
	} else {
		kind = "application/cloudevents-batch+json"
		body, err = json.Marshal(events)
	}
	if err != nil {
		return fmt.Errorf("cannot encode an event: %w", err)
	}
	h := http.Header{"Content-Type": {kind}}
	if len(c.key) > 0 {
		at := strconv.FormatInt(time.Now().Unix(), 10)
		h.Set("Webhook-Id", id)
		h.Set("Webhook-Timestamp", at)
		h.Set("Webhook-Signature", "v1,"+Sign(c.key, id, at, body))
	}
	return c.post(ctx, h, body)
}

// Text sends a text in Slack's markup to a Slack-compatible webhook. The caller
// must pass the parts that are not markup through Escape.
func (c *Client) Text(ctx context.Context, text string) error {
	body, err := json.Marshal(map[string]string{"text": text})
	if err != nil {
		return fmt.Errorf("cannot encode a message: %w", err)
	}
	return c.post(ctx, http.Header{"Content-Type": {"application/json"}}, body)
}

// Escape escapes text for Slack's markup.
func Escape(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(s)
}

// Sign returns the base64 signature of a message.
func Sign(key []byte, id, timestamp string, body []byte) string {
	m := hmac.New(sha256.New, key)
	fmt.Fprintf(m, "%s.%s.", id, timestamp)
	m.Write(body)
	return base64.StdEncoding.EncodeToString(m.Sum(nil))
}

// maxRetryAfter bounds the delay that a receiver's Retry-After can request.
const maxRetryAfter = time.Hour

func (c *Client) post(ctx context.Context, h http.Header, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return errors.New("cannot make the request: the address is invalid")
	}
	req.Header = h
	req.Header.Set("User-Agent", c.agent)
	res, err := c.http.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err // without the URL, which contains the address
		}
		return fmt.Errorf("cannot reach the receiver: %w", err)
	}
	defer res.Body.Close()
	said, err := io.ReadAll(io.LimitReader(res.Body, 4<<10))
	if res.StatusCode/100 == 2 {
		return nil
	}
	e := &StatusError{Status: res.StatusCode}
	if err == nil {
		e.Detail = shorten(string(said))
	}
	if n, err := strconv.Atoi(res.Header.Get("Retry-After")); err == nil && n > 0 {
		e.RetryAfter = min(time.Duration(n)*time.Second, maxRetryAfter)
	}
	return e
}

// shorten returns a receiver's answer as one line of limited length.
func shorten(s string) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(s, "?")), " ")
	if r := []rune(s); len(r) > 200 {
		s = string(r[:200])
	}
	return s
}
