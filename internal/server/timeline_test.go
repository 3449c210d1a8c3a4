package server_test

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// kept is evidence in memory.
type kept struct {
	records []evidence.Record
	missing []evidence.Missing
}

func (k *kept) Read(_ context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	for _, r := range k.records {
		if q.Object == "" || r.Object == q.Object {
			if err := yield(r); err != nil {
				return nil, err
			}
		}
	}
	return k.missing, nil
}

// recordedWorker serves an imported worker with a day of checks, one every five
// minutes: first in use, then quiet, then unknown for an hour, then an hour without
// checks.
func recordedWorker(t *testing.T) (api string, token string, w worker.Worker, begun time.Time) {
	t.Helper()
	db := mem.New(mem.Options{}).Client()
	t.Cleanup(db.Close)
	f, err := fleet.New(fleet.Options{Store: db, ID: "test"})
	if err != nil {
		t.Fatal(err)
	}
	w, err = f.ImportWorker(t.Context(), audit.Actor{Name: "p", Kind: audit.KindUser}, fleet.ImportedWorker{Name: "w", AWSRegion: "us-east-1", EC2InstanceID: "i-00000000000000001",
		Profile: worker.Profile{Tags: map[string]string{"team": "net"}}})
	if err != nil {
		t.Fatal(err)
	}
	begun = time.Now().UTC().Add(-24 * time.Hour).Truncate(time.Second)
	ops, err := audit.Ops(audit.Entry{At: begun, Action: "status_changed", By: audit.ByController, WorkerID: w.ID, From: power.WorkerStarting, To: power.WorkerRunning})
	if err != nil {
		t.Fatal(err)
	}
	errtest.Get(db.Commit(t.Context(), store.Txn{Then: ops}))(t)
	k := &kept{missing: []evidence.Missing{{From: begun.Add(-time.Hour), To: begun, Server: "two", Why: "cannot ask the server"}}}
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	p := idle.Policy{Name: "global", Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(5 * time.Minute), Detection: true, AutoPause: true, Action: "stop"}
	active := begun
	for m := 0; m < 24*60-5; m += 5 {
		at := begun.Add(time.Duration(m) * time.Minute)
		r := idle.Judge("cloudwatch", float64(m%60)/20, 5, "%", 5*time.Minute, at)
		switch h := m / 60; {
		case h < 8:
			r = idle.Judge("cloudwatch", 60, 5, "%", 5*time.Minute, at)
			active = at
		case h == 10:
			r = idle.NotKnown("cloudwatch", at, "throttled")
		case h == 14:
			continue
		}
		e := idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: active, CreatedAt: begun.Add(-time.Hour), Readings: []idle.Reading{r}}
		if m/60 == 12 {
			e.Leases = []idle.Lease{{Holder: "ci", Reason: "nightly", ExpiresAt: begun.Add(13 * time.Hour)}}
		}
		d := evidence.Decide(at, p, e)
		k.records = append(k.records, rec.Take(evidence.Record{At: d.Verdict.At, Object: w.ID, Next: at.Add(5 * time.Minute), Decision: d})...)
	}
	k.records = append(k.records, rec.Flush()...)
	tokens := access.New(db)
	token, err = tokens.First(t.Context())
	errtest.None(t, err)
	s, err := server.New(server.Options{Fleet: f, Tokens: tokens, Version: "test", Evidence: k})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	web := httptest.NewServer(s.Handler())
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		web.CloseClientConnections()
		web.Close()
	})
	select {
	case <-s.Ready():
	case <-time.After(2 * time.Minute):
		t.Fatal("the server does not get ready")
	}
	return web.URL, token, w, begun
}

func get[T any](t *testing.T, api, token, path string) T {
	t.Helper()
	b := &bench{t: t, url: api}
	res, data := b.ask("GET", path, token, nil)
	if res.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d %s", path, res.StatusCode, data)
	}
	return decode[T](t, data)
}

