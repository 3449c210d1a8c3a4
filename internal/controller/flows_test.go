package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// TestAskedTooEarly checks that a check requested while a new owner waits for its
// predecessor's calls to end is still answered, once they have ended.
func TestAskedTooEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		r.stop()
		r.run(r.db.Client(), options{server: "server-2"})
		for range 40 { // throughout the time in which the shards change hands
			q, err := r.fleet.AskOwner(t.Context(), operator, fleet.RequestDetect, id, true)
			errtest.None(t, err)
			defer func(asked time.Time) {
				if q, err = r.fleet.Request(t.Context(), q.ID); err != nil || q.Detect == nil {
					t.Errorf("what was asked at %s is not answered: %+v, %v", asked.Format(time.TimeOnly), q, err)
				}
			}(time.Now())
			time.Sleep(time.Second)
		}
		time.Sleep(time.Minute)
	})
}

// TestDetectResult checks the result of DetectWorkerIdle when each of its steps
// fails.
func TestDetectResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"worker_warn_before_minutes": 0}})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		m := r.machine(id)
		detect := func() worker.DetectResult {
			t.Helper()
			q, err := r.fleet.AskOwner(t.Context(), operator, fleet.RequestDetect, id, true)
			errtest.None(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if q, err = r.fleet.Await(ctx, q); err != nil || q.Detect == nil {
				t.Fatalf("no answer: %+v %v", q, err)
			}
			return *q.Detect
		}
		d := detect()
		if !d.TelemetryFetched || !d.ActivityUpdated || !d.IdleCheckPerformed || d.AutoPauseTriggered || d.IsIdle || d.EligibleForPause || d.Error != "" || d.WorkerID != id {
			t.Errorf("all steps well: %+v", d)
		}
		time.Sleep(10 * time.Minute)
		set := func(f func()) { r.world.mu.Lock(); f(); r.world.mu.Unlock() }
		set(func() { m.down = true })
		time.Sleep(55 * time.Minute)
		d = detect()
		if d.TelemetryFetched || d.ActivityUpdated || !d.IdleCheckPerformed || d.AutoPauseTriggered || !d.IsIdle || d.EligibleForPause || d.Error == "" {
			t.Errorf("step 1 fails: %+v", d)
		}
		if len(d.Blocks) != 1 || d.Blocks[0].Code != idle.SignalUnknown || d.Blocks[0].Signal != worker.SourceCML {
			t.Errorf("blocks %+v", d.Blocks)
		}
		if r.c.Stats().UnknownSignal == 0 {
			t.Error("the unknown signal is not counted")
		}
		if page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "signal_unknown"}); err != nil || len(page.Entries) != 1 || page.Entries[0].Decision.Replay() != nil {
			t.Errorf("the alarm was raised %d times: %v", len(page.Entries), err)
		}
		set(func() { m.down, m.optOut = false, true })
		if d = detect(); d.TelemetryFetched || d.EligibleForPause || d.TelemetryUnknownWhy != "not_opted_in" {
			t.Errorf("not opted in: %+v", d)
		}
		errtest.Get(r.fleet.SnoozeWorker(t.Context(), operator, id, time.Now().Add(time.Hour)))(t)
		set(func() { m.optOut = false })
		if d = detect(); !d.TelemetryFetched || !d.IsIdle || !d.InSnoozePeriod || d.EligibleForPause || d.AutoPauseTriggered {
			t.Errorf("snoozed: %+v", d)
		}
		set(func() { m.risks = []string{worker.RiskInstanceStore} })
		errtest.Get(r.fleet.SnoozeWorker(t.Context(), operator, id, time.Time{}))(t)
		if d = detect(); d.EligibleForPause || len(d.Blocks) != 1 || d.Blocks[0].Code != worker.RiskInstanceStore {
			t.Errorf("preflight: %+v", d)
		}
		errtest.Get(r.fleet.UpdateWorker(t.Context(), operator, id, 0, worker.Profile{AcceptedRisks: []string{worker.RiskInstanceStore}}))(t)
		if d = detect(); !d.EligibleForPause || !d.AutoPauseTriggered || d.Action != worker.ActPause {
			t.Errorf("accepted: %+v", d)
		}
		r.await(id, power.WorkerStopped, 5*time.Minute)
	})
}

