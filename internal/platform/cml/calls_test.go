package cml

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

const statsText = `{"computes":{"a":{"hostname":"c1","is_controller":true,"stats":{"cpu":{"count":48,"percent":12.5},
"memory":{"used":100,"free":300,"total":400},"disk":{"used":1,"free":3,"total":4},
"dominfo":{"total_nodes":9,"running_nodes":4}}},
"b":{"hostname":"c2","stats":{"dominfo":{"running_nodes":3}}}},
"all":{"cpu":{"count":48,"percent":12.5},"memory":{"used":100,"total":400},"disk":{}},"controller":{"disk":{}}}`

func TestStats(t *testing.T) {
	text := statsText
	h := newHost(t, map[string]http.HandlerFunc{"GET /system_stats": func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) }})
	c := h.client(t, nil)
	s, err := c.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n, ok := s.RunningNodes(); n != 7 || !ok {
		t.Errorf("%d nodes run, known: %v", n, ok)
	}
	if p, ok := s.All.Memory.Percent(); p != 25 || !ok {
		t.Errorf("memory %v %%, known: %v", p, ok)
	}
	if _, ok := s.All.Disk.Percent(); ok {
		t.Error("a disk without figures has a percentage")
	}
	for _, text = range []string{
		`{"computes":{}}`, strings.Replace(statsText, `{"running_nodes":3}`, `{}`, 1), strings.Replace(statsText, `{"running_nodes":3}`, `null`, 1),
	} {
		if s, err = c.Stats(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n, ok := s.RunningNodes(); ok {
			t.Errorf("%d nodes known to run by %s", n, text)
		}
	}
	text = `[]`
	if _, err := c.Stats(t.Context()); !errors.Is(err, ErrBadAnswer) {
		t.Errorf("error %v", err)
	}
}

func TestLabs(t *testing.T) {
	ids := `["l1","l2","gone","l3"]`
	h := newHost(t, map[string]http.HandlerFunc{
		"GET /labs": func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("show_all") != "true" {
				ids = `["own"]`
			}
			io.WriteString(w, ids)
		},
		"GET /labs/l1":       say(`{"id":"l1","lab_title":"A","state":"STARTED","node_count":3}`),
		"GET /labs/l2":       say(`{"id":"l2","lab_title":"B","state":"STOPPED","node_count":2}`),
		"GET /labs/l3":       say(`{"id":"l3","lab_title":"C","state":"DEFINED_ON_CORE","node_count":0}`),
		"GET /labs/l1/state": say(`"STARTED"`),
		"GET /labs/bad":      say(`{}`),
	})
	c := h.client(t, nil)
	n, err := c.CountLabs(t.Context())
	if want := (LabCounts{Labs: 3, Started: 1, Nodes: 5}); err != nil || n != want {
		t.Errorf("counts %+v, %v; want %+v", n, err, want)
	}
	if s, err := c.LabState(t.Context(), "l1"); s != LabStarted || err != nil {
		t.Errorf("state %q, %v", s, err)
	}
	ids = `["l1","bad"]`
	if n, err := c.CountLabs(t.Context()); !errors.Is(err, ErrBadAnswer) {
		t.Errorf("a lab that cannot be read: %+v, %v", n, err)
	}
	ids = `["../licensing"]`
	if _, err := c.CountLabs(t.Context()); !errors.Is(err, ErrBadAnswer) {
		t.Errorf("an id that leaves the path: %v", err)
	}
	if _, err := c.Lab(t.Context(), "a/b"); err == nil {
		t.Error("an id that leaves the path was sent")
	}
}

func TestLicenseOutcome(t *testing.T) {
	for _, c := range []struct {
		registration, authorization string
		want                        Outcome
	}{
		{"COMPLETED", "IN_COMPLIANCE", OutcomeDone},
		{"COMPLETED", "INIT", OutcomePending},
		{"COMPLETED", "EVAL", OutcomePending},
		{"COMPLETED", "", OutcomePending},
		{"COMPLETED", "OUT_OF_COMPLIANCE", OutcomeFailed},
		{"COMPLETED", "AUTHORIZATION_EXPIRED", OutcomeFailed},
		{"FAILED", "EVAL", OutcomeFailed},
		{"EXPIRED", "IN_COMPLIANCE", OutcomeFailed},
		{"IN_PROGRESS", "EVAL", OutcomePending},
		{"RETRY", "EVAL", OutcomePending},
		{"NOT_REGISTERED", "EVAL_EXPIRED", OutcomePending},
		{"", "", OutcomePending},
		{"NOT_REGISTERED", "IN_COMPLIANCE", OutcomePending},
	} {
		var l Licensing
		l.Registration.Status, l.Authorization.Status = c.registration, c.authorization
		if got, why := l.Outcome(); got != c.want || (why == "") != (got == OutcomeDone) {
			t.Errorf("%s, %s: %s (%s), want %s", c.registration, c.authorization, got, why, c.want)
		}
	}
}

