package server_test

import (
	"encoding/json"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/agents"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// TestSimulateAgents checks simulations of thresholds over a recorded day of three
// machines: a worker with a known price, a machine that is no worker, and one whose
// agent does not report its policy. The CPU is at 8 % until 10:00 and at 1 % after
// that, with one minute of 60 % at 16:00, so the expected results can be computed by
// hand.
func TestSimulateAgents(t *testing.T) {
	db := mem.New(mem.Options{}).Client()
	t.Cleanup(db.Close)
	begun := time.Now().UTC().Add(-24 * time.Hour).Truncate(time.Hour)
	w := worker.Worker{ID: "w-lab", Name: "lab", AWSRegion: "us-east-1", InstanceType: "m5.2xlarge", EC2InstanceID: "i-00000000000000001", CreatedAt: begun, Tags: map[string]string{"team": "a"},
		Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning}
	data, err := store.Codec[worker.Worker]{Version: 1}.Encode("workers/"+w.ID, w)
	if err == nil {
		_, err = db.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("workers/"+w.ID, data)}})
	}
	if err != nil {
		t.Fatal(err)
	}
	k := &kept{}
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	heard := agents.New(func(r evidence.Record) { k.records = append(k.records, rec.Take(r)...) })
	used := begun
	end := begun.Add(22 * time.Hour)
	for n := 0; !begun.Add(time.Duration(n) * time.Minute).After(end); n++ {
		at := begun.Add(time.Duration(n) * time.Minute)
		cpu := 1.0
		switch {
		case n < 600:
			cpu = 8
		case n == 960:
			cpu = 60
		}
		if cpu >= 5 {
			used = at
		}
		r := control.AgentReport{At: at, Sequence: uint64(n + 1), StartedAt: begun, BootID: "b", Version: "v1", Region: "us-east-1", Interval: idle.Duration(time.Minute), LastUse: used,
			Readings: []idle.Reading{idle.Judge("cpu", cpu, 5, "%", time.Minute, at), {Signal: "users", State: idle.Quiet, At: at, LastEvent: begun}}}
		heard.Take("untold", r, at)
		r.Judged = &control.AgentJudged{Policy: idle.Policy{Name: "agent", Timeout: 0, CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true, Action: "stop"},
			Guards: []idle.Block{{Code: "no_policy", Sentence: "No idle-timeout is set."}}}
		heard.Take(w.EC2InstanceID, r, at)
		heard.Take("laptop", r, at)
	}
	k.records = append(k.records, rec.Flush()...)
	b := newBenchWith(t, db, func(o *server.Options) { o.Evidence = k })
	ask := func(body string) (control.Simulation, int, []byte) {
		res, data := b.ask("POST", "/api/v1/simulate", b.admin, []byte(strings.NewReplacer("FROM", begun.Format(time.RFC3339), "TO", end.Format(time.RFC3339)).Replace(body)))
		var out control.Simulation
		if res.StatusCode == http.StatusOK {
			if err := json.Unmarshal(data, &out); err != nil {
				t.Fatal(err)
			}
		}
		return out, res.StatusCode, data
	}
	// Under the agent's own threshold the machine is idle from 9:59, so paused from
	// 10:59 until the peak, and again from an hour after the peak. With a threshold
	// of 20 % it is unused until the peak, so paused from 1:00. With an unreachable
	// threshold it is paused from 1:00 to the end.
	const policies = `[{"name":"as it was","timeout_minutes":60},{"name":"higher","timeout_minutes":60,"thresholds":{"cpu":20}},{"name":"none","timeout_minutes":60,"thresholds":{"cpu":101}},
		{"name":"users alone","timeout_minutes":60,"signals":["users"]},{"name":"lower","timeout_minutes":60,"thresholds":{"cpu":0.5}}]`
	want := []struct {
		hours  float64
		pauses int
	}{{16 - (9 + 59./60 + 1) + (22 - 17), 2}, {15 + 5, 2}, {21, 1}, {21, 1}, {0, 0}}
	check := func(what string, r control.Simulation, of float64, unknown float64) {
		t.Helper()
		for i, o := range r.Policies {
			lacks := unknown
			if i == 0 && unknown > 0 {
				lacks -= 10 // what the agent itself counted as use is known
			}
			if got, at := o.AvoidedHours/of, want[i]; got > at.hours+1e-6 || got < at.hours-0.2 || float64(o.Pauses) != of*float64(at.pauses) || math.Abs(o.UnknownHours-lacks) > 0.1 {
				t.Errorf("%s, %s: %g hours avoided in %d pauses, %g unknown; want %g in %d", what, o.Name, got, o.Pauses, o.UnknownHours, at.hours, at.pauses)
			}
		}
	}
	all, code, data := ask(`{"of":"agents","policies":` + policies + `,"from":"FROM","to":"TO"}`)
	if code != http.StatusOK || len(all.Policies) != 5 {
		t.Fatalf("%d %s", code, data)
	}
	check("all", all, 2, 22) // the machine that reports no policy is unknown
	if all.Workers["i-00000000000000001"] != "lab" || all.Workers["laptop"] != "laptop" || len(all.Workers) != 2 {
		t.Errorf("names: %v", all.Workers)
	}
	if o := all.Policies[0]; o.UnpricedHours < 9.9 || o.UnpricedHours > 10.1 || o.Saved != nil && *o.Saved < 0 {
		t.Errorf("of two machines one has a price: %+v", o.Sum)
	}
	one, _, _ := ask(`{"of":"agents","policies":` + policies + `,"from":"FROM","to":"TO","tags":{"team":"a"}}`)
	check("the worker", one, 1, 0)
	if o := one.Policies[0]; o.ComputeSaved == nil || math.Abs(*o.ComputeSaved/o.AvoidedHours-0.384) > 0.2 || o.FalseStops != 0 {
		t.Errorf("money of the worker: %+v", o.Sum)
	}
	laptop, _, _ := ask(`{"of":"agents","policies":` + policies + `,"from":"FROM","to":"TO","machines":["laptop"]}`)
	check("the other", laptop, 1, 0)
	if o := laptop.Policies[0]; o.ComputeSaved != nil || o.Saved != nil {
		t.Errorf("money was made up: %+v", o.Sum)
	}
	// With this timeout, the first pause begins ten minutes before the peak, so it is
	// a false stop.
	wrong, _, _ := ask(`{"of":"agents","policies":[{"name":"x","timeout_minutes":350}],"from":"FROM","to":"TO","machines":["laptop"]}`)
	if o := wrong.Policies[0]; o.FalseStops != 1 || o.Pauses != 2 {
		t.Errorf("a pause ten minutes before the peak: %+v", o)
	}
	for _, bad := range []string{`"of":"agents","policies":[{"name":"x","timeout_minutes":5,"schedule":"s"}]`, `"of":"agents","policies":[{"name":"x","timeout_minutes":5,"activity_sources":["cml"]}]`,
		`"of":"agents","policies":[{"name":"x","timeout_minutes":5,"thresholds":{"cpu":-1}}]`, `"policies":[{"name":"x","timeout_minutes":5,"thresholds":{"cpu":9}}]`,
		`"policies":[{"name":"x","timeout_minutes":5,"signals":["cpu"]}]`, `"of":"hosts","policies":[{"name":"x","timeout_minutes":5}]`} {
		if _, code, data := ask(`{` + bad + `}`); code != 422 {
			t.Errorf("%s: %d %s", bad, code, data)
		}
	}
}
