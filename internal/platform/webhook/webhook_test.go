package webhook_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/platform/webhook"
)

func client(t *testing.T, cfg webhook.Config) *webhook.Client {
	t.Helper()
	cfg.Dial, cfg.Agent = (&net.Dialer{}).DialContext, "lull/test"
	c, err := webhook.New(cfg)
	errtest.None(t, err)
	t.Cleanup(c.Close)
	return c
}

var event = webhook.Event{SpecVersion: "1.0", ID: "e1", Source: "lull/f", Type: "worker.paused", Subject: "workers/w1", Time: time.Unix(1_800_000_000, 0).UTC(),
	ContentType: "application/json", Data: json.RawMessage(`{"a":1}`)}

// TestSignature checks the signature of the specification's own example, and
// verifies sent messages as a receiver would.
func TestSignature(t *testing.T) {
	key, err := base64.StdEncoding.DecodeString("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	errtest.None(t, err)
	if got := webhook.Sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", []byte(`{"test": 2432232314}`)); got != "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=" {
		t.Errorf("the signature of the specification's example is %s", got)
	}
	var head http.Header
	var body []byte
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head = r.Header
		body, _ = io.ReadAll(r.Body) // checked below
	}))
	defer srv.Close()
	ca := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}))
	c := client(t, webhook.Config{URL: srv.URL, Key: "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", CA: ca})
	for name, send := range map[string]func() error{
		"application/cloudevents+json":       func() error { return c.Send(t.Context(), "m1", event) },
		"application/cloudevents-batch+json": func() error { return c.Send(t.Context(), "m1", event, event) },
	} {
		errtest.None(t, send())
		if got := head.Get("Content-Type"); got != name {
			t.Errorf("it is %s, want %s", got, name)
		}
		want := "v1," + webhook.Sign(key, "m1", head.Get("Webhook-Timestamp"), body)
		if head.Get("Webhook-Signature") != want || head.Get("Webhook-Id") != "m1" {
			t.Errorf("the head is %v", head)
		}
	}
	if err := client(t, webhook.Config{URL: srv.URL}).Send(t.Context(), "m1", event); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate that no CA vouches for: %v", err)
	}
}

// TestAnswers checks the meaning of each answer, and that no error contains the
// address.
func TestAnswers(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/s3cret/ok":
			w.WriteHeader(http.StatusAccepted)
		case "/s3cret/moved":
			http.Redirect(w, r, "/s3cret/ok", http.StatusTemporaryRedirect)
		case "/s3cret/bad":
			http.Error(w, "no\n  such "+strings.Repeat("é", 5000), http.StatusUnprocessableEntity)
		case "/s3cret/later":
			w.Header().Set("Retry-After", "90")
			w.WriteHeader(http.StatusTooManyRequests)
		case "/s3cret/much-later":
			w.Header().Set("Retry-After", "99999999")
			w.WriteHeader(http.StatusServiceUnavailable)
		case "/s3cret/endless":
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		default:
			panic(http.ErrAbortHandler)
		}
	}))
	defer srv.Close()
	for path, want := range map[string]webhook.StatusError{
		"ok": {}, "endless": {}, "moved": {Status: 307}, "bad": {Status: 422}, "later": {Status: 429, RetryAfter: 90 * time.Second},
		"much-later": {Status: 503, RetryAfter: time.Hour}, "cut": {Status: -1},
	} {
		err := client(t, webhook.Config{URL: srv.URL + "/s3cret/" + path}).Send(t.Context(), "m", event)
		e, _ := errors.AsType[*webhook.StatusError](err)
		switch {
		case want.Status == 0:
			if err != nil {
				t.Errorf("%s: %v", path, err)
			}
		case err == nil || strings.Contains(err.Error(), "s3cret") || len(err.Error()) > 1000:
			t.Errorf("%s: %v", path, err)
		case want.Status > 0 && (e == nil || e.Status != want.Status || e.RetryAfter != want.RetryAfter || e.Rejected() != (e.Status == 422)):
			t.Errorf("%s: %+v, want %+v", path, e, want)
		}
	}
}

// TestUnreachable checks the errors for a missing receiver and for one that does
// not answer in time.
func TestUnreachable(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	defer l.Close() // it accepts nothing
	c := client(t, webhook.Config{URL: "http://" + l.Addr().String() + "/s3cret", Timeout: 100 * time.Millisecond})
	if err := c.Text(t.Context(), "hello"); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("nothing answers: %v", err)
	}
	refuse := func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("not there") }
	c, err = webhook.New(webhook.Config{URL: "http://x.example/s3cret", Dial: refuse})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Text(t.Context(), "hello"); err == nil || strings.Contains(err.Error(), "s3cret") || !strings.Contains(err.Error(), "not there") {
		t.Errorf("it cannot be dialled: %v", err)
	}
}

// TestFaults checks that invalid configurations are rejected.
func TestFaults(t *testing.T) {
	for _, cfg := range []webhook.Config{{URL: "s3cret"}, {URL: "ftp://x/"}, {URL: "https://x/", Key: "s3cret"}, {URL: "https://x/", Key: "whsec_?"}, {URL: "https://x/", CA: "x"}} {
		if _, err := webhook.New(cfg); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	if got := webhook.Escape("<@U1> & <https://x|y>"); got != "&lt;@U1&gt; &amp; &lt;https://x|y&gt;" {
		t.Errorf("escaped: %s", got)
	}
}