func license(registration, failure, authorization string) string {
	return fmt.Sprintf(`{"registration":{"status":%q,"register_time":{"failure":%q,"attempted":null},"expires":null},
"authorization":{"status":%q},"product_license":{"active":"CML_Enterprise","is_enterprise":true},"features":[]}`, registration, failure, authorization)
}

func TestRegister(t *testing.T) {
	answers := []string{}
	accepted := false
	h := newHost(t, map[string]http.HandlerFunc{
		"POST /licensing/registration": func(w http.ResponseWriter, r *http.Request) {
			var b map[string]any
			accepted = json.NewDecoder(r.Body).Decode(&b) == nil && b["token"] == "abc=" && b["reregister"] == true
			w.WriteHeader(http.StatusNoContent)
		},
		"GET /licensing": func(w http.ResponseWriter, r *http.Request) {
			text := answers[0]
			if len(answers) > 1 {
				answers = answers[1:]
			}
			if text == "" {
				refuse(503, "busy")(w, r)
				return
			}
			io.WriteString(w, text)
		},
	})
	c := h.client(t, nil)
	if err := c.Register(t.Context(), "abc=", true); err != nil || !accepted {
		t.Fatalf("%v, accepted: %v", err, accepted)
	}
	if err := c.Register(t.Context(), "two words", false); err == nil || strings.Contains(err.Error(), "two words") {
		t.Errorf("a bad token: %v", err)
	}

	answers = []string{license("IN_PROGRESS", "", "EVAL"), "", license("COMPLETED", "", "INIT"), license("COMPLETED", "", "IN_COMPLIANCE")}
	if err := c.AwaitRegistration(t.Context(), time.Millisecond); err != nil {
		t.Errorf("a registration that succeeds: %v", err)
	}
	answers = []string{license("IN_PROGRESS", "", "EVAL"), license("FAILED", "Invalid token", "EVAL")}
	var failed *RegistrationError
	if err := c.AwaitRegistration(t.Context(), time.Millisecond); !errors.As(err, &failed) || failed.Outcome != OutcomeFailed || !strings.Contains(failed.Reason, "Invalid token") {
		t.Errorf("a registration that fails: %v", err)
	}
	const failure = "Communication send error."
	answers = []string{license("RETRY", failure, "EVAL")}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := c.AwaitRegistration(ctx, time.Millisecond); !errors.As(err, &failed) || failed.Outcome != OutcomePending ||
		!strings.Contains(err.Error(), failure) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a registration that never ends: %v", err)
	}
}

func TestDeregister(t *testing.T) {
	status := 0
	h := newHost(t, map[string]http.HandlerFunc{"DELETE /licensing/deregistration": func(w http.ResponseWriter, r *http.Request) {
		if status >= 400 {
			refuse(status, "why")(w, r)
			return
		}
		w.WriteHeader(status)
	}})
	c := h.client(t, nil)
	for _, k := range []struct {
		status int
		want   Deregistration
		err    error
	}{
		{204, Deregistered, nil},
		{202, DeregisteredLocally, nil},
		{400, NotRegistered, nil},
		{200, "", ErrBadAnswer},
		{403, "", ErrUnauthorized},
		{405, "", ErrBadRequest},
		{409, "", ErrConflict},
		{503, "", ErrUnavailable},
	} {
		status = k.status
		got, err := c.Deregister(t.Context())
		if got != k.want || !errors.Is(err, k.err) {
			t.Errorf("%d: %q, %v", k.status, got, err)
		}
	}
}

