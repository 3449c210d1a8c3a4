package cml

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// host is a fake CML host for one test, with its answers by "METHOD /path".
type host struct {
	*httptest.Server
	logins  atomic.Int32
	mu      sync.Mutex
	valid   map[string]bool // tokens
	answers map[string]http.HandlerFunc
}

func newHost(t *testing.T, answers map[string]http.HandlerFunc) *host {
	t.Helper()
	h := &host{valid: map[string]bool{}, answers: answers}
	h.Server = httptest.NewUnstartedServer(h)
	h.Config.ErrorLog = log.New(io.Discard, "", 0) // some handshakes are meant to fail
	h.StartTLS()
	t.Cleanup(h.Close)
	return h
}

func (h *host) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, ok := strings.CutPrefix(r.URL.Path, "/api/v0")
	if !ok {
		http.Error(w, "elsewhere", http.StatusTeapot)
		return
	}
	if r.Method == "POST" && path == "/authenticate" {
		var c credentials
		if json.NewDecoder(r.Body).Decode(&c) != nil || c.Password != "secret" {
			answer403(w)
			return
		}
		token := fmt.Sprintf("token-%d", h.logins.Add(1))
		h.mu.Lock()
		h.valid[token] = true
		h.mu.Unlock()
		fmt.Fprintf(w, "%q", token)
		return
	}
	if f := h.answers["POST /auth_extended"]; f == nil && r.Method == "POST" && path == "/auth_extended" {
		io.WriteString(w, `{"id":"u-1","username":"lull","admin":true}`)
		return
	}
	token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	h.mu.Lock()
	valid := h.valid[token]
	h.mu.Unlock()
	if path != "/system_information" && !valid {
		refuse(401, "Unauthorized")(w, r)
		return
	}
	if f := h.answers[r.Method+" "+path]; f != nil {
		f(w, r)
		return
	}
	refuse(404, "Not here")(w, r)
}

func (h *host) expire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.valid)
}

func answer403(w http.ResponseWriter) { refuse(403, "Authentication failed!")(w, nil) }