// TestMissingTwice checks that a worker is ended only after EC2 has answered twice
// that its instance is missing. While EC2 does not answer, the first answer is not
// counted twice.
func TestMissingTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		m := r.machine(id)
		set := func(hidden bool, fault func(string) (time.Duration, error, bool)) {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			m.hidden, r.world.fault = hidden, fault
		}
		set(true, nil)
		for r.worker(id).MissingSince == nil {
			time.Sleep(time.Second)
		}
		set(true, failNow("states", Unreachable))
		time.Sleep(10 * time.Minute)
		if w := r.worker(id); w.Status != power.WorkerRunning {
			t.Fatalf("after one answer it is %s", w.Status)
		}
		set(false, nil)
		time.Sleep(5 * time.Minute)
		if w := r.worker(id); w.Status != power.WorkerRunning || w.MissingSince != nil {
			t.Errorf("found again it is %s, missing since %v", w.Status, w.MissingSince)
		}
		set(true, nil)
		r.await(id, power.WorkerTerminated, 5*time.Minute)
	})
}

// TestLateAction checks that a stop that lull sent and gave up is recorded as its own
// if it takes effect later.
func TestLateAction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		ec2 := r.worker(id).EC2InstanceID
		r.world.mu.Lock()
		r.world.fault = failNow("stop", Unreachable)
		r.world.mu.Unlock()
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		for w := r.await(id, power.WorkerStopping, time.Minute); w.Intent.SentAt == nil; w = r.worker(id) {
			time.Sleep(time.Second)
		}
		errtest.Get(r.fleet.ResumeWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerRunning, 5*time.Minute)
		r.world.mu.Lock()
		err := r.world.stop(ec2, CauseUser) // now it takes effect
		r.world.fault = nil
		r.world.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(45 * time.Second)
		defer func() {
			if t.Failed() {
				page, _ := r.fleet.Audit(t.Context(), audit.Query{})
				for _, e := range page.Entries {
					t.Log(e.At.Format("15:04:05"), e.Action, e.From, e.To, e.Detail)
				}
			}
		}()
		w := r.await(id, power.WorkerRunning, 10*time.Minute)
		if s := r.c.Stats(); s.LateActions != 1 || w.ExternalPauseCount != 0 || w.AutoResumeCount != 1 {
			t.Errorf("late actions %d, external pauses %d, automatic resumes %d", s.LateActions, w.ExternalPauseCount, w.AutoResumeCount)
		}
	})
}

// TestLateActivity checks that activity that CML reports only after the pause that it
// would have prevented is counted once, with its delay, in the metrics and in the
// audit log. Activity before a user's pause, or that would not have prevented a
// pause, is not late.
func TestLateActivity(t *testing.T) {
	for name, c := range map[string]struct {
		manual bool
		before time.Duration // before the pause
		late   bool
	}{"prevents it": {before: 10 * time.Minute, late: true}, "is too old": {before: 70 * time.Minute}, "a user's pause": {manual: true, before: 10 * time.Minute}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				defer func() { r.stop() }()
				id := r.create().ID
				r.await(id, power.WorkerRunning, 5*time.Minute)
				if c.manual {
					time.Sleep(40 * time.Minute)
					errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
				}
				w := r.await(id, power.WorkerStopped, 5*time.Hour)
				at := w.LastPausedAt.Add(-c.before)
				m := r.machine(id)
				r.world.mu.Lock()
				m.events = append(m.events, cmlEvent{at: at, arrives: time.Now()})
				r.world.mu.Unlock()
				errtest.Get(r.fleet.StartWorker(t.Context(), operator, id))(t)
				r.await(id, power.WorkerRunning, 5*time.Minute)
				time.Sleep(30 * time.Minute)
				want, samples := 0, uint64(0)
				if c.late {
					want, samples = 1, 1
				}
				if s := r.c.Stats(); s.LateActivity != int64(want) {
					t.Errorf("%d counted, want %d", s.LateActivity, want)
				}
				var h dto.Metric
				if err := r.c.measure.lateness.Write(&h); err != nil || h.Histogram.GetSampleCount() != samples {
					t.Errorf("%d delays measured, want %d: %v", h.Histogram.GetSampleCount(), samples, err)
				}
				if sum := h.Histogram.GetSampleSum(); c.late && (sum < c.before.Seconds() || sum > (c.before+time.Hour).Seconds()) {
					t.Errorf("measured a delay of %.0f s", sum)
				}
				page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "late_activity"})
				if err != nil || len(page.Entries) != want {
					t.Fatalf("%d in the audit log, want %d: %v", len(page.Entries), want, err)
				}
				if c.late && (page.Entries[0].Events[0] != audit.EventLateActivity || !strings.Contains(page.Entries[0].Detail, at.UTC().Format(time.RFC3339))) {
					t.Errorf("the audit log says %+v", page.Entries[0])
				}
			})
		})
	}
}