func TestNotices(t *testing.T) {
	var posted Notice
	h := newHost(t, map[string]http.HandlerFunc{
		"POST /system/notices": func(w http.ResponseWriter, r *http.Request) {
			if err := json.NewDecoder(r.Body).Decode(&posted); err != nil {
				t.Error(err)
			}
			io.WriteString(w, `{"id":"n-1"}`)
		},
		"GET /system/notices":        func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `[{"id":"n-1","label":"pause"}]`) },
		"DELETE /system/notices/n-1": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) },
	})
	c := h.client(t, nil)
	id, err := c.PostNotice(t.Context(), Notice{Level: "WARNING", Label: "pause", Content: "in 5 min", Enabled: true})
	if err != nil || id != "n-1" || posted.Label != "pause" || !posted.Enabled {
		t.Fatalf("%q, %v, posted %+v", id, err, posted)
	}
	if all, err := c.Notices(t.Context()); err != nil || len(all) != 1 || all[0].ID != id || all[0].Label != "pause" {
		t.Errorf("listed %+v, %v", all, err)
	}
	for _, id := range []string{"n-1", "n-2"} { // n-2 does not exist anymore
		if err := c.DeleteNotice(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	if err := c.DeleteNotice(t.Context(), "../users"); err == nil {
		t.Error("an id that leaves the path was sent")
	}
}

func TestIdentity(t *testing.T) {
	c, err := New(Config{URL: "https://cml.invalid", Username: "lull", HTTP: &http.Client{Transport: trip(func(r *http.Request) string {
		if r.URL.Path != "/api/v0/auth_extended" {
			return "{}"
		}
		return `{"id":"4d1f","username":"lull","admin":true,"token":"x","error":null}`
	})}})
	if err != nil {
		t.Fatal(err)
	}
	if id, err := c.Identity(t.Context()); err != nil || id != (Identity{ID: "4d1f", Username: "lull", Admin: true}) {
		t.Errorf("%+v, %v", id, err)
	}
}

// TestIdentityOfSession checks that Identity works for a session on a CML that
// has no auth_extended for one.
func TestIdentityOfSession(t *testing.T) {
	h := newHost(t, map[string]http.HandlerFunc{
		"POST /auth_extended": refuse(404, "Not Found"),
		"GET /authentication": say(`{"id":"4d1f","username":"lull","admin":false}`),
	})
	h.valid[""] = true // auth_extended is requested without a session
	if id, err := h.client(t, nil).Identity(t.Context()); err != nil || id != (Identity{ID: "4d1f", Username: "lull"}) {
		t.Errorf("%+v, %v", id, err)
	}
}

// trip is an HTTP transport that answers requests without a network.
type trip func(*http.Request) string

func (f trip) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(f(r))), Request: r}, nil
}

// FuzzAnswers gives any text to every call as its answer: each must end in a
// value or in an *Error, and none may panic.
func FuzzAnswers(f *testing.F) {
	for _, s := range []string{
		statsText, license("COMPLETED", "", "IN_COMPLIANCE"), `"token"`, `["l1","l2"]`, `{"opt_in":true}`,
		`{"id":"l1","state":"STARTED","node_count":3}`, `{"version":"2.9","ready":true}`, `{"code":1,"description":{"a":[1]}}`, `[]`, `null`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := New(Config{URL: "https://cml.invalid", HTTP: &http.Client{Transport: trip(func(r *http.Request) string {
			if strings.HasSuffix(r.URL.Path, "/authenticate") {
				return `"token"`
			}
			return text
		})}})
		if err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		check := func(err error) {
			var e *Error
			if err != nil && !errors.As(err, &e) {
				t.Errorf("an error of another kind: %v", err)
			}
		}
		stats, err := c.Stats(ctx)
		check(err)
		stats.RunningNodes()
		l, err := c.Licensing(ctx)
		check(err)
		l.Outcome()
		_, err = c.Information(ctx)
		check(err)
		_, err = c.OptedIn(ctx)
		check(err)
		_, err = c.Labs(ctx)
		check(err)
		_, err = c.Lab(ctx, "l1")
		check(err)
		_, err = c.LabState(ctx, "l1")
		check(err)
		_, err = c.Identity(ctx)
		check(err)
		_, err = c.PostNotice(ctx, Notice{})
		check(err)
		fault([]byte(text))
		validToken(text)
		if _, err := parsePin(text); err == nil && len(text) < 40 {
			t.Errorf("a pin of %d bytes was taken", len(text))
		}
	})
}
