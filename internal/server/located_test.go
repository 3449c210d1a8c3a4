package server_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
)

// TestNullClears checks that null clears a field, and is rejected for a field
// that a worker needs.
func TestNullClears(t *testing.T) {
	b := newBench(t, memory(t))
	at := "/api/v1/workers/" + b.worker()
	patch := func(body string) (*http.Response, []byte) { return b.ask("PATCH", at, b.admin, []byte(body)) }
	res, data := patch(`{"ttl_deadline":"2031-01-02T03:04:05Z","idle_timeout_minutes":7,"snooze_minutes":0,"owner":"ada","tags":{"team":"net"},"contacts":["ada@example.com"],"policy":"balanced"}`)
	w := decode[worker.Worker](t, data)
	if res.StatusCode != http.StatusOK || w.TTLDeadline == nil || w.IdleTimeoutMinutes == nil || w.SnoozeMinutes == nil {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	if _, data = patch(`{"ttl_action":"stop"}`); decode[worker.Worker](t, data).TTLDeadline == nil {
		t.Error("what is absent is taken away")
	}
	_, data = patch(`{"ttl_deadline":null,"idle_timeout_minutes":null,"snooze_minutes":null,"owner":null,"tags":null,"contacts":null,"policy":null}`)
	w = decode[worker.Worker](t, data)
	if w.TTLDeadline != nil || w.IdleTimeoutMinutes != nil || w.SnoozeMinutes != nil || w.Owner != "" || len(w.Tags) != 0 || len(w.Contacts) != 0 || w.Policy != "" {
		t.Errorf("after null: %s", data)
	}
	for _, field := range []string{"name", "is_idle_detection_enabled", "pause_holder", "tls_insecure"} {
		res, data := patch(`{"` + field + `":null}`)
		b.problem(field, res, data, 422)
		if !strings.Contains(string(data), `"location":"body.`+field+`"`) {
			t.Errorf("%s: %s", field, data)
		}
	}
	end := time.Now().Add(time.Hour)
	if _, err := b.fleet.Change(t.Context(), w.ID, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, _ *worker.Tx) error {
		w.TTLDeadline, w.TTLFromTag = &end, true
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	res, data = patch(`{"ttl_deadline":null}`)
	if p := b.problem("a deadline of a tag", res, data, 409); !strings.Contains(p.Detail, "lull:ttl-deadline") {
		t.Errorf("%s", data)
	}
}

// TestFaultsNameTheirField checks that the answer to every kind of invalid call
// says where the fault is.
func TestFaultsNameTheirField(t *testing.T) {
	b := newBench(t, memory(t))
	at := "/api/v1/workers/" + b.worker()
	for _, c := range []struct{ method, path, body, where, says string }{
		{"PUT", "/api/v1/schedules/s", `{"zone":"UTC","windows":[{"days":"mon-fri","from":"8:00","to":"18:00"},{"days":"mon-fro","from":"8:00","to":"18:00"}]}`, "body.windows[1].days", "want some such as mon-fri"},
		{"PUT", "/api/v1/schedules/s", `{"zone":"UTC","windows":[{"days":"mon","from":"8:00","to":"25:00"}]}`, "body.windows[0].to", "want a time of day"},
		{"PATCH", at, `{"idle_timeout_minutes":1e30}`, "body.idle_timeout_minutes", ""},
		{"PATCH", at, `{"ttl_deadline":"tomorrow"}`, "body.ttl_deadline", ""},
		{"PATCH", at, `{"colour":1}`, "body.colour", ""},
		{"POST", at + "/snooze", `{"until":"soon"}`, "body.until", "cannot read time"},
		{"POST", "/api/v1/halt", `{"on":true,"until":"2001-01-01"}`, "body.until", "in the past"},
		{"POST", "/api/v1/halt", `{"on":false,"until":"18:00"}`, "body.until", "only a halt has an end"},
		{"GET", at + "/why?at=2150-01-01", ``, "query.at", "in the past"},
		{"GET", "/api/v1/savings?time_zone=Moon", ``, "query.time_zone", "want a time zone"},
		{"GET", "/api/v1/audit?from=whenever", ``, "query.from", "cannot read"},
		{"GET", "/api/v1/workers?limit=0", ``, "query.limit", ""},
	} {
		res, data := b.ask(c.method, c.path, b.admin, []byte(c.body))
		b.problem(c.body+c.path, res, data, 422)
		var p struct {
			Errors []struct{ Location, Message string }
		}
		if err := json.Unmarshal(data, &p); err != nil || len(p.Errors) == 0 || p.Errors[0].Location != c.where || !strings.Contains(p.Errors[0].Message, c.says) {
			t.Errorf("%s %s %s: %s", c.method, c.path, c.body, data)
		}
	}
	res, data := b.ask("PATCH", at, b.admin, []byte(`{}`), "If-Match", "x")
	if b.problem("If-Match", res, data, 422); !strings.Contains(string(data), `"location":"header.If-Match"`) {
		t.Errorf("%s", data)
	}
}
