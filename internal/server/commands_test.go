package server_test

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/store"
)

func decode[T any](t *testing.T, data []byte) (v T) {
	t.Helper()
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatalf("%v in %s", err, data)
	}
	return v
}

// stopped creates a STOPPED worker, as an observed import.
func (b *bench) stopped() string {
	b.t.Helper()
	id := b.worker()
	for _, to := range []power.Worker{power.WorkerProvisioning, power.WorkerStarting, power.WorkerRunning, power.WorkerStopping, power.WorkerStopped} {
		if _, err := b.fleet.Change(b.t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, _ *worker.Tx) error {
			w.Status = to
			if to == power.WorkerStopped {
				w.DesiredStatus = to
			}
			return nil
		}); err != nil {
			b.t.Fatal(err)
		}
	}
	return id
}

// TestWake checks that a worker's own wake token resumes it, with a rate limit, and
// that no other wake token does.
func TestWake(t *testing.T) {
	b := newBench(t, memory(t))
	id, other := b.stopped(), b.stopped()
	at := "/api/v1/workers/" + id
	_, data := b.ask("POST", at+"/wake-token", b.admin, nil)
	token := decode[control.WakeToken](t, data)
	res, data := b.ask("POST", "/api/v1/workers/"+other+"/wake", token.Token, nil)
	b.problem("another worker", res, data, 401)
	res, data = b.ask("GET", at, token.Token, nil)
	b.problem("the API with a wake token", res, data, 401)
	res, data = b.ask("POST", token.URL, token.Token, nil)
	w := decode[worker.Worker](t, data)
	if res.StatusCode != http.StatusAccepted || w.DesiredStatus != power.WorkerRunning || w.TemplateName != "" {
		t.Fatalf("wake: %d %s", res.StatusCode, data)
	}
	res, data = b.ask("POST", token.URL, token.Token, nil)
	if p := b.problem("too soon", res, data, 409); p.Code() != "rate_limited" {
		t.Errorf("too soon: %s", data)
	}
	b.ask("POST", at+"/wake-token", b.admin, nil)
	res, data = b.ask("POST", token.URL, token.Token, nil)
	b.problem("a token that was replaced", res, data, 401)
}

// TestDetectIdleIsAnsweredByTheOwner checks that detect-idle writes a request to the
// store and returns the owner's answer.
func TestDetectIdleIsAnsweredByTheOwner(t *testing.T) {
	b := newBench(t, memory(t))
	id := b.worker()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	owner := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			page, err := store.List(ctx, b.db, fleet.RequestKeys())
			if err != nil {
				owner <- err
				return
			}
			for _, v := range page.Values {
				r, err := fleet.DecodeRequest(v)
				if err == nil {
					r.Detect = &worker.DetectResult{WorkerID: r.WorkerID, IdleMinutes: 7}
					err = b.fleet.Answer(ctx, r)
				}
				owner <- err
				return
			}
		}
		owner <- ctx.Err()
	}()
	res, data := b.ask("POST", "/api/v1/workers/"+id+"/detect-idle", b.admin, nil)
	if err := <-owner; err != nil {
		t.Fatal(err)
	}
	r := decode[fleet.Request](t, data)
	if res.StatusCode != http.StatusOK || r.Detect == nil || r.Detect.IdleMinutes != 7 || r.By.Name != "first-admin" {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	_, data = b.ask("GET", "/api/v1/requests/"+r.ID, b.admin, nil)
	if again := decode[fleet.Request](t, data); again.Detect == nil {
		t.Errorf("looked up again: %s", data)
	}
}

