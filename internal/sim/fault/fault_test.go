package fault

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

func TestPick(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	call := Call{Service: "ec2", Action: "StopInstances", Region: "us-east-1", Targets: []string{"i-1", "cml-1"}}
	for _, x := range []struct {
		name    string
		rule    Rule
		strikes bool
	}{
		{"everything", Rule{}, true},
		{"service", Rule{Service: "cml"}, false},
		{"pattern", Rule{Action: "Stop*"}, true},
		{"other pattern", Rule{Action: "Start*"}, false},
		{"target by name", Rule{Target: "cml-*"}, true},
		{"other target", Rule{Target: "i-2"}, false},
		{"region", Rule{Region: "eu-*"}, false},
		{"not yet", Rule{From: at.Add(time.Second)}, false},
		{"no more", Rule{Until: at}, false},
		{"now", Rule{From: at, Until: at.Add(1)}, true},
	} {
		s := NewSet(1)
		x.rule.Kind, x.rule.Code = Error, "X"
		errtest.Get(s.Add(x.rule))(t)
		if got := s.Pick(at, call).Rule.Kind == Error; got != x.strikes {
			t.Errorf("%s: strikes %v", x.name, got)
		}
	}
}

func TestCountProbabilityAndDelays(t *testing.T) {
	s := NewSet(1)
	mustAdd(t, s, Rule{ID: "twice", Kind: Lose, Count: 2})
	mustAdd(t, s, Rule{ID: "slow", Kind: Delay, Delay: time.Second})
	mustAdd(t, s, Rule{ID: "slower", Kind: Delay, Delay: time.Minute, Probability: 0.5})
	slow := 0
	for k := range 1000 {
		e := s.Pick(time.Now(), Call{})
		if (e.Rule.ID == "twice") != (k < 2) {
			t.Fatalf("call %d met %q", k, e.Rule.ID)
		}
		if e.Delay > time.Second {
			slow++
		}
	}
	if slow < 400 || slow > 600 || s.Hits()["slow"] != 1000 || len(s.Rules()) != 2 {
		t.Errorf("%d slow, hits %v, rules %v", slow, s.Hits(), s.Rules())
	}
	if !s.Remove("slow") || s.Remove("slow") {
		t.Error("Remove")
	}
}

func mustAdd(t *testing.T, s *Set, r Rule) {
	t.Helper()
	errtest.Get(s.Add(r))(t)
}

func TestValidate(t *testing.T) {
	for _, r := range []Rule{
		{}, {Kind: "explode"}, {Kind: Error}, {Kind: Delay}, {Kind: Lose, Probability: 2}, {Kind: Lose, Count: -1},
		{Kind: Error, Status: 200}, {Kind: Lose, Action: "[a"},
	} {
		if _, err := NewSet(1).Add(r); err == nil || !strings.HasPrefix(err.Error(), "cannot use fault rule") {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

// TestServe checks how a client sees each kind of fault.
func TestServe(t *testing.T) {
	for _, x := range []struct {
		rule              Rule
		status, length    int
		works, breaks, ok bool
	}{
		{rule: Rule{}, status: 200, length: 100, works: true, ok: true},
		{rule: Rule{Kind: Error, Status: 503}, status: 503},
		{rule: Rule{Kind: Lose}, works: true, breaks: true},
		{rule: Rule{Kind: Refuse}, breaks: true},
		{rule: Rule{Kind: Truncate, Bytes: 40}, status: 200, length: 40, works: true, breaks: true},
		{rule: Rule{Kind: Malform, Bytes: 10}, status: 200, length: 100, works: true},
	} {
		var worked atomic.Int32
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			Effect{Rule: x.rule}.Serve(w, r, func(w http.ResponseWriter, r Rule) { w.WriteHeader(r.Status) }, func(w http.ResponseWriter) {
				worked.Add(1)
				_, _ = io.WriteString(w, strings.Repeat("[1,2]", 20))
			})
		}))
		status, body := 0, []byte(nil)
		resp, err := srv.Client().Get(srv.URL)
		if err == nil {
			status = resp.StatusCode
			body, err = io.ReadAll(resp.Body)
			_ = resp.Body.Close()
		}
		srv.Close()
		good := string(body) == strings.Repeat("[1,2]", 20)
		if (err != nil) != x.breaks || status != x.status || len(body) != x.length || good != x.ok || (worked.Load() > 0) != x.works {
			t.Errorf("%s: status %d, %d bytes, error %v, worked %d", x.rule.Kind, status, len(body), err, worked.Load())
		}
	}
}