func TestTimeline(t *testing.T) {
	api, token, w, begun := recordedWorker(t)
	q := url.Values{"from": {begun.Format(time.RFC3339)}, "points": {"100"}}
	l := get[control.Timeline](t, api, token, "/api/v1/workers/"+w.ID+"/timeline?"+q.Encode())
	if len(l.Signals) != 1 || l.Signals[0].Unit != "%" || l.Signals[0].Threshold != 5 || len(l.Signals[0].Points) < 10 || len(l.Signals[0].Points) > 200 {
		t.Fatalf("signals: %+v", l.Signals)
	}
	states := map[idle.State]time.Duration{}
	for i, p := range l.Signals[0].Points {
		states[p.State] += p.Until.Sub(p.At)
		if i > 0 && p.At.Before(l.Signals[0].Points[i-1].Until) || (p.State == idle.Unknown) != (p.Value == nil) {
			t.Errorf("point %d: %+v", i, p)
		}
	}
	near := func(what string, got, want time.Duration) {
		if (got - want).Abs() > 20*time.Minute {
			t.Errorf("%s for %s, want about %s", what, got, want)
		}
	}
	near("active", states[idle.Active], 8*time.Hour)
	near("unknown", states[idle.Unknown], time.Hour)
	near("quiet", states[idle.Quiet], 14*time.Hour)
	held := time.Duration(0)
	for _, v := range l.Verdicts {
		if slices.Contains(v.Blocks, idle.LeaseHeld) {
			held += v.To.Sub(v.From)
		}
	}
	near("a lease was held", held, time.Hour)
	gap := time.Duration(0)
	for _, m := range l.Missing {
		gap += m.To.Sub(m.From)
	}
	near("missing", gap, time.Hour)
	if len(l.Changes) == 0 || l.Changes[0].To != "RUNNING" {
		t.Errorf("changes: %+v", l.Changes)
	}
	for i, p := range l.Power {
		if !p.From.Before(p.To) || i > 0 && !p.From.Equal(l.Power[i-1].To) || p.From.Before(l.From) || p.To.After(l.To) {
			t.Errorf("power %d of %+v", i, l.Power)
		}
	}
	// A point that covers the hour without checks is not shown as quiet.
	for points := 10; points < 20; points++ {
		q.Set("points", strconv.Itoa(points))
		coarse := get[control.Timeline](t, api, token, "/api/v1/workers/"+w.ID+"/timeline?"+q.Encode())
		for _, m := range coarse.Missing {
			for _, p := range coarse.Signals[0].Points {
				if p.At.Before(m.To) && m.From.Before(p.Until) && p.State != idle.Unknown {
					t.Errorf("%d points: %s from %s to %s, and nothing is recorded from %s to %s", points, p.State, p.At, p.Until, m.From, m.To)
				}
			}
		}
	}
	b := &bench{t: t, url: api}
	for _, bad := range []string{"from=2026-01-01T00:00:00Z&to=2025-01-01T00:00:00Z", "from=2020-01-01T00:00:00Z", "points=1", "from=yesterday"} {
		res, data := b.ask("GET", "/api/v1/workers/"+w.ID+"/timeline?"+bad, token, nil)
		b.problem(bad, res, data, 422)
	}
}

func TestWhyThen(t *testing.T) {
	api, token, w, begun := recordedWorker(t)
	ask := func(at time.Time) control.Why {
		return get[control.Why](t, api, token, "/api/v1/workers/"+w.ID+"/why?"+url.Values{"at": {at.Format(time.RFC3339)}}.Encode())
	}
	b := &bench{t: t, url: api}
	if res, data := b.ask("POST", "/api/v1/policies/conservative/apply", token, []byte(`{"tags":{"team":"net"}}`)); res.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	if now := get[control.Why](t, api, token, "/api/v1/workers/"+w.ID+"/why"); now.Policy == nil || now.Policy.Name != "conservative" || now.PolicyThen != nil {
		t.Errorf("now it is judged by %+v, then by %+v", now.Policy, now.PolicyThen)
	}
	y := ask(begun.Add(12*time.Hour + 17*time.Minute))
	if y.Verdict == nil || !y.Verdict.Has(idle.LeaseHeld) || len(y.Leases) != 1 || y.Leases[0].Holder != "ci" || y.Checked == nil {
		t.Errorf("with a lease: %+v", y.Account)
	}
	if y.Policy != nil || y.PolicyThen == nil || y.PolicyThen.Name != "global" {
		t.Errorf("it was judged by %+v, and now by %+v", y.PolicyThen, y.Policy)
	}
	if len(y.Signals) != 1 || y.Signals[0].Value == nil || y.Signals[0].Age == nil || y.Signals[0].Threshold != 5 || y.Signals[0].Unit != "%" {
		t.Errorf("signals: %+v", y.Signals)
	}
	if len(y.Missing) != 1 || y.Missing[0].Server != "two" {
		t.Errorf("missing: %+v", y.Missing)
	}
	if y = ask(begun.Add(10*time.Hour + 31*time.Minute)); y.Verdict == nil || !y.Verdict.Has(idle.SignalUnknown) || y.Signals[0].Value != nil {
		t.Errorf("with an unknown signal: %+v", y.Account)
	}
	if y = ask(begun.Add(14*time.Hour + 30*time.Minute)); y.Verdict != nil || y.Checked == nil || y.Readings != "unknown" || y.IdleStatus.Eligible || y.PolicyThen != nil || y.Policy != nil {
		t.Errorf("in a gap: %+v", y)
	}
	if y = ask(begun.Add(-time.Hour)); y.Verdict != nil || y.Checked != nil {
		t.Errorf("before everything: %+v", y.Account)
	}
	res, data := b.ask("GET", "/api/v1/workers/"+w.ID+"/why?at="+time.Now().Add(time.Hour).UTC().Format(time.RFC3339), token, nil)
	if p := b.problem("in the future", res, data, 422); !strings.Contains(p.Detail, "at") {
		t.Errorf("in the future: %s", p.Detail)
	}
}