// TestMachinesSpeakForThemselves checks that a machine's token may report for
// its machine and do nothing else.
func TestMachinesSpeakForThemselves(t *testing.T) {
	b := newBench(t, memory(t))
	agent, host := b.token(access.Agent, "m1"), b.token(access.Host, "m1")
	report := []byte(bodies["report-agent"])
	if res, data := b.ask("POST", "/api/v1/agents/m1/report", agent, report); res.StatusCode != http.StatusOK {
		t.Fatalf("its own report: %d %s", res.StatusCode, data)
	}
	for what, c := range map[string]struct{ method, path, token string }{
		"another machine":     {"POST", "/api/v1/agents/m2/report", agent},
		"as a host":           {"POST", "/api/v1/hosts/m1/report", agent},
		"a host as an agent":  {"POST", "/api/v1/agents/m1/report", host},
		"another's report":    {"GET", "/api/v1/agents/m2", agent},
		"the list":            {"GET", "/api/v1/agents", agent},
		"workers":             {"GET", "/api/v1/workers", agent},
		"metrics for viewers": {"GET", "/metrics", host},
	} {
		var body []byte
		if c.method == "POST" {
			body = report
		}
		res, data := b.ask(c.method, c.path, c.token, body)
		b.problem(what, res, data, 403)
	}
	_, data := b.ask("GET", "/api/v1/agents", b.admin, nil)
	l := decode[control.List[control.Machine]](t, data)
	if len(l.Items) != 1 || l.Items[0].Name != "m1" || l.Items[0].ReportedAt == nil || decode[control.AgentReport](t, l.Items[0].Report).Version != "test" {
		t.Errorf("the list is %s", data)
	}
}

// TestChangesOfOthers checks that a change based on an old revision is refused.
func TestChangesOfOthers(t *testing.T) {
	b := newBench(t, memory(t))
	at := "/api/v1/region/us-east-1/workers/" + b.worker()
	res, _ := b.ask("GET", at, b.admin, nil)
	tag := res.Header.Get("ETag")
	if res, data := b.ask("PATCH", at, b.admin, []byte(`{"owner":"a"}`), "If-Match", tag); res.StatusCode != http.StatusOK {
		t.Fatalf("fresh: %d %s", res.StatusCode, data)
	}
	res, data := b.ask("PATCH", at, b.admin, []byte(`{"owner":"b"}`), "If-Match", tag)
	b.problem("stale", res, data, 409, 412)
	res, data = b.ask("GET", "/api/v1/region/eu-west-1/workers/"+at[len("/api/v1/region/us-east-1/workers/"):], b.admin, nil)
	b.problem("another region", res, data, 404)
	res, data = b.ask("DELETE", "/api/v1/workers", b.admin, nil)
	b.problem("no such method", res, data, 405)
	if res.Header.Get("Allow") != "GET, POST" {
		t.Errorf("it allows %q", res.Header.Get("Allow"))
	}
	res, data = b.ask("POST", "/api/v1/workers", b.admin, []byte(`{}`), "Sec-Fetch-Site", "cross-site")
	b.problem("another site", res, data, 403)
}