func refuse(status int, description string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"code": %d, "description": %q}`, status, description)
	}
}

func say(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) }
}

func (h *host) client(t *testing.T, change func(*Config)) *Client {
	t.Helper()
	cfg := Config{URL: h.URL, Username: "lull", Password: "secret", TLS: TLS{Pin: h.pin()}}
	if change != nil {
		change(&cfg)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func (h *host) pin() string {
	pin := PinOf(h.Certificate())
	return hex.EncodeToString(pin[:])
}

func TestClientSession(t *testing.T) {
	h := newHost(t, map[string]http.HandlerFunc{"GET /telemetry": say(`{"opt_in": true}`)})
	c := h.client(t, nil)
	for range 3 {
		if in, err := c.OptedIn(t.Context()); err != nil || !in {
			t.Fatalf("opted in: %v, %v", in, err)
		}
	}
	if n := h.logins.Load(); n != 1 {
		t.Errorf("%d logins for three calls", n)
	}
	h.expire()
	if in, err := c.OptedIn(t.Context()); err != nil || !in {
		t.Fatalf("after the session ended: %v, %v", in, err)
	}
	if n := h.logins.Load(); n != 2 {
		t.Errorf("%d logins after one lost session", n)
	}
}

func TestClientSessionOnceOnly(t *testing.T) {
	h := newHost(t, map[string]http.HandlerFunc{"GET /telemetry": refuse(401, "never")})
	c := h.client(t, nil)
	_, err := c.OptedIn(t.Context())
	var e *Error
	if !errors.Is(err, ErrUnauthorized) || !errors.As(err, &e) || e.Status != 401 || e.Code != "401" || e.Description != "never" {
		t.Errorf("error %v", err)
	}
	if n := h.logins.Load(); n != 2 {
		t.Errorf("%d logins, want the first and exactly one more", n)
	}
}

func TestClientSharesOneLogin(t *testing.T) {
	h := newHost(t, map[string]http.HandlerFunc{"GET /telemetry": say(`{"opt_in": true}`)})
	c := h.client(t, nil)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if _, err := c.OptedIn(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := h.logins.Load(); n != 1 {
		t.Errorf("%d logins for 20 calls at a time", n)
	}
}

func TestClientBadCredentials(t *testing.T) {
	h := newHost(t, nil)
	c := h.client(t, func(cfg *Config) { cfg.Password = "guess-me-not" })
	_, err := c.OptedIn(t.Context())
	if !errors.Is(err, ErrUnauthorized) || strings.Contains(err.Error(), "guess-me-not") {
		t.Errorf("error %v", err)
	}
	if a := c.Activity(t.Context(), mustFilter(t, nil), nil); a.Unknown != ReasonUnauthorized {
		t.Errorf("reason %q", a.Unknown)
	}
}

func TestClientTLS(t *testing.T) {
	h := newHost(t, map[string]http.HandlerFunc{"GET /system_information": say(`{"version":"2.9.0","ready":true}`)})
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.Certificate().Raw})
	wrong := strings.Repeat("ab", 32)
	for _, c := range []struct {
		name string
		tls  TLS
		ok   bool
	}{
		{"by default", TLS{}, false},
		{"pin", TLS{Pin: h.pin()}, true},
		{"pin with colons", TLS{Pin: strings.ReplaceAll(h.pin(), "", ":")}, true},
		{"another pin", TLS{Pin: wrong}, false},
		{"CA", TLS{CA: ca}, true},
		{"CA and another name", TLS{CA: ca, ServerName: "cml.invalid"}, false},
		{"CA and its name", TLS{CA: ca, ServerName: "example.com"}, true},
		{"CA and pin", TLS{CA: ca, Pin: h.pin()}, true},
		{"CA and another pin", TLS{CA: ca, Pin: wrong}, false},
		{"insecure", TLS{Insecure: true}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			info, err := h.client(t, func(cfg *Config) { cfg.TLS = c.tls }).Information(t.Context())
			if (err == nil) != c.ok {
				t.Fatalf("error %v", err)
			}
			if !c.ok && !errors.Is(err, ErrUnreachable) {
				t.Errorf("kind of %v", err)
			}
			if c.ok && (info.Version != "2.9.0" || !info.Ready || !info.Offset.Known) {
				t.Errorf("information %+v", info)
			}
		})
	}
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
	}{
		{"no url", Config{}},
		{"no scheme", Config{URL: "cml.example"}},
		{"another scheme", Config{URL: "ftp://cml.example"}},
		{"plain http", Config{URL: "http://cml.example"}},
		{"a path", Config{URL: "https://cml.example/api"}},
		{"a password", Config{URL: "https://me:hidden@cml.example"}},
		{"insecure with a pin", Config{URL: "https://cml.example", TLS: TLS{Insecure: true, Pin: strings.Repeat("ab", 32)}}},
		{"a short pin", Config{URL: "https://cml.example", TLS: TLS{Pin: "abcd"}}},
		{"a CA that is none", Config{URL: "https://cml.example", TLS: TLS{CA: []byte("x")}}},
		{"a client and a pin", Config{URL: "https://cml.example", HTTP: &http.Client{}, TLS: TLS{Pin: strings.Repeat("ab", 32)}}},
	} {
		_, err := New(c.cfg)
		if err == nil || !strings.HasPrefix(err.Error(), "cannot ") || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestClientActivity(t *testing.T) {
	var optIn, events http.HandlerFunc
	h := newHost(t, map[string]http.HandlerFunc{
		"GET /telemetry":        func(w http.ResponseWriter, r *http.Request) { optIn(w, r) },
		"GET /telemetry/events": func(w http.ResponseWriter, r *http.Request) { events(w, r) },
	})
	c := h.client(t, nil)
	f := mustFilter(t, nil)
	now := time.Now().UTC()
	recent := array(event("start_lab", now.Add(-time.Minute).Format(time.RFC3339Nano), `{}`))
	skewed := func(d time.Duration, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Date", time.Now().Add(d).UTC().Format(http.TimeFormat))
			io.WriteString(w, text)
		}
	}
	yes := say(`{"opt_in": true, "show_modal": false}`)
	for _, k := range []struct {
		name          string
		optIn, events http.HandlerFunc
		want          Reason
		ago           time.Duration // of the newest activity; 0 for none
	}{
		{"recent", yes, say(recent), ReasonNone, time.Minute},
		{"never any", yes, say(`[]`), ReasonNone, 0},
		{"host's clock an hour ahead", yes, skewed(time.Hour, recent), ReasonNone, time.Hour + time.Minute},
		{"host's clock 50 s behind", yes, skewed(-50*time.Second, recent), ReasonNone, 10 * time.Second},
		{"no Date", yes, func(w http.ResponseWriter, r *http.Request) {
			w.Header()["Date"] = nil
			io.WriteString(w, recent)
		}, ReasonOffsetUnknown, 0},
		{"not opted in", say(`{"opt_in": false}`), say(recent), ReasonNotOptedIn, 0},
		{"opt-in missing", say(`{}`), say(recent), ReasonOptInUnknown, 0},
		{"opt-in no JSON", say(`yes`), say(recent), ReasonOptInUnknown, 0},
		{"opt-in refused", refuse(500, "x"), say(recent), ReasonOptInUnknown, 0},
		{"events refused", yes, refuse(500, "x"), ReasonRefused, 0},
		{"events redirected", yes, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://cml.invalid/", http.StatusFound)
		}, ReasonRefused, 0},
		{"events cut off", yes, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(len(recent)+100))
			io.WriteString(w, recent[:len(recent)-1])
		}, ReasonTruncated, time.Minute},
		{"an error with status 200", yes, say(`{"code": 1}`), ReasonMalformed, 0},
	} {
		t.Run(k.name, func(t *testing.T) {
			optIn, events = k.optIn, k.events
			seen := Seen{{Digest: strings.Repeat("0", 24), FirstSeen: now}}
			a := c.Activity(t.Context(), f, seen)
			if a.Unknown != k.want || (a.Err == nil) != (k.want == ReasonNone) {
				t.Fatalf("%q (%v), want %q", a.Unknown, a.Err, k.want)
			}
			if k.want != ReasonNone && len(a.Seen) != 1 {
				t.Errorf("an unknown signal forgot what was seen")
			}
			if k.ago == 0 {
				if !a.Newest.IsZero() {
					t.Errorf("newest %v, want none", a.Newest)
				}
				return
			}
			// The Date header has a resolution of a second, and the answer took a
			// moment.
			if off := a.Newest.Sub(now.Add(-k.ago)); off < -time.Second || off > 30*time.Second {
				t.Errorf("newest is %v off", off)
			}
			if a.Newest.After(a.CheckedAt) {
				t.Errorf("newest %v is later than the answer at %v", a.Newest, a.CheckedAt)
			}
		})
	}
}

func TestClientUnreachable(t *testing.T) {
	refused := errors.New("no route")
	c, err := New(Config{URL: "https://192.0.2.1", Dial: func(context.Context, string, string) (net.Conn, error) { return nil, refused }})
	if err != nil {
		t.Fatal(err)
	}
	if a := c.Activity(t.Context(), mustFilter(t, nil), nil); a.Unknown != ReasonUnreachable || !errors.Is(a.Err, refused) {
		t.Errorf("%q, %v", a.Unknown, a.Err)
	}
}

func TestClientTimesOut(t *testing.T) {
	stuck := make(chan struct{})
	h := newHost(t, map[string]http.HandlerFunc{"GET /telemetry": func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-stuck:
		case <-r.Context().Done():
		}
	}})
	defer close(stuck)
	c := h.client(t, func(cfg *Config) { cfg.Timeout = 200 * time.Millisecond })
	if _, err := c.OptedIn(t.Context()); !errors.Is(err, ErrUnreachable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

func TestClientAnswerTooLarge(t *testing.T) {
	h := newHost(t, map[string]http.HandlerFunc{"GET /licensing": func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"x":"`)
		for range maxAnswer>>16 + 1 {
			io.WriteString(w, strings.Repeat("x", 1<<16))
		}
		io.WriteString(w, `"}`)
	}})
	if _, err := h.client(t, nil).Licensing(t.Context()); !errors.Is(err, ErrBadAnswer) {
		t.Errorf("error %v", err)
	}
}