// TestSimulateAndSavings checks a simulation of policies over a recorded day, and the
// savings and idle hours of that day. Without a known price no money is reported.
func TestSimulateAndSavings(t *testing.T) {
	api, token, _, begun := recordedWorker(t)
	b := &bench{t: t, url: api}
	body := `{"policies":[{"name":"aggressive"},{"name":"research"},{"name":"never","timeout_minutes":5000}],"from":"` + begun.Format(time.RFC3339) + `"}`
	res, data := b.ask("POST", "/api/v1/simulate", token, []byte(body))
	if res.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	r := decode[control.Simulation](t, data)
	if len(r.Policies) != 3 || r.Recommended != "aggressive" {
		t.Fatalf("got %+v", r)
	}
	hasty, slow, never := r.Policies[0], r.Policies[1], r.Policies[2]
	if hasty.Pauses == 0 || hasty.FalseStops != 0 || hasty.AvoidedHours <= slow.AvoidedHours || slow.AvoidedHours < 8 || never.Pauses != 0 || never.AvoidedHours != 0 {
		t.Errorf("aggressive %+v, research %+v, never %+v", hasty.Sum, slow.Sum, never.Sum)
	}
	if hasty.ComputeSaved != nil || hasty.Sum.Saved != nil || hasty.UnpricedHours != hasty.AvoidedHours || hasty.UnknownHours < 0.5 {
		t.Errorf("money or knowledge was made up: %+v", hasty)
	}
	if len(r.Workers) != 1 {
		t.Errorf("names of workers: %v", r.Workers)
	}
	res, data = b.ask("POST", "/api/v1/simulate/progress", token, []byte(body))
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	share := 0.0
	for i, line := range lines {
		step := decode[control.SimulateStep](t, []byte(line))
		if step.Share < share || (step.Simulation != nil) != (i == len(lines)-1) || step.Fault != "" {
			t.Errorf("step %d of %d: %s", i, len(lines), line)
		}
		share = step.Share
	}
	if res.StatusCode != http.StatusOK || len(lines) < 2 || share != 1 {
		t.Errorf("told: %d, %d steps up to %v", res.StatusCode, len(lines), share)
	}
	for _, path := range []string{"/api/v1/simulate", "/api/v1/simulate/progress"} {
		for _, bad := range []string{`"name":"no-such"`, `"name":"x","policy":"no-such","timeout_minutes":5`, `"name":"balanced","schedule":"no-such"`, `"name":"balanced","activity_sources":["ears"]`} {
			res, data = b.ask("POST", path, token, []byte(`{"policies":[{`+bad+`}]}`))
			b.problem(bad, res, data, 422)
		}
	}
	res, data = b.ask("POST", "/api/v1/simulate", token, []byte(`{"from":"`+begun.Format(time.RFC3339)+`"}`))
	if res.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	if all := decode[control.Simulation](t, data); len(all.Policies) < 3 || all.Recommended == "" {
		t.Errorf("of no policy: %d, and %q is recommended", len(all.Policies), all.Recommended)
	}
	// Settings of a simulated policy other than its timeout.
	closes := begun.Add(16*time.Hour + 30*time.Minute).Truncate(time.Minute) // quiet at that time, whatever the current hour
	if closes.Format("15:04") == "00:00" {
		closes = closes.Add(time.Minute) // a window must end on the day on which it begins
	}
	res, data = b.ask("PUT", "/api/v1/schedules/brief", token, fmt.Appendf(nil, `{"zone":"UTC","windows":[{"days":"daily","from":%q,"to":%q}]}`,
		closes.Add(-time.Minute).Format("15:04"), closes.Format("15:04")))
	if res.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	res, data = b.ask("POST", "/api/v1/simulate", token, []byte(`{"policies":[{"name":"read","policy":"aggressive","activity_sources":["cloudwatch"],"schedule":"","warn_before_minutes":1},
		{"name":"not read","policy":"aggressive","activity_sources":["agent"]},{"name":"closed","timeout_minutes":5000,"schedule":"brief"}],"from":"`+begun.Format(time.RFC3339)+`"}`))
	if res.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	more := decode[control.Simulation](t, data).Policies
	if more[0].Pauses != hasty.Pauses || math.Abs(more[0].AvoidedHours-hasty.AvoidedHours) > 0.2 || more[0].TimeoutMinutes != 15 {
		t.Errorf("with what was read: %+v, without saying so %+v", more[0].Sum, hasty.Sum)
	}
	if more[1].Pauses != 0 || more[1].UnknownHours < 23 {
		t.Errorf("with what was not read: %+v, %g hours unknown", more[1].Sum, more[1].UnknownHours)
	}
	if w := more[0].WarnBefore; w == nil || *w != 1 || more[2].WarnBefore != nil || more[2].Snooze != nil {
		t.Errorf("warned %v before, or as it was in force: %+v", w, more[2])
	}
	if c := more[2]; c.Pauses != 1 || !c.Stops[0].From.Truncate(time.Minute).Equal(closes) || c.Schedule != "brief" {
		t.Errorf("with a schedule that is closed: %+v", more[2])
	}
	s := get[control.Savings](t, api, token, "/api/v1/savings?by=region&from="+begun.Format(time.RFC3339))
	if s.NotAvoided["lease_held"] == 0 || s.NotAvoided["signal_unknown"] == 0 || s.NotAvoided["not_recorded"] == 0 || len(s.IdleByHour) != 7*24 || s.Total.Saved != nil {
		t.Errorf("savings: %+v", s)
	}
	if s.Days <= 0 || s.Days > 1.01 {
		t.Errorf("%g days of a worker that was made now", s.Days)
	}
	if len(s.Periods) != 0 || len(s.Idle) != 0 {
		t.Errorf("details that no client asked for: %+v", s)
	}
	s = get[control.Savings](t, api, token, "/api/v1/savings?by=region&every=day&idle_by=worker&time_zone=Asia/Kolkata&from="+begun.Format(time.RFC3339))
	running, idle := 0.0, 0.0
	for _, p := range s.Periods {
		running += p.Total.RunningHours
	}
	if len(s.Periods) < 2 || len(s.Periods) > 3 || math.Abs(running-s.Total.RunningHours) > 1e-6 || running == 0 {
		t.Errorf("by day: %+v", s.Periods)
	}
	near := func(a, b float64) bool { return math.Abs(a-b) < 1e-4 }
	if len(s.Idle) != 1 || s.IdleGroups != 1 || s.Idle[0].Name != "w" || !slices.EqualFunc(s.Idle[0].Hours, s.IdleByHour, near) || s.Idle[0].IdleUSD != nil || s.Idle[0].UnpricedHours == 0 {
		t.Fatalf("by worker: %+v", s.Idle)
	}
	for _, h := range s.IdleByHour {
		idle += h
	}
	want := 0.0
	for cause, h := range s.NotAvoided {
		if cause != "not_recorded" && cause != "signal_unknown" {
			want += h
		}
	}
	if math.Abs(idle-want) > 1e-6 {
		t.Errorf("%g idle hours in the week, %g by cause", idle, want)
	}
	for _, bad := range []string{"by=color", "by=tag:", "idle_by=color", "every=year", "time_zone=Mars/Base", "time_zone=Local", "from=2020-01-01T00:00:00Z"} {
		res, data = b.ask("GET", "/api/v1/savings?"+bad, token, nil)
		b.problem(bad, res, data, 422)
	}
}