// TestStartAfterTheDeadline checks that a worker whose ttl_deadline has passed cannot
// be started, and that why names nothing that would start the stopped worker.
func TestStartAfterTheDeadline(t *testing.T) {
	b := newBench(t, memory(t))
	id := b.stopped()
	for tag, want := range map[bool]string{false: "lull worker ttl ", true: "the tag ttl-deadline"} {
		end := time.Now().Add(-time.Hour)
		w, err := b.fleet.Change(t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, _ *worker.Tx) error {
			w.TTLDeadline, w.TTLFromTag, w.Armed = &end, tag, true
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, verb := range []string{"start", "resume"} {
			res, data := b.ask("POST", "/api/v1/workers/"+id+"/"+verb, b.admin, nil)
			if p := b.problem(verb, res, data, 409); !strings.Contains(p.Detail, want) || !strings.Contains(p.Detail, end.UTC().Format(time.RFC3339)) {
				t.Errorf("%s: %s", verb, data)
			}
		}
		_, data := b.ask("GET", "/api/v1/workers/"+id+"/why", b.admin, nil)
		y := decode[control.Why](t, data)
		if f := y.Fact(why.Overdue.Code); f == nil || !slices.Contains(y.Change, w.Unstartable()) || y.Fact(why.Start.Code) != nil {
			t.Errorf("what would change it: %+v", y.Remedies)
		}
	}
}

// TestWhyAtRest checks that why about a stopped worker says who stopped it, for how
// long it has been stopped and what would start it, and leaves out reasons that apply
// only to a running worker.
func TestWhyAtRest(t *testing.T) {
	b := newBench(t, memory(t))
	id := b.stopped()
	since, end := time.Now().Add(-100*time.Hour), time.Now().Add(time.Hour)
	if _, err := b.fleet.Change(t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, tx *worker.Tx) error {
		w.StatusSince, w.LastPausedAt, w.LastPausedBy, w.PauseReason = since, &since, audit.ByController.Name, power.ReasonIdleTimeout
		w.AWSRegion, w.InstanceType, w.Volumes = "us-east-1", "m5.large", []worker.Volume{{ID: "vol-1", Type: "gp3", GB: 10}}
		w.TTLDeadline, w.TTLAction = &end, "terminate"
		for range 20 { // later events push the decision out of the newest entries
			tx.Note(audit.Entry{Action: "updated"})
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	d := evidence.Decide(since, idle.Policy{Name: "balanced", Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true, Signals: []string{"cml"}},
		idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: since.Add(-61 * time.Minute), Readings: []idle.Reading{{Signal: "cml", State: idle.Quiet, At: since}}})
	ops, err := audit.Ops(audit.Entry{At: since, Action: "pause_intended", Events: []string{audit.EventPaused}, WorkerID: id, By: audit.ByController, Policy: "balanced", Decision: &d})
	if err == nil {
		_, err = b.db.Commit(t.Context(), store.Txn{Then: ops})
	}
	if err != nil {
		t.Fatal(err)
	}
	res, data := b.ask("GET", "/api/v1/workers/"+id+"/why", b.admin, nil)
	y := decode[control.Why](t, data)
	if res.StatusCode != http.StatusOK || y.Question != "why was it stopped" || len(y.Signals) != 1 || y.Signals[0].Verdict != idle.Quiet || y.Checked == nil || y.PolicyThen == nil {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
	if v := y.Verdict; v == nil || !v.Eligible || v.TargetPauseAt != nil || !v.NextIdleCheckAt.IsZero() {
		t.Errorf("it was decided by %+v", v)
	}
	for _, code := range []idle.Code{idle.NotIdleYet, idle.SignalUnknown, idle.WarningPending} {
		if y.IdleStatus.Has(code) {
			t.Errorf("it is blocked by %s", code)
		}
	}
	var codes []string
	for _, f := range slices.Concat(y.Facts, y.Remedies) {
		codes = append(codes, string(f.Code))
	}
	if want := "stopped was_idle rested expiry expiry start snooze"; strings.Join(codes, " ") != want {
		t.Errorf("facts and remedies %s, want %s", codes, want)
	}
	if f := y.Facts[0]; f.By != audit.ByController.Name || !f.At.Equal(since) || !strings.Contains(f.Sentence, string(power.ReasonIdleTimeout)) {
		t.Errorf("%+v", f)
	}
	if f := y.Fact(why.Saved.Code); !strings.Contains(f.Sentence, " $9.") {
		t.Errorf("%+v", f)
	}
}

// TestWhyBeforeItCame checks that why for a time before lull knew the worker says so,
// and when the worker was created.
func TestWhyBeforeItCame(t *testing.T) {
	b := newBench(t, memory(t))
	id := b.stopped()
	res, data := b.ask("GET", "/api/v1/workers/"+id+"/why?at="+time.Now().Add(-time.Hour).UTC().Format(time.RFC3339), b.admin, nil)
	y := decode[control.Why](t, data)
	if res.StatusCode != http.StatusOK || y.State != "" || y.Fact(why.Unborn.Code) == nil {
		t.Fatalf("%d %s", res.StatusCode, data)
	}
}