func TestOffset(t *testing.T) {
	sent := time.Date(2025, 11, 20, 12, 0, 0, 400e6, time.UTC)
	received := sent.Add(200 * time.Millisecond)
	header := func(v string) http.Header { return http.Header{"Date": {v}} }
	got := offsetOf(header("Thu, 20 Nov 2025 12:00:10 GMT"), sent, received)
	want := Offset{Known: true, Low: 9400 * time.Millisecond, High: 10600 * time.Millisecond}
	if got != want {
		t.Errorf("offset %+v, want %+v", got, want)
	}
	if got.Estimate() != 10*time.Second || got.Bound() != 600*time.Millisecond {
		t.Errorf("estimate %v within %v", got.Estimate(), got.Bound())
	}
	for _, v := range []string{"", "yesterday"} {
		if o := offsetOf(header(v), sent, received); o.Known {
			t.Errorf("Date %q gave %+v", v, o)
		}
	}
	if o := offsetOf(header("Thu, 20 Nov 2025 12:00:10 GMT"), received, sent); o.Known {
		t.Errorf("a clock that stepped back gave %+v", o)
	}
}

// TestOffsetStays checks that an offset is kept until a measurement contradicts
// it, and that a much more precise measurement narrows it.
func TestOffsetStays(t *testing.T) {
	ms := func(low, high int) Offset {
		return Offset{Known: true, Low: time.Duration(low) * time.Millisecond, High: time.Duration(high) * time.Millisecond}
	}
	for name, c := range map[string]struct{ old, now, want Offset }{
		"the first":                     {Offset{}, ms(0, 1000), ms(0, 1000)},
		"within its bounds":             {ms(0, 1000), ms(-900, 100), ms(0, 1000)},
		"just touching":                 {ms(0, 1000), ms(1000, 2000), ms(0, 1000)},
		"the host's clock was set":      {ms(0, 1000), ms(1001, 2001), ms(1001, 2001)},
		"set back":                      {ms(0, 1000), ms(-2000, -1), ms(-2000, -1)},
		"a long way says nothing more":  {ms(0, 1000), ms(-9000, 4000), ms(0, 1000)},
		"much better, within":           {ms(-9000, 4000), ms(0, 1000), ms(0, 1000)},
		"much better, across an edge":   {ms(-9000, 4000), ms(-9500, -8500), ms(-9000, -8500)},
		"an answer without a time":      {ms(0, 1000), Offset{}, Offset{}},
		"a little better moves nothing": {ms(0, 1100), ms(100, 1100), ms(0, 1100)},
	} {
		if got := c.old.after(c.now); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
	c := &Client{}
	for i, o := range []Offset{ms(0, 1000), {}, ms(500, 1500)} {
		if got := c.measured(o); got.Known != o.Known || o.Known && got != ms(0, 1000) {
			t.Errorf("measurement %d is read as %+v", i, got)
		}
	}
}
