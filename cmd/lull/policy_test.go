package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/protocol/control"
)

// TestWarningsThatCount: how much of a warning's length counts is said where it
// is less than was asked for, beside the timeout and beside a schedule's grace.
func TestWarningsThatCount(t *testing.T) {
	for asked, want := range map[time.Duration]string{
		3 * time.Minute:                "3m, of which 2m30s counts: at most half of the timeout",
		150 * time.Second:              "2m30s",
		2 * time.Minute:                "2m",
		0:                              "0s",
		5*time.Minute + 30*time.Second: "5m30s, of which 2m30s counts: at most half of the timeout",
	} {
		if got := warningText(asked, 5*time.Minute, "timeout"); got != want {
			t.Errorf("%s before a pause after 5m: %q, want %q", asked, got, want)
		}
	}
	p := control.WorkerPolicy{Resolved: policy.Resolved{Timeout: idle.Duration(time.Hour), WarnBefore: idle.Duration(5 * time.Minute), Standing: &policy.Standing{Schedule: "office", Grace: 6}}}
	var out strings.Builder
	resolvedText(&out, p)
	if want := "Warning before in closed hours: 5m, of which 3m counts: at most half of the grace."; !strings.Contains(out.String(), want) {
		t.Errorf("without %q:\n%s", want, out.String())
	}
	p.Standing.Grace = 15
	out.Reset()
	resolvedText(&out, p)
	if strings.Contains(out.String(), "which") {
		t.Errorf("all of the warning counts:\n%s", out.String())
	}
}

// TestVerbsThatSoundAlike: a verb that does not exist names those of its
// command that are near.
func TestVerbsThatSoundAlike(t *testing.T) {
	cmd := (&cli{}).policyCommand()
	cmd.SetArgs([]string{"resolv"})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), "did you mean resolve?") {
		t.Errorf("got %v", err)
	}
	cmd.SetArgs([]string{"qqqqqqqq"})
	if err := cmd.Execute(); err == nil || strings.Contains(err.Error(), "did you mean") {
		t.Errorf("of what is like nothing: %v", err)
	}
}

// TestNothingMatchesIsSaid checks that an empty listing says so on standard
// error, and is an empty array in JSON.
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

// TestWorkersThatSoundAlike: a name that is not found is answered with those
// that are near it.
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
