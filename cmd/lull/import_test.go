package main

import (
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/control"
	"lull/internal/sim/truth"
	"lull/internal/sim/world"
)

const (
	home = "us-east-1"
	away = "eu-north-1"
)

// twoRegions returns a scenario with every kind of machine that can be imported.
func twoRegions() world.Config {
	plain := "ami-0000000000000d012"
	return world.Config{
		Regions:  []world.RegionConfig{{Name: home}, {Name: away}},
		Timing:   world.Timing{CMLBoot: world.Duration(3 * time.Minute), Background: -1},
		Profiles: map[string]world.Profile{"quiet": {Labs: 1}, "locked": {Labs: 1, Password: "another"}},
		Workers: []world.WorkerConfig{
			{Name: "plain", Region: home, Image: plain, Elastic: true},
			{Name: "busy", Region: home, Image: plain, Elastic: true},
			{Name: "far", Region: away, Image: plain, Elastic: true},
			{Name: "lab", Region: home, Profile: "quiet", Elastic: true},
			{Name: "locked", Region: home, Profile: "locked", Elastic: true},
			{Name: "reporting", Region: home, Image: plain, Elastic: true},
			{Name: "young", Region: home, Image: plain, Elastic: true, Up: world.Duration(time.Minute)},
			{Name: "asleep", Region: home, Profile: "quiet", Elastic: true, State: world.Stopped},
		},
	}
}

func (r *cloudRig) imports(in fleet.ImportedWorker) (worker.Worker, error) {
	return control.Write[worker.Worker](r.t.Context(), r.asks, "POST", "/workers/import", in)
}

func (r *cloudRig) worker(id string) worker.Worker {
	r.t.Helper()
	w, err := control.Read[worker.Worker](r.t.Context(), r.asks, "/workers/"+id)
	if err != nil {
		r.t.Fatal(err)
	}
	return w
}

// TestImportLooksUp checks that import accepts only an instance that exists in EC2 in
// the given account and region. If EC2 does not answer, import must fail and write
// nothing.
func TestImportLooksUp(t *testing.T) {
	inCloud(t, twoRegions(), map[string]any{"discovery_regions": home + "," + away, "discovery_import": "off"}, func(r *cloudRig) {
		t := r.t
		r.pass(time.Minute)
		far, gone := r.id("far"), "i-0123456789abcdef0"
		for _, c := range []struct {
			region, id, dead, code, says string
		}{
			{home, gone, "", "not_found", home},
			{away, gone, "", "not_found", away},
			{"", gone, "", "not_found", home},
			{home, far, "", "not_found", away}, // and the error names the instance's region
			{home, gone, "ec2." + home, "ec2_unavailable", home},
			{away, far, "ec2." + away, "ec2_unavailable", away},
			{"", gone, "ec2." + away, "ec2_unavailable", away}, // the instance may be in the region that does not answer
			{"", far, "ec2." + away, "ec2_unavailable", away},
			{home, "i-123", "", "invalid", "ec2_instance_id"},
		} {
			r.with(func() { clear(r.dead); r.dead[c.dead] = true })
			w, err := r.imports(fleet.ImportedWorker{AWSRegion: c.region, EC2InstanceID: c.id})
			if code(err) != c.code || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%+v: %s, %v", c, code(err), err)
			}
			if err == nil {
				t.Errorf("%+v: imported as %s", c, w.ID)
			}
		}
		r.with(func() { clear(r.dead) })
		l, err := r.asks.Workers(t.Context(), url.Values{"terminated": {"true"}})
		if err != nil || len(l) != 0 {
			t.Errorf("refused imports left %d workers, %v", len(l), err)
		}
		if es, err := control.Read[control.List[audit.Entry]](t.Context(), r.asks, "/audit?action=imported"); err != nil || len(es.Items) != 0 {
			t.Errorf("refused imports left %d audit entries, %v", len(es.Items), err)
		}
		w, err := r.imports(fleet.ImportedWorker{EC2InstanceID: far})
		if err != nil || w.AWSRegion != away {
			t.Errorf("without a region: %q, %v", w.AWSRegion, err)
		}
		if _, err := r.imports(fleet.ImportedWorker{AWSRegion: away, EC2InstanceID: far}); code(err) != "conflict" {
			t.Errorf("a second time: %v", err)
		}
	})
}