// TestAutoPauseAction checks that with pause_action auto, a worker is stopped until
// its history shows that its pauses are short, and hibernated from then on, and that
// the audit log gives the reason.
func TestAutoPauseAction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		auto := worker.ActionAuto
		errtest.Get(r.fleet.UpdateWorker(t.Context(), operator, id, 0, worker.Profile{PauseAction: &auto}))(t)
		r.await(id, power.WorkerRunning, 5*time.Minute)
		for range 4 {
			errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
			r.await(id, power.WorkerStopped, 10*time.Minute)
			time.Sleep(10 * time.Hour)
			errtest.Get(r.fleet.StartWorker(t.Context(), operator, id))(t)
			r.await(id, power.WorkerRunning, 10*time.Minute)
		}
		if got := fmt.Sprint(r.world.hibernate); got != "[false false false true]" {
			t.Errorf("hibernated %s", got)
		}
		page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: "pause_action_chosen"})
		if err != nil || len(page.Entries) != 4 || page.Entries[0].Reason != worker.ActionStop || page.Entries[3].Reason != worker.ActionHibernate || !strings.Contains(page.Entries[3].Detail, "median") {
			t.Errorf("the audit log has %+v: %v", page.Entries, err)
		}
	})
}

func failNow(call string, k Kind) func(string) (time.Duration, error, bool) {
	return func(c string) (time.Duration, error, bool) {
		if c == call {
			return 0, callErr(k), false
		}
		return 0, nil, false
	}
}

// In dry run everything is decided and recorded, and nothing is done.
func TestShadow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{shadow: true})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(5 * time.Hour)
		w := r.worker(id)
		if w.Status != power.WorkerRunning || w.AutoPauseCount != 0 || len(r.machine(id).warned) != 0 {
			t.Errorf("in dry-run mode it is %s, paused %d times, warned %d times", w.Status, w.AutoPauseCount, len(r.machine(id).warned))
		}
		page, err := r.fleet.Audit(t.Context(), audit.Query{Action: "would_pause"})
		if err != nil || len(page.Entries) != 1 {
			t.Errorf("recorded %d times: %v", len(page.Entries), err)
		}
		if r.c.Stats().WouldPause == 0 || r.world.calls["stop"] != 0 {
			t.Errorf("counted %d, stopped %d times", r.c.Stats().WouldPause, r.world.calls["stop"])
		}
	})
}

// TestHaltInTheController checks that a halt takes effect within 5 s, also for stops
// that are already pending.
func TestHaltInTheController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		errtest.Get(r.fleet.SetHalt(t.Context(), operator, halt.Request{On: true}))(t)
		time.Sleep(3 * time.Hour)
		if w := r.worker(id); w.Status != power.WorkerRunning || w.AutoPauseCount != 0 {
			t.Errorf("halted, it is %s", w.Status)
		}
		// The answers show the halt: no warning, no countdown, and who halted.
		l, _ := r.c.Live(id)
		record, err := r.fleet.GetWorkerIdleStatus(t.Context(), id)
		errtest.None(t, err)
		for what, st := range map[string]worker.IdleStatus{"its owner": *l.Idle, "the record": record} {
			i := slices.IndexFunc(st.Blocks, func(b idle.Block) bool { return b.Code == idle.Halted })
			if i < 0 || !strings.Contains(st.Blocks[i].Sentence, "halted by "+operator.Name+" since 2") {
				t.Errorf("%s does not say who halted it: %+v", what, st.Blocks)
			}
			if st.Has(idle.WarningPending) || st.TargetPauseAt != nil || st.WarnAt != nil || st.Eligible {
				t.Errorf("halted, by %s: %+v", what, st.Verdict)
			}
		}
		if n := len(r.machine(id).warned); n != 0 {
			t.Errorf("halted, its users were warned %d times", n)
		}
		r.stop()
		r.run(r.db.Client(), options{server: "server-2"}) // the halt survives a restart
		time.Sleep(time.Hour)
		if w := r.worker(id); w.Status != power.WorkerRunning {
			t.Errorf("halted, after a restart it is %s", w.Status)
		}
		errtest.Get(r.fleet.SetHalt(t.Context(), operator, halt.Request{}))(t)
		r.await(id, power.WorkerStopped, 30*time.Minute)
	})
}