// TestMomentsHaveOneGrammar checks that every parameter for a past time or an end
// accepts the same formats as the command line, and that an error names the field.
func TestMomentsHaveOneGrammar(t *testing.T) {
	api, token, w, _ := recordedWorker(t)
	worker := "/api/v1/workers/" + w.ID
	ask := func(method, path, body string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, strings.TrimSuffix(api, "/api/v1")+path, strings.NewReader(body))
		errtest.None(t, err)
		req.Header.Set("Authorization", "Bearer "+token)
		req.Header.Set("Content-Type", "application/json")
		res, err := http.DefaultClient.Do(req)
		errtest.None(t, err)
		res.Body.Close()
		return res.StatusCode
	}
	for _, path := range []string{worker + "/why?at=", worker + "/timeline?from=", "/api/v1/audit?from=", "/api/v1/audit?to=", "/api/v1/audit/export?from=", "/api/v1/savings?from=",
		"/api/v1/savings?idle=false&from="} {
		for _, text := range []string{"2h", "2h ago", time.Now().UTC().Add(-3 * time.Hour).Format("2006-01-02 15:04"), time.Now().UTC().Add(-2 * time.Hour).Format(time.RFC3339)} {
			if status := ask("GET", path+url.QueryEscape(text), ""); status != http.StatusOK && status != http.StatusNotFound {
				t.Errorf("%s%s answered %d", path, text, status)
			}
		}
		if status := ask("GET", path+"soonish", ""); status != http.StatusUnprocessableEntity {
			t.Errorf("%ssoonish answered %d", path, status)
		}
	}
	for _, text := range []string{"18:00", "tomorrow", "+2h", "fri 18:00 Europe/Berlin"} {
		if status := ask("POST", worker+"/snooze", `{"until":"`+text+`"}`); status != http.StatusOK {
			t.Errorf("snooze until %s answered %d", text, status)
		}
		if status := ask("POST", "/api/v1/overrides", `{"kind":"keep","all":true,"until":"`+text+`"}`); status != http.StatusOK {
			t.Errorf("an exception until %s answered %d", text, status)
		}
	}
	// "Not today" ends with the fleet's day, for every caller.
	if status := ask("PATCH", "/api/v1/settings", `{"notify_time_zone":"Pacific/Auckland"}`); status != http.StatusOK {
		t.Fatalf("the settings answered %d", status)
	}
	for _, kind := range []string{"keep", "skip"} {
		b := &bench{t: t, url: api}
		res, data := b.ask("POST", "/api/v1/overrides", token, []byte(`{"kind":"`+kind+`","selector":{"worker_ids":["`+w.ID+`"]}}`))
		if res.StatusCode != http.StatusOK {
			t.Fatalf("%s without an end: %d %s", kind, res.StatusCode, data)
		}
		o := decode[control.Exception](t, data)
		if end := when.Midnight(o.From, zoneOf(t, "Pacific/Auckland")); !o.Until.Equal(end) {
			t.Errorf("%s without an end is until %s, want %s", kind, o.Until, end)
		}
		if o.Whom() != w.Name {
			t.Errorf("it applies to %q", o.Whom())
		}
	}
	for _, kind := range []string{"freeze", "policy"} {
		if status := ask("POST", "/api/v1/overrides", `{"kind":"`+kind+`","policy":"balanced","all":true}`); status != http.StatusUnprocessableEntity {
			t.Errorf("%s without an end answered %d", kind, status)
		}
	}
	if status := ask("POST", "/api/v1/simulate", `{"policies":[{"name":"x","timeout_minutes":30}],"from":"2h"}`); status != http.StatusOK {
		t.Errorf("simulate from 2h answered %d", status)
	}
}

// TestSavingsByPolicy checks that savings by policy count a worker under the policy
// that it has from a group.
func TestSavingsByPolicy(t *testing.T) {
	api, token, w, begun := recordedWorker(t)
	b := &bench{t: t, url: api}
	if res, data := b.ask("POST", "/api/v1/policies/balanced/apply", token, []byte(`{"tags":{"team":"net"}}`)); res.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	s := get[control.Savings](t, api, token, "/api/v1/savings?by=policy&idle_by=policy&from="+begun.Format(time.RFC3339))
	if len(s.Groups) != 1 || s.Groups[0].Key != "balanced" || s.Groups[0].Workers != 1 {
		t.Errorf("by policy, %s is in %+v", w.ID, s.Groups)
	}
	if len(s.Idle) != 1 || s.Idle[0].Key != "global" {
		t.Errorf("it was idle under %+v", s.Idle)
	}
}

func zoneOf(t *testing.T, name string) *time.Location {
	t.Helper()
	z, err := when.Zone(name)
	errtest.None(t, err)
	return z
}
