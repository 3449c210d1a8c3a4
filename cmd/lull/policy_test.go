package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestNothingMatchesIsSaid checks that a verb says on standard error that a listing
// is empty, and prints an empty array in JSON.
func TestNothingMatchesIsSaid(t *testing.T) {
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"items":[]}`)
	}))
	defer web.Close()
	for _, args := range []string{"worker ls --region us-est-1", "audit --action paused"} {
		for _, asJSON := range []bool{false, true} {
			var out, says strings.Builder
			given := strings.Fields(args)
			if asJSON {
				given = append(given, "--json")
			}
			env := map[string]string{"LULL_SERVER": web.URL, "LULL_TOKEN": "t"}
			if code := run(t.Context(), given, strings.NewReader(""), &out, &says, func(k string) string { return env[k] }); code != 0 {
				t.Fatalf("%s: %d %s", args, code, says.String())
			}
			if said := strings.HasPrefix(says.String(), "no "); said == asJSON || asJSON && strings.TrimSpace(out.String()) != "[]" {
				t.Errorf("%v: %q, and on standard error %q", given, out.String(), says.String())
			}
		}
	}
}

// TestWorkersThatSoundAlike checks that the error for an unknown worker suggests
// similar names.
func TestWorkersThatSoundAlike(t *testing.T) {
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case !strings.HasSuffix(r.URL.Path, "/workers"):
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"title":"Not Found","status":404,"detail":"cannot find worker \"x\""}`)
		case r.URL.Query().Get("name") != "":
			_, _ = io.WriteString(w, `{"items":[]}`)
		default:
			_, _ = io.WriteString(w, `{"items":[{"id":"w-1","name":"cml-1"},{"id":"w-2","name":"build-box"}]}`)
		}
	}))
	defer web.Close()
	env := map[string]string{"LULL_SERVER": web.URL, "LULL_TOKEN": "t"}
	for ref, want := range map[string]string{"cml1": "did you mean cml-1?", "CML_1": "did you mean cml-1?", "buildbos": "did you mean build-box?", "zzz": ""} {
		var out, says strings.Builder
		code := run(t.Context(), []string{"worker", "get", ref}, strings.NewReader(""), &out, &says, func(k string) string { return env[k] })
		if code != 3 || !strings.Contains(says.String(), want) || want == "" && strings.Contains(says.String(), "mean") {
			t.Errorf("%s: %d %s", ref, code, says.String())
		}
	}
}