// TestHaltEndsInTheController checks that a halt with an end is lifted by itself and
// that this is recorded. Users are warned only afterwards, and the announced pause is
// after the end of the halt.
func TestHaltEndsInTheController(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		end := time.Now().Add(5 * time.Hour).Round(0)
		errtest.Get(r.fleet.SetHalt(t.Context(), operator, halt.Request{On: true, Until: &end, Reason: "network is down"}))(t)
		time.Sleep(time.Until(end) - time.Second)
		l, _ := r.c.Live(id)
		if at := l.Idle.TargetPauseAt; at == nil || !at.Equal(end.Add(5*time.Minute)) || len(r.machine(id).warned) != 0 {
			t.Errorf("halted until %v, it is paused at %v, warned %v", end, at, r.machine(id).warned)
		}
		time.Sleep(10 * time.Second)
		if r.fleet.Halted().On {
			t.Error("the halt continues")
		}
		r.await(id, power.WorkerStopped, 30*time.Minute)
		w := r.worker(id)
		if w.LastPausedAt.Before(end.Add(5*time.Minute)) || len(r.machine(id).warned) != 1 {
			t.Errorf("paused at %v, warned %v", w.LastPausedAt, r.machine(id).warned)
		}
		page, err := r.fleet.Audit(t.Context(), audit.Query{Action: "halt_ended"})
		if err != nil || len(page.Entries) != 1 || page.Entries[0].By != audit.ByController || !strings.Contains(page.Entries[0].Detail, operator.Name) {
			t.Errorf("the log says %+v, %v", page.Entries, err)
		}
	})
}

// TestImport checks that an imported worker is observed but not changed before it is
// armed, and that arming gives its instance this fleet's tag.
func TestImport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		r.world.mu.Lock()
		m := r.world.add("running")
		m.PrivateIP = "10.9.9.9"
		m.Tags = map[string]string{"team": "net", "Name": "lab 7", "aws:cloudformation:stack-name": "s", "lull:idle-timeout": "1h"}
		r.world.mu.Unlock()
		w, err := r.fleet.ImportWorker(t.Context(), operator, fleet.ImportedWorker{AWSRegion: region0, EC2InstanceID: m.ID})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.fleet.ImportWorker(t.Context(), operator, fleet.ImportedWorker{AWSRegion: region0, EC2InstanceID: m.ID}); err == nil {
			t.Error("one instance was imported twice")
		}
		w = r.await(w.ID, power.WorkerRunning, 5*time.Minute)
		if len(w.Tags) != 1 || w.Tags["team"] != "net" {
			t.Errorf("it has the tags %v", w.Tags)
		}
		if w.LastResumedAt != nil || w.ExternalResumeCount != 0 {
			t.Error("the import counts as a resume")
		}
		time.Sleep(3 * time.Hour)
		if w = r.worker(w.ID); w.Status != power.WorkerRunning || len(m.Tags) != 4 {
			t.Errorf("not armed, it is %s with tags %v", w.Status, m.Tags)
		}
		errtest.Get(r.fleet.ArmWorker(t.Context(), operator, w.ID, true))(t)
		r.await(w.ID, power.WorkerStopped, 30*time.Minute)
		if m.Tags["lull:managed-by"] != "fleet-1" {
			t.Errorf("tags %v", m.Tags)
		}
	})
}

