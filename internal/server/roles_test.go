package server_test

import (
	"testing"

	"lull/internal/server/access"
)

// TestRoles checks the roles in the table of routes: operators act on workers; admins
// decide which workers exist and which rules apply.
func TestRoles(t *testing.T) {
	b := newBench(t, memory(t))
	_, ops, _ := b.document()
	role := map[string]string{}
	for _, op := range ops {
		role[op.plain()] = op.Role
	}
	for want, ids := range map[string][]string{
		"admin": {"terminate-worker", "create-worker", "import-worker", "arm-worker", "arm-workers", "scale-up", "forget-worker", "new-wake-token", "put-template", "delete-template",
			"put-policy", "delete-policy", "apply-policy", "delete-policy-group", "put-schedule", "apply-schedule", "change-settings", "create-token", "revoke-token", "list-tokens", "refresh-prices"},
		"operator": {"pause-worker", "resume-worker", "start-worker", "stop-worker", "snooze-worker", "drain-worker", "cancel-drain-worker", "disarm-worker", "halt", "update-worker", "retry-worker",
			"pause-instance", "resume-instance", "start-instance", "stop-instance", "snooze-instance", "instance-logs"},
	} {
		for _, id := range ids {
			if role[id] != want {
				t.Errorf("%s needs %q, want %s", id, role[id], want)
			}
		}
	}
	operator, path := b.token(access.Operator, ""), "/api/v1/workers/"+b.worker()
	patch := func(token, body string, want int) {
		t.Helper()
		if res, data := b.ask("PATCH", path, token, []byte(body)); res.StatusCode != want {
			t.Errorf("%s: %d %s, want %d", body, res.StatusCode, data, want)
		}
	}
	patch(operator, `{"owner":"ada","idle_timeout_minutes":30,"ttl_deadline":"2099-01-01T00:00:00Z"}`, 200)
	for _, body := range []string{`{"ttl_action":"terminate"}`, `{"accepted_risks":["spot"]}`, `{"cml_password":"env:X"}`, `{"tls_insecure":true}`, `{"policy":"balanced"}`,
		`{"owner":"ada","activity_sources":["cml"]}`, `{"pause_holder":"agent"}`, `{"schedule":null}`} {
		patch(operator, body, 403)
	}
	patch(b.admin, `{"ttl_action":"terminate"}`, 200)
	patch(operator, `{"ttl_deadline":"2099-01-01T00:00:00Z"}`, 403)
}

// TestTerminateIsConfirmed checks that a termination is rejected unless the request
// repeats the worker's name.
func TestTerminateIsConfirmed(t *testing.T) {
	b := newBench(t, memory(t))
	id := b.worker()
	for body, want := range map[string]int{``: 422, `{}`: 422, `{"confirm":""}`: 422, `{"confirm":"other"}`: 422, `{"confirm":"` + id + `"}`: 422, `{"confirm":"w","force":true}`: 422} {
		before := b.revision()
		if res, data := b.ask("POST", "/api/v1/workers/"+id+"/terminate", b.admin, []byte(body)); res.StatusCode != want || b.revision() != before {
			t.Errorf("%s: %d %s", body, res.StatusCode, data)
		}
	}
	if res, data := b.ask("POST", "/api/v1/workers/"+id+"/terminate", b.admin, []byte(`{"confirm":"w"}`)); res.StatusCode != 202 {
		t.Errorf("confirmed: %d %s", res.StatusCode, data)
	}
}
