package server_test

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/store/mem"
)

// TestRemovalTakesWhatIsNamed checks that a removal takes exactly what was named from
// workers and groups, and that the audit log lists what they lost.
func TestRemovalTakesWhatIsNamed(t *testing.T) {
	api, token, w, _ := recordedWorker(t)
	b := &bench{t: t, url: api}
	put := func(path, body string, want int) string {
		t.Helper()
		method := "POST"
		if !strings.HasSuffix(path, "/apply") {
			method = "PUT"
		}
		res, data := b.ask(method, "/api/v1"+path, token, []byte(body))
		if res.StatusCode != want {
			t.Fatalf("%s %s: %d %s", path, body, res.StatusCode, data)
		}
		return string(data)
	}
	put("/schedules/office", officeHours, http.StatusOK)
	put("/schedules/night", officeHours, http.StatusOK)
	one, all := `"worker_ids":["`+w.ID+`"]`, `"aws_region":"us-east-1"`
	for _, c := range []struct{ kind, there, other, at, whom, of string }{
		{"policy", "research", "aggressive", "/policies/", one, "worker w"},
		{"policy", "research", "aggressive", "/policies/", all, "all in us-east-1"},
		{"schedule", "office", "night", "/schedules/", one, "worker w"},
		{"schedule", "office", "night", "/schedules/", all, "all in us-east-1"},
	} {
		remove := func(name string, want int) string {
			t.Helper()
			return put(c.at+name+"/apply", `{`+c.whom+`,"remove":true}`, want)
		}
		if says := remove(c.other, http.StatusConflict); !strings.Contains(says, c.of) || strings.Contains(says, c.there) {
			t.Errorf("nothing is there, and it says %s", says)
		}
		put(c.at+c.there+"/apply", `{`+c.whom+`}`, http.StatusOK)
		if says := remove(c.other, http.StatusConflict); !strings.Contains(says, c.of+" has the "+c.kind+" "+c.there) {
			t.Errorf("another is there, and it says %s", says)
		}
		remove(c.there, http.StatusOK)
		want := c.kind + " " + c.there + " taken away"
		if c.whom == all {
			want += " from " + c.of
		}
		if _, data := b.ask("GET", "/api/v1/audit?limit=100", token, nil); !strings.Contains(string(data), `"detail":"`+want+`"`) {
			t.Errorf("recorded as %s, want %s", data, want)
		}
	}
	put("/policies/research/apply", `{`+all+`}`, http.StatusOK)
	_, data := b.ask("GET", "/api/v1/policy-groups", token, nil)
	for _, g := range decode[control.List[struct{ ID string }]](t, data).Items {
		b.ask("DELETE", "/api/v1/policy-groups/"+url.PathEscape(g.ID), token, nil)
	}
	_, data = b.ask("GET", "/api/v1/audit?action=policy_unapplied", token, nil)
	if !strings.Contains(string(data), "research") || !strings.Contains(string(data), "us-east-1") {
		t.Errorf("a group that is removed is recorded as %s", data)
	}
}

// TestSimulationNamesWhatIsNotRecorded checks that a simulation reports the time
// before the first record as missing, says if no worker matches, and does not count a
// pause that began before the period.
func TestSimulationNamesWhatIsNotRecorded(t *testing.T) {
	api, token, _, begun := recordedWorker(t)
	b := &bench{t: t, url: api}
	ask := func(from time.Time, more string) control.Simulation {
		t.Helper()
		res, data := b.ask("POST", "/api/v1/simulate", token, []byte(`{"policies":[{"name":"aggressive"}],"from":"`+from.Format(time.RFC3339)+`"`+more+`}`))
		if res.StatusCode != http.StatusOK {
			t.Fatalf("%d %s", res.StatusCode, data)
		}
		return decode[control.Simulation](t, data)
	}
	from := begun.Add(-7 * 24 * time.Hour)
	r := ask(from, "")
	if m := r.Missing; len(m) == 0 || !m[0].From.Equal(from) || m[0].To.Sub(begun).Abs() > 10*time.Minute || m[0].Why != "no check is recorded" {
		t.Errorf("of a week with a day's records: %+v", m)
	}
	if m := ask(from, `,"aws_region":"us-west-9"`).Missing; len(m) == 0 || !m[0].From.Equal(from) || time.Since(m[0].To) > time.Hour || m[0].Why != "no worker matches" {
		t.Errorf("of no worker: %+v", m)
	}
	if m := ask(from, `,"of":"agents"`).Missing; len(m) == 0 || !strings.Contains(m[0].Why, "agent") {
		t.Errorf("of no agent: %+v", m)
	}
	stops := r.Policies[0].Stops
	if len(stops) == 0 {
		t.Fatal("nothing would have been stopped")
	}
	last := stops[0]
	for _, x := range stops {
		if x.From.After(last.From) {
			last = x
		}
	}
	if o := ask(last.From.Add(10*time.Minute).Truncate(time.Second), "").Policies[0]; o.Pauses != 0 || len(o.Stops) != 0 || o.AvoidedHours == 0 {
		t.Errorf("of a window within a pause: %+v", o)
	}
}

// looked is a Live that has just checked every worker.
type looked struct {
	server.Live
	st worker.IdleStatus
}

func (l looked) Observation(context.Context, string) (control.Observation, bool) {
	st := l.st
	return control.Observation{Status: &st}, true
}

func (l looked) Verdicts(context.Context) map[string]worker.IdleStatus { return nil }

// TestLastCheckIsTheNewestKnown checks that readings of the owner that are newer than
// the record's are shown, and the record's if the owner's are unknown.
func TestLastCheckIsTheNewestKnown(t *testing.T) {
	now := time.Now().UTC().Truncate(time.Second)
	for name, c := range map[string]struct {
		st    worker.IdleStatus
		shown bool
	}{
		"read":     {worker.IdleStatus{CheckedAt: now}, true},
		"unknown":  {worker.IdleStatus{CheckedAt: now, Verdict: idle.Verdict{Blocks: []idle.Block{{Code: idle.SignalUnknown}}}}, false},
		"not read": {worker.IdleStatus{CheckedAt: now, ReadingsUnknown: true}, false},
	} {
		db := mem.New(mem.Options{}).Client()
		t.Cleanup(db.Close)
		b := newBenchWith(t, db, func(o *server.Options) { o.Live = looked{st: c.st} })
		_, data := b.ask("GET", "/api/v1/workers/"+b.worker()+"/activity", b.admin, nil)
		at := decode[worker.Activity](t, data).LastActivityCheckAt
		if shown := at != nil && at.Equal(now); shown != c.shown {
			t.Errorf("%s: last checked is shown as %v: %s", name, at, data)
		}
	}
}