// TestSourcesAtImport checks that the activity sources of an imported worker are
// chosen by what can be observed of its machine, unless a user chooses them.
func TestSourcesAtImport(t *testing.T) {
	inCloud(t, twoRegions(), map[string]any{"discovery_import": "off"}, func(r *cloudRig) {
		t := r.t
		r.pass(10 * time.Second)
		now := time.Now()
		if _, err := r.asks.Report(t.Context(), r.id("reporting"), control.AgentReport{At: now, Sequence: 1, StartedAt: now, BootID: "b", Version: "v1", Interval: idle.Duration(time.Minute),
			LastUse: now, Readings: []idle.Reading{idle.Judge("cpu", 1, 5, "%", time.Minute, now)}}); err != nil {
			t.Fatal(err)
		}
		insecure := true
		trusting := worker.Profile{TLSInsecure: &insecure}
		ids := map[string]string{}
		for _, c := range []struct {
			name    string
			profile worker.Profile
			want    []string
			pending bool
			says    string
		}{
			{"plain", worker.Profile{}, []string{"cloudwatch"}, false, "no CML"},
			{"busy", worker.Profile{ActivitySources: []string{"agent"}}, []string{"agent"}, false, ""},
			{"reporting", worker.Profile{}, []string{"agent"}, false, "reports"},
			{"lab", trusting, []string{"cml"}, false, "answers"},
			{"locked", trusting, []string{"cml"}, false, "cannot be read"},
			{"young", worker.Profile{}, nil, true, "running for"},
			{"asleep", trusting, nil, true, "not running"},
		} {
			w, err := r.imports(fleet.ImportedWorker{Name: c.name, AWSRegion: home, EC2InstanceID: r.id(c.name), Profile: c.profile})
			if err != nil {
				t.Fatal(err)
			}
			ids[c.name] = w.ID
			if !slices.Equal(w.ActivitySources, c.want) || w.DetectSources != c.pending || !strings.Contains(w.ActivitySourcesReason, c.says) || (c.says == "") != (w.ActivitySourcesReason == "") {
				t.Errorf("%s: %v, pending %t, %q", c.name, w.ActivitySources, w.DetectSources, w.ActivitySourcesReason)
			}
			why, err := control.Read[control.Why](t.Context(), r.asks, "/workers/"+w.ID+"/why")
			if err != nil || why.ActivitySourcesReason != w.ActivitySourcesReason {
				t.Errorf("why of %s: %q, %v", c.name, why.ActivitySourcesReason, err)
			}
		}
		// A machine that could not be probed is probed later. A CML that is still
		// booting gets time.
		r.pass(20 * time.Minute)
		if w := r.worker(ids["young"]); !slices.Equal(w.ActivitySources, []string{"cloudwatch"}) || w.DetectSources {
			t.Errorf("young: %v, %q", w.ActivitySources, w.ActivitySourcesReason)
		}
		if w := r.worker(ids["asleep"]); !w.DetectSources {
			t.Errorf("asleep: %v, %q", w.ActivitySources, w.ActivitySourcesReason)
		}
		errtest.Get(control.Write[worker.Worker](t.Context(), r.asks, "POST", "/workers/"+ids["asleep"]+"/arm", nil))(t)
		errtest.Get(control.Write[worker.Worker](t.Context(), r.asks, "POST", "/workers/"+ids["asleep"]+"/start", nil))(t)
		r.pass(20 * time.Minute)
		if w := r.worker(ids["asleep"]); !slices.Equal(w.ActivitySources, []string{"cml"}) || w.Status != power.WorkerRunning {
			t.Errorf("started: %s, %v, %q", w.Status, w.ActivitySources, w.ActivitySourcesReason)
		}
	})
}