// TestDiscovery checks that an instance with this fleet's tag and no worker is
// imported after a grace period and a second sighting, and that one found by its
// image's name is only listed.
func TestDiscovery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"aws_region_configs": map[string]any{region0: map[string]any{"ami_name_pattern": "cisco-*"}}}})
		defer func() { r.stop() }()
		r.world.mu.Lock()
		ours, other := r.world.add("running"), r.world.add("running")
		ours.Tags["lull:managed-by"], ours.PrivateIP = "fleet-1", "10.1.1.1"
		other.ImageID = "cisco-cml2.9"
		r.world.mu.Unlock()
		time.Sleep(7 * time.Minute)
		found, err := r.fleet.Discovered(t.Context())
		if err != nil || len(found) != 2 {
			t.Fatalf("found %+v, %v", found, err)
		}
		time.Sleep(15 * time.Minute)
		page, err := r.fleet.Workers(t.Context(), worker.Filter{}, "", 0)
		if err != nil || len(page.Workers) != 1 || page.Workers[0].EC2InstanceID != ours.ID || page.Workers[0].Armed {
			t.Errorf("imported %+v, %v", page.Workers, err)
		}
		if found, _ = r.fleet.Discovered(t.Context()); len(found) != 1 || found[0].EC2InstanceID != other.ID {
			t.Errorf("still listed: %+v", found)
		}
		if r.world.calls["stop"]+r.world.calls["terminate"] != 0 {
			t.Error("a discovered instance was touched")
		}
	})
}

// TestTakeover checks that a killed server is replaced within the lease's TTL plus
// the time limit of its calls, and that writes guarded by its lease fail from then
// on.
func TestTakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		first := r.c
		first.mu.Lock()
		old := first.shards[shardOf(id)]
		first.mu.Unlock()
		second := &rig{t: t, db: r.db, world: r.world, fleet: r.fleet}
		second.run(r.db.Client(), options{server: "server-2"})
		defer func() { second.stop() }()
		time.Sleep(time.Minute)
		share := 0
		owners := map[int]int{}
		for _, n := range first.Leadership().Shards {
			owners[n]++
		}
		for _, n := range second.c.Leadership().Shards {
			owners[n]++
			share++
		}
		for n := range Shards {
			if owners[n] != 1 {
				t.Errorf("shard %d has %d owners", n, owners[n])
			}
		}
		if share == 0 || share == Shards {
			t.Errorf("the second server has %d of %d shards", share, Shards)
		}
		// A store as slow as one on a busy disk: sequential claims would take
		// longer than a takeover may.
		second.c.fleet.Store().(*mem.Client).Inject(func(mem.Call) mem.Fault { return mem.Fault{Latency: 500 * time.Millisecond} })
		for { // until just after a renewal, when the lease lasts longest
			first.mu.Lock()
			left := first.lease.Remaining()
			first.mu.Unlock()
			if left > LeaseTTL-200*time.Millisecond {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		killed := time.Now()
		r.c.fleet.Store().(*mem.Client).Close()
		for {
			second.c.mu.Lock()
			n := 0
			for _, sh := range second.c.shards {
				if sh != nil && time.Now().After(sh.since) {
					n++
				}
			}
			second.c.mu.Unlock()
			if n == Shards {
				break
			}
			if time.Since(killed) > time.Minute {
				t.Fatalf("%d shards after a minute", n)
			}
			time.Sleep(100 * time.Millisecond)
		}
		took := time.Since(killed)
		if most := 15*time.Second + Margin; took > most {
			t.Errorf("the takeover took %s, want at most %s", took, most)
		}
		t.Logf("taken over in %s", took)
		_, err := second.c.fleet.Guarded(old.own.Guard()).StopWorker(t.Context(), operator, id)
		if !errors.Is(err, store.ErrLeaseLost) {
			t.Errorf("a write under the lost lease: %v", err)
		}
		r.stop()
	})
}

// No acting call begins if its lease ends within Margin.
func TestCallsEndBeforeTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(mem.Options{}).Client()
		defer c.Close()
		lease, err := c.Grant(t.Context(), LeaseTTL)
		errtest.None(t, err)
		own, err := store.Claim(t.Context(), c, lease, "shards/1", []byte("{}"))
		if err != nil {
			t.Fatal(err)
		}
		sh := &shard{own: own}
		c.Inject(func(mem.Call) mem.Fault { return mem.Fault{Err: fmt.Errorf("cannot: %w", store.ErrUnavailable)} })
		for {
			left := lease.Remaining()
			ctx, cancel, err := sh.call(t.Context())
			if err != nil {
				if left > Margin || !errors.Is(err, store.ErrLeaseLost) {
					t.Errorf("refused with %s left: %v", left, err)
				}
				break
			}
			end, _ := ctx.Deadline()
			cancel()
			if room := left - time.Until(end); room < Margin {
				t.Errorf("with %s left a call may end %s before the lease", left, room)
			}
			time.Sleep(time.Second)
		}
	})
}
