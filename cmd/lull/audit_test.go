package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"lull/internal/fleet/audit"
	"lull/internal/protocol/control"
)

// TestAuditIsFiltered checks that the flags of lull audit reach the server, for a
// listing and for an export, and that a worker's name is resolved.
func TestAuditIsFiltered(t *testing.T) {
	var path string
	var asked url.Values
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/workers") {
			_, _ = io.WriteString(w, `{"id":"w-1","name":"cml-1"}`) // the client will report an error
			return
		}
		path, asked = r.URL.Path, r.URL.Query()
		_ = json.NewEncoder(w).Encode(control.List[audit.Entry]{})
	})
	for _, verb := range []string{"audit", "audit export"} {
		args := append(strings.Fields(verb), "--by", "Ada", "--kind", "person", "--action", "stopped", "--worker", "cml-1")
		if _, errs, code := lullWith(env, args...); code != 0 {
			t.Fatalf("%s: %s", verb, errs)
		}
		for name, want := range map[string]string{"by": "Ada", "kind": "person", "action": "stopped", "worker_id": "w-1", "from": "", "to": ""} {
			if got := asked.Get(name); got != want {
				t.Errorf("%s asks for %s=%q, want %q", verb, name, got, want)
			}
		}
	}
	if want := "/api/v1/audit/export"; path != want || asked.Get("format") != "jsonl" {
		t.Errorf("an export asks %s for %q", path, asked.Get("format"))
	}
	if _, errs, code := lullWith(env, "audit", "export", "--csv", "--from", "2026-01-02T03:04:05Z", "--to", "2026-02-02T03:04:05Z"); code != 0 ||
		asked.Get("format") != "csv" || asked.Get("from") != "2026-01-02T03:04:05Z" || asked.Get("to") != "2026-02-02T03:04:05Z" || asked.Has("worker_id") {
		t.Errorf("a table: %d %s, asked %v", code, errs, asked)
	}
}