// TestPlainMachineIsPaused imports and arms two plain machines with default settings.
// It checks that the quiet one is paused, and the one that a user works on only after
// the user has left.
func TestPlainMachineIsPaused(t *testing.T) {
	rng := scaletest.Random(t)
	inCloud(t, twoRegions(), map[string]any{"discovery_import": "off", "worker_idle_timeout_minutes": 30}, func(r *cloudRig) {
		t := r.t
		// CloudWatch averages over five minutes, so shorter use may not show.
		const length, resolution = 6 * time.Hour, 5 * time.Minute
		const unseen = resolution * 4 / 60 // with a load of at least 1 % beside it, below the threshold of 5 %
		begun := time.Now()
		use := truth.Of(working(rng, begun, length-2*time.Hour)...)
		r.load(home, "plain", begun.Add(-time.Hour), length+time.Hour, func(_, _ time.Time) float64 { return 1 + rng.Float64() })
		r.load(home, "busy", begun.Add(-time.Hour), length+time.Hour, func(from, to time.Time) float64 { return 1 + rng.Float64() + 60*use.Share(from, to) })
		ids := map[string]string{}
		for _, name := range []string{"plain", "busy"} {
			w, err := r.imports(fleet.ImportedWorker{Name: name, AWSRegion: home, EC2InstanceID: r.id(name)})
			if err != nil {
				t.Fatal(err)
			}
			errtest.Get(control.Write[worker.Worker](t.Context(), r.asks, "POST", "/workers/"+w.ID+"/arm", nil))(t)
			ids[name] = w.ID
		}
		paused := map[string]time.Time{}
		for time.Since(begun) < length {
			r.pass(30 * time.Second)
			for name, id := range ids {
				w := r.worker(id)
				if w.LastPausedAt == nil || !paused[name].IsZero() {
					continue
				}
				paused[name] = *w.LastPausedAt
				if name == "busy" {
					// The end of the use may fall into a window whose average it does
					// not raise to the threshold.
					if err := use.Check(*w.LastPausedAt, 30*time.Minute-unseen, resolution); err != nil {
						t.Error(err)
					}
				}
			}
		}
		// The machines have been up for an hour. Their load in that hour is known, so
		// the timeout may be over at the first check.
		if at := paused["plain"]; at.IsZero() || at.Sub(begun) > time.Hour {
			t.Errorf("the quiet machine was paused after %v (zero: never): %+v", at.Sub(begun), r.worker(ids["plain"]))
		}
		if last, _ := use.Last(begun.Add(length)); paused["busy"].IsZero() || paused["busy"].Before(last) {
			t.Errorf("the busy machine was paused at %s, last used at %s", paused["busy"], last)
		}
		if w := r.worker(ids["plain"]); w.Status != power.WorkerStopped || w.PauseReason != power.ReasonIdleTimeout {
			t.Errorf("the quiet machine is %s (%s)", w.Status, w.PauseReason)
		}
		for _, name := range []string{"plain", "busy"} {
			r.sim.World.Locate(name, func(i *world.Instance, now world.Moment) {
				if i.State != world.Stopped {
					t.Errorf("EC2 has %s as %s", name, i.State)
				}
			})
		}
	})
}

// working returns use by someone who works for 6 to 40 minutes at a time, with breaks
// shorter than the idle timeout.
func working(rng *rand.Rand, from time.Time, length time.Duration) (out []truth.Span) {
	for t := from.Add(-20 * time.Minute); t.Before(from.Add(length)); {
		to := t.Add(6*time.Minute + time.Duration(rng.Int64N(int64(34*time.Minute))))
		out = append(out, truth.Span{From: t, To: to})
		t = to.Add(time.Duration(rng.Int64N(int64(20 * time.Minute))))
	}
	return out
}
