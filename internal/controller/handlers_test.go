package controller

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// row is one branch of a handler: a record and an instance, and the outcome of
// one reconciliation.
type row struct {
	name   string
	status power.Worker
	set    func(w *worker.Worker)
	ec2    string // state of the instance; empty if EC2 does not know it
	inst   func(m *machine)
	world  func(w *world)
	config map[string]any
	age    time.Duration // time in the status
	halted bool
	// asks changes the record without notifying the controller, and then requests a
	// check.
	asks func(f *fleet.Fleet) error

	result Result
	to     power.Worker // empty: unchanged
	reason string       // part of status_reason
	calls  string       // acting calls, in alphabetical order
	check  func(t *testing.T, w worker.Worker, c *Controller)
}

func desired(s power.Worker) func(w *worker.Worker) {
	return func(w *worker.Worker) { w.DesiredStatus = s }
}

func intent(r power.Reason, drain bool) func(w *worker.Worker) {
	return func(w *worker.Worker) {
		w.DesiredStatus, w.PauseReason, w.PauseGeneration = power.WorkerStopped, r, 1
		w.Intent = &worker.Intent{Reason: r, By: "x", At: time.Now(), Generation: 1, Drain: drain}
		w.Draining = drain
	}
}

func both(fs ...func(w *worker.Worker)) func(w *worker.Worker) {
	return func(w *worker.Worker) {
		for _, f := range fs {
			f(w)
		}
	}
}

// ended returns a check that the audit log gives this reason and actor for the
// worker's end.
func ended(reason power.Reason, by audit.Actor) func(*testing.T, worker.Worker, *Controller) {
	return func(t *testing.T, w worker.Worker, c *Controller) {
		page, err := c.fleet.Audit(t.Context(), audit.Query{WorkerID: w.ID, Action: "terminated"})
		if err != nil || len(page.Entries) != 1 || page.Entries[0].Reason != string(reason) || page.Entries[0].By != by {
			t.Errorf("the audit says %+v, want for %s by %s: %v", page.Entries, reason, by.Name, err)
		}
	}
}

// runRow creates the row's world and reconciles once.
func runRow(t *testing.T, r row) {
	db := mem.New(mem.Options{})
	client := db.Client()
	defer client.Close()
	w := newWorld(1)
	values := (&rig{}).settingsOf(options{settings: r.config})
	f, err := fleet.New(fleet.Options{Store: client, ID: "fleet-1", File: settings.Layer{Values: values}})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	errtest.Get(f.PutTemplate(ctx, operator, launch.Template{Name: "small", InstanceType: "t3.small", AMINameFilter: "cml*", Enabled: true}, 0))(t)
	c, err := New(Config{Fleet: f, Server: "s", Clouds: func(string, string) (Cloud, error) { return w.cloud(), nil }, Consoles: w.console,
		Secret: func(s sealed.Secret) (sealed.Plain, error) { return sealed.Plain(s), nil }})
	if err != nil {
		t.Fatal(err)
	}
	m := w.add("running")
	if r.ec2 != "" {
		m.State, m.then = r.ec2, ""
	} else {
		m.hidden = true
	}
	m.Tags = map[string]string{"lull:managed-by": "fleet-1"}
	m.PrivateIP = "10.0.0.1"
	if r.inst != nil {
		r.inst(m)
	}
	if r.world != nil {
		r.world(w)
	}
	begun := time.Now().UTC()
	time.Sleep(r.age)
	rec := worker.Worker{
		ID: "w-1", Name: "one", AWSRegion: region0, TemplateName: "small", DesiredStatus: power.WorkerRunning, LaunchGeneration: 1,
		IsIdleDetectionEnabled: true, PauseHolder: worker.HolderController, Armed: true, Status: r.status, StatusSince: begun, CreatedAt: begun,
		EC2InstanceID: m.ID, EC2State: "running", License: worker.License{Status: worker.LicenseUnregistered}, PrivateIP: "10.0.0.1", RecentActivityEvents: []worker.Event{},
	}
	if r.set != nil {
		r.set(&rec)
	}
	body, err := json.Marshal(rec)
	errtest.None(t, err)
	errtest.Get(client.Commit(ctx, store.Txn{Then: []store.Op{store.Put("workers/w-1", append([]byte(`{"v":1,`), body[1:]...))}}))(t)
	v, err := store.Get(ctx, client, "workers/w-1")
	errtest.None(t, err)
	c.read(v)
	if r.halted {
		errtest.Get(f.SetHalt(ctx, operator, halt.Request{On: true}))(t)
	}
	if r.asks != nil {
		errtest.None(t, r.asks(f))
		q, err := f.AskOwner(ctx, operator, fleet.RequestDetect, "w-1", true)
		errtest.None(t, err)
		c.waiting["w-1"] = []fleet.Request{q}
	}
	out := c.once(t, ctx, r.ec2, m)
	after, err := f.Worker(ctx, "w-1")
	errtest.None(t, err)
	to := r.to
	if to == "" {
		to = r.status
	}
	if out != r.result || after.Status != to || !strings.Contains(after.StatusReason, r.reason) {
		t.Errorf("%s to %s (%s), want %s to %s (%s)", out, after.Status, after.StatusReason, r.result, to, r.reason)
	}
	var calls []string
	for _, name := range []string{"run", "start", "stop", "tags", "terminate"} {
		if w.calls[name] > 0 {
			calls = append(calls, name)
		}
	}
	if got := strings.Join(calls, " "); got != r.calls {
		t.Errorf("called %q, want %q", got, r.calls)
	}
	if r.check != nil {
		r.check(t, after, c)
	}
}

// once makes c own a shard and reconciles its only worker with the given observation.
func (c *Controller) once(t *testing.T, ctx context.Context, state string, m *machine) Result {
	t.Helper()
	lease, err := c.fleet.Store().Grant(ctx, LeaseTTL)
	errtest.None(t, err)
	defer func() { _ = lease.Revoke(ctx) }()
	e := c.entries["w-1"]
	own, err := store.Claim(ctx, c.fleet.Store(), lease, "shards/x", []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	sh := &shard{n: e.shard, own: own, fleet: c.fleet.Guarded(own.Guard()), since: time.Now()}
	sh.ctx, sh.cancel = context.WithCancel(ctx)
	defer sh.cancel()
	time.Sleep(time.Second)
	e.seen, e.seenAt, e.missing = state, time.Now(), state == ""
	if state != "" {
		in := m.copy()
		e.inst, e.instAt = &in, time.Now()
	}
	time.Sleep(time.Second)
	return c.reconcile(sh.ctx, e, sh).Result
}

func TestHandlers(t *testing.T) {
	quiet := func(m *machine) { m.events = nil }
	busy := func(m *machine) {
		m.events = append(m.events, cmlEvent{at: time.Now().Add(119 * time.Minute), arrives: time.Now()})
	}
	recent := func(w *worker.Worker) { w.StatusSince = time.Now() }
	fresh := func(w *worker.Worker) { w.EC2InstanceID, w.EC2State, w.PrivateIP = "", "", "" }
	long := 2 * time.Hour
	counters := func(want func(s Stats) int64, n int64) func(*testing.T, worker.Worker, *Controller) {
		return func(t *testing.T, _ worker.Worker, c *Controller) {
			t.Helper()
			if got := want(c.Stats()); got != n {
				t.Errorf("counter is %d, want %d", got, n)
			}
		}
	}
	rows := []row{
		// PENDING.
		{name: "launch", status: power.WorkerPending, set: fresh, ec2: "running", result: Success, to: power.WorkerProvisioning, calls: "run",
			check: func(t *testing.T, w worker.Worker, c *Controller) {
				if l := w.Launch; l == nil || l.Token != "w-1-1" || l.Tags["lull:worker-id"] != "w-1" || l.Tags["lull:managed-by"] != "fleet-1" || l.Tags["team"] != "net" || l.Tags["Name"] != "one" || l.Tags["lull:template"] != "small" {
					t.Errorf("launched with %+v", w.Launch)
				}
				if c.Stats().Provisioned != 1 {
					t.Error("not counted")
				}
			}},
		{name: "no template", status: power.WorkerPending, set: both(fresh, func(w *worker.Worker) { w.TemplateName = "none" }), result: Retry, to: power.WorkerFailed, reason: `no template "none"`},
		{name: "no region", status: power.WorkerPending, set: both(fresh, func(w *worker.Worker) { w.AWSRegion = "eu-west-1" }), result: Retry, to: power.WorkerFailed, reason: "configuration of region"},
		{name: "region without subnet", status: power.WorkerPending, set: fresh, config: map[string]any{"aws_region_configs": map[string]any{region0: map[string]any{}}}, result: Retry, to: power.WorkerFailed, reason: "no subnet_id"},
		{name: "launch refused", status: power.WorkerPending, set: fresh, world: failing("run", Invalid, false), result: Retry, to: power.WorkerFailed, reason: "refused the launch", calls: "run"},
		{name: "no capacity", status: power.WorkerPending, set: fresh, world: failing("run", Capacity, false), result: Retry, reason: "cannot launch yet", calls: "run"},
		{name: "launch throttled", status: power.WorkerPending, set: fresh, world: failing("run", Throttled, false), result: Retry, reason: "cannot launch yet", calls: "run"},
		{name: "never tried, although old", status: power.WorkerPending, set: fresh, age: time.Hour, result: Success, to: power.WorkerProvisioning, calls: "run"},
		{name: "never launched", status: power.WorkerPending, set: both(fresh, func(w *worker.Worker) { w.StatusReason = "no capacity" }), age: time.Hour, result: Retry, to: power.WorkerFailed, reason: "not launched within"},
		{name: "stored parameters are sent", status: power.WorkerPending, set: both(fresh, func(w *worker.Worker) {
			w.Launch = &worker.Launch{Token: "w-1-7", Generation: 7, AMIID: "ami-old", InstanceType: "m5.large"}
		}), result: Success, to: power.WorkerProvisioning, calls: "run", check: func(t *testing.T, w worker.Worker, _ *Controller) {
			if w.Launch.AMIID != "ami-old" || w.Launch.Token != "w-1-7" {
				t.Errorf("launched %+v", w.Launch)
			}
		}},
		{name: "retry adopts what is there", status: power.WorkerPending, set: both(fresh, func(w *worker.Worker) {
			w.RetryLook, w.Launch = true, &worker.Launch{Token: "w-1-1"}
		}), ec2: "running", inst: func(m *machine) { m.Tags["lull:worker-id"] = "w-1" }, result: Success, to: power.WorkerProvisioning},
		{name: "retry raises the generation when nothing is left", status: power.WorkerPending, set: both(fresh, func(w *worker.Worker) {
			w.RetryLook, w.Launch = true, &worker.Launch{Token: "w-1-1"}
		}), result: Success, to: power.WorkerProvisioning, calls: "run", check: func(t *testing.T, w worker.Worker, _ *Controller) {
			if w.LaunchGeneration != 2 || w.Launch.Token != "w-1-2" {
				t.Errorf("generation %d, token %s", w.LaunchGeneration, w.Launch.Token)
			}
		}},
		// PROVISIONING.
		{name: "no instance id", status: power.WorkerProvisioning, set: fresh, result: Retry, to: power.WorkerFailed, reason: "no instance"},
		{name: "running", status: power.WorkerProvisioning, ec2: "running", result: Success, to: power.WorkerStarting},
		{name: "pending", status: power.WorkerProvisioning, ec2: "pending", result: Requeue},
		{name: "pending for too long", status: power.WorkerProvisioning, ec2: "pending", age: time.Hour, result: Retry, to: power.WorkerFailed, reason: "still pending"},
		{name: "stopped from outside", status: power.WorkerProvisioning, ec2: "stopped", inst: func(m *machine) { m.Cause = CauseUser }, result: Success, to: power.WorkerStopped, reason: "outside"},
		{name: "ended by EC2", status: power.WorkerProvisioning, ec2: "terminated", inst: func(m *machine) { m.Cause = CauseServer }, result: Retry, to: power.WorkerFailed, reason: "ended the launch"},
		{name: "terminated from outside", status: power.WorkerProvisioning, ec2: "terminated", inst: func(m *machine) { m.Cause = CauseUser }, result: Success, to: power.WorkerTerminated},
		{name: "not shown yet", status: power.WorkerProvisioning, result: Requeue},
		// STARTING.
		{name: "address", status: power.WorkerStarting, ec2: "running", result: Success, to: power.WorkerRunning, check: counters(func(s Stats) int64 { return s.Started }, 1)},
		{name: "no address yet", status: power.WorkerStarting, ec2: "running", inst: func(m *machine) { m.PrivateIP = "" }, result: Requeue},
		{name: "still pending", status: power.WorkerStarting, ec2: "pending", result: Requeue},
		{name: "start is sent", status: power.WorkerStarting, set: func(w *worker.Worker) { w.EC2State = "stopped" }, ec2: "stopped", result: Requeue, calls: "start"},
		{name: "start has no capacity", status: power.WorkerStarting, set: func(w *worker.Worker) { w.EC2State = "stopped" }, ec2: "stopped", world: failing("start", Capacity, false), result: Retry, reason: "cannot start yet", calls: "start"},
		{name: "start is refused", status: power.WorkerStarting, set: func(w *worker.Worker) { w.EC2State = "stopped" }, ec2: "stopped", world: failing("start", Unauthorized, false), result: Retry, to: power.WorkerFailed, reason: "refused the start", calls: "start"},
		{name: "start not ours", status: power.WorkerStarting, set: func(w *worker.Worker) { w.EC2State = "stopped" }, ec2: "stopped", inst: func(m *machine) { m.Tags["lull:managed-by"] = "other" }, result: Retry, reason: "belongs to other"},
		{name: "start for too long", status: power.WorkerStarting, ec2: "pending", age: time.Hour, result: Retry, to: power.WorkerFailed, reason: "after 15m"},
		{name: "stop wished for while starting", status: power.WorkerStarting, set: intent(power.ReasonManual, false), ec2: "running", result: Success, to: power.WorkerStopping},
		{name: "stopped while starting", status: power.WorkerStarting, ec2: "stopped", inst: func(m *machine) { m.Cause = CauseUser }, result: Success, to: power.WorkerStopped},
		// RUNNING.
		{name: "desired STOPPED", status: power.WorkerRunning, set: intent(power.ReasonManual, false), ec2: "running", result: Success, to: power.WorkerStopping},
		{name: "at rest", status: power.WorkerRunning, ec2: "running", result: Success},
		{name: "drift: stopping by a user", status: power.WorkerRunning, ec2: "stopping", inst: func(m *machine) { m.Cause = CauseUser }, result: Success, to: power.WorkerStopping, reason: "outside",
			check: func(t *testing.T, w worker.Worker, _ *Controller) {
				if w.DesiredStatus != power.WorkerStopped || w.ExternalPauseCount != 1 || w.PauseReason != power.ReasonExternal || w.LastPausedBy != "external" {
					t.Errorf("recorded as %s/%d/%s", w.DesiredStatus, w.ExternalPauseCount, w.PauseReason)
				}
			}},
		{name: "drift: stopped from inside", status: power.WorkerRunning, ec2: "stopped", inst: func(m *machine) { m.Cause = CauseInstance }, result: Success, to: power.WorkerStopped, reason: "outside"},
		{name: "drift: stopped by the cloud", status: power.WorkerRunning, ec2: "stopped", inst: func(m *machine) { m.Cause = CauseServer }, result: Success, to: power.WorkerStopped, reason: "by the cloud",
			check: func(t *testing.T, w worker.Worker, _ *Controller) {
				if w.DesiredStatus != power.WorkerRunning || w.StartOrigin != worker.OriginAuto {
					t.Errorf("not started again: %s", w.DesiredStatus)
				}
			}},
		{name: "drift: a stop that was called off", status: power.WorkerRunning, set: func(w *worker.Worker) { at := time.Now(); w.CancelledStopAt = &at }, ec2: "stopping", inst: func(m *machine) { m.Cause = CauseUser }, result: Success, to: power.WorkerStopping,
			check: counters(func(s Stats) int64 { return s.LateActions }, 1)},
		{name: "drift: pending", status: power.WorkerRunning, ec2: "pending", result: Success, to: power.WorkerStarting},
		{name: "drift: shutting-down", status: power.WorkerRunning, ec2: "shutting-down", result: Success, to: power.WorkerTerminating},
		{name: "drift: terminated", status: power.WorkerRunning, ec2: "terminated", result: Success, to: power.WorkerTerminated, check: counters(func(s Stats) int64 { return s.Terminated }, 1)},
		{name: "drift: unknown state", status: power.WorkerRunning, ec2: "melting", result: Success, to: power.WorkerUnknown, reason: "melting"},
		{name: "not found once", status: power.WorkerRunning, result: Requeue, check: func(t *testing.T, w worker.Worker, _ *Controller) {
			if w.MissingSince == nil {
				t.Error("not marked")
			}
		}},
		{name: "not found twice, too soon", status: power.WorkerRunning, set: func(w *worker.Worker) { at := time.Now().Add(-50 * time.Second); w.MissingSince = &at }, result: Requeue},
		{name: "not found twice", status: power.WorkerRunning, set: func(w *worker.Worker) { at := time.Now().Add(-time.Minute); w.MissingSince = &at }, result: Success, to: power.WorkerTerminated, reason: "external"},
		{name: "found again", status: power.WorkerRunning, ec2: "running", set: func(w *worker.Worker) { at := time.Now().Add(-time.Hour); w.MissingSince = &at }, result: Success},
		{name: "past its ttl, not warned", status: power.WorkerRunning, ec2: "running", set: func(w *worker.Worker) { at := time.Now().Add(-time.Hour); w.TTLDeadline = &at }, result: Success},
		{name: "past its ttl, warned", status: power.WorkerRunning, ec2: "running", set: func(w *worker.Worker) {
			at, sent := time.Now().Add(-time.Minute), time.Now().Add(-6*time.Minute)
			w.TTLDeadline, w.WarningSentAt, w.WarningFor = &at, &sent, power.ReasonTTL
		}, result: Success, check: func(t *testing.T, w worker.Worker, _ *Controller) {
			if w.DesiredStatus != power.WorkerStopped || w.PauseReason != power.ReasonTTL || w.AutoPauseCount != 1 {
				t.Errorf("recorded as %s/%s/%d", w.DesiredStatus, w.PauseReason, w.AutoPauseCount)
			}
		}},
		{name: "a check that is asked for sees what was said before", status: power.WorkerRunning, ec2: "running", age: long, config: map[string]any{"worker_warn_before_minutes": 0},
			set: func(w *worker.Worker) { at := time.Now(); w.LastActivityCheckAt = &at }, asks: func(f *fleet.Fleet) error {
				_, err := f.SnoozeWorker(context.Background(), operator, "w-1", time.Now().Add(time.Hour))
				return err
			}, result: Success, check: func(t *testing.T, w worker.Worker, c *Controller) {
				page, err := store.List(t.Context(), c.fleet.Store(), fleet.RequestKeys())
				if err != nil || len(page.Values) != 1 {
					t.Fatalf("%d requests: %v", len(page.Values), err)
				}
				q, err := fleet.DecodeRequest(page.Values[0])
				if err != nil || q.Detect == nil || !q.Detect.InSnoozePeriod || c.entries["w-1"].known().preflightAt != (time.Time{}) {
					t.Errorf("answered %+v: %v", q, err)
				}
			}},
		// STOPPING.
		{name: "no instance to stop", status: power.WorkerStopping, set: both(intent(power.ReasonManual, false), fresh), result: Success, to: power.WorkerStopped},
		{name: "stopped", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "stopped", result: Success, to: power.WorkerStopped, check: counters(func(s Stats) int64 { return s.Stopped }, 1)},
		{name: "stopping", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "stopping", result: Requeue},
		{name: "a user's stop is sent", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "running", result: Requeue, calls: "stop"},
		{name: "an idle stop is sent after a quiet look", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), recent), age: long, ec2: "running", inst: quiet, result: Requeue, calls: "stop"},
		{name: "an idle stop is called off by activity", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), recent), age: long, ec2: "running", inst: busy, result: Success, to: power.WorkerRunning,
			check: counters(func(s Stats) int64 { return s.PauseCancelled }, 1)},
		{name: "an idle stop is called off by an unknown", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), func(w *worker.Worker) { w.StatusSince = time.Now().Add(-lookWait) }), age: long, ec2: "running", inst: func(m *machine) { m.down = true }, result: Success, to: power.WorkerRunning},
		{name: "an idle stop waits for CML", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), recent), age: long, ec2: "running", inst: func(m *machine) { m.down = true }, result: Requeue},
		{name: "an idle stop is called off by a snooze", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), recent, func(w *worker.Worker) { at := time.Now().Add(time.Hour); w.SnoozedUntil = &at }), age: long, ec2: "running", result: Success, to: power.WorkerRunning},
		{name: "a schedule's stop with force is called off by a snooze", status: power.WorkerStopping, set: both(intent(power.ReasonSchedule, false), recent, func(w *worker.Worker) {
			at := time.Now().Add(time.Hour)
			w.SnoozedUntil, w.Intent.Force = &at, true
		}), age: long, ec2: "running", result: Success, to: power.WorkerRunning},
		{name: "an idle stop of one in dry-run mode", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), recent, func(w *worker.Worker) { w.Armed = false }), age: long, ec2: "running", result: Success, to: power.WorkerRunning},
		{name: "resumed before it was sent", status: power.WorkerStopping, set: both(intent(power.ReasonManual, false), desired(power.WorkerRunning)), ec2: "running", result: Success, to: power.WorkerRunning},
		{name: "sent a moment ago", status: power.WorkerStopping, set: both(intent(power.ReasonManual, false), func(w *worker.Worker) { at := time.Now(); w.Intent.SentAt = &at }), ec2: "running", result: Requeue},
		{name: "sent long ago and nothing came of it", status: power.WorkerStopping, set: both(intent(power.ReasonManual, false), func(w *worker.Worker) { at := time.Now().Add(-time.Hour); w.Intent.SentAt = &at }), ec2: "running", result: Requeue, calls: "stop"},
		{name: "stop protected", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "running", inst: func(m *machine) { m.protect = true }, result: Success, to: power.WorkerRunning, calls: "stop"},
		{name: "stop throttled", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "running", world: failing("stop", Throttled, false), result: Retry, reason: "cannot stop yet", calls: "stop"},
		{name: "stop's answer is lost", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "running", world: failing("stop", Unreachable, true), result: Retry, calls: "stop"},
		{name: "stop not ours", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "running", inst: func(m *machine) { m.Tags["lull:managed-by"] = "other" }, result: Retry, reason: "belongs to other"},
		{name: "armed by a user: tagged, then stopped", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "running", inst: func(m *machine) { m.Tags = map[string]string{} }, result: Requeue, calls: "stop tags"},
		{name: "its agent stops it", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), func(w *worker.Worker) { w.PauseHolder, w.Intent.By = worker.HolderAgent, worker.ByAgent.Name }), ec2: "running", result: Requeue},
		{name: "its agent did not stop it", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), func(w *worker.Worker) { w.PauseHolder, w.Intent.By = worker.HolderAgent, worker.ByAgent.Name }), age: long, ec2: "running", result: Success, to: power.WorkerRunning},
		{name: "instance pending while stopping", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "pending", result: Retry},
		{name: "never sent, although old", status: power.WorkerStopping, set: intent(power.ReasonManual, false), ec2: "running", age: long, result: Requeue, calls: "stop"},
		{name: "automatic stop for too long", status: power.WorkerStopping, set: both(intent(power.ReasonIdleTimeout, false), func(w *worker.Worker) { at := time.Now().Add(-time.Hour); w.Intent.SentAt = &at }), ec2: "running", age: long, result: Success, to: power.WorkerRunning},
		{name: "stop for too long", status: power.WorkerStopping, set: both(intent(power.ReasonManual, false), func(w *worker.Worker) { at := time.Now().Add(-time.Hour); w.Intent.SentAt = &at }), ec2: "running", age: long, result: Retry, to: power.WorkerFailed, reason: "not stopped within"},
		{name: "missing while stopping is not stopped", status: power.WorkerStopping, set: intent(power.ReasonManual, false), result: Requeue},
		// DRAINING.
		{name: "nothing runs", status: power.WorkerDraining, set: intent(power.ReasonManual, true), ec2: "running", result: Success, to: power.WorkerStopping, reason: "nothing is running", calls: "tags"},
		{name: "labs run", status: power.WorkerDraining, set: intent(power.ReasonManual, true), ec2: "running", inst: func(m *machine) { m.labs = 2 }, result: Requeue, calls: "tags"},
		{name: "stopped while it drains", status: power.WorkerDraining, set: intent(power.ReasonManual, false), ec2: "running", inst: func(m *machine) { m.labs = 2 }, result: Success, to: power.WorkerStopping},
		{name: "manual drain times out", status: power.WorkerDraining, set: intent(power.ReasonManual, true), ec2: "running", inst: func(m *machine) { m.labs = 2 }, age: long, result: Success, to: power.WorkerStopping, reason: "timed out", calls: "tags"},
		{name: "automatic drain times out, quiet", status: power.WorkerDraining, set: intent(power.ReasonScaleDown, true), ec2: "running", inst: func(m *machine) { m.labs = 2 }, age: long, result: Success, to: power.WorkerStopping, calls: "tags"},
		{name: "automatic drain, active", status: power.WorkerDraining, set: intent(power.ReasonScaleDown, true), ec2: "running", inst: busy, age: long, result: Success, to: power.WorkerRunning, calls: "tags"},
		{name: "automatic drain, unknown", status: power.WorkerDraining, set: intent(power.ReasonScaleDown, true), ec2: "running", inst: func(m *machine) { m.down = true }, age: long, result: Success, to: power.WorkerRunning, calls: "tags"},
		{name: "drained from outside", status: power.WorkerDraining, set: intent(power.ReasonManual, true), ec2: "stopped", result: Success, to: power.WorkerStopped},
		// STOPPED.
		{name: "rests", status: power.WorkerStopped, set: desired(power.WorkerStopped), ec2: "stopped", result: Success},
		{name: "resume", status: power.WorkerStopped, ec2: "stopped", result: Success, to: power.WorkerStarting},
		{name: "restart waits", status: power.WorkerStopped, set: func(w *worker.Worker) { w.StartOrigin, w.Restarts = worker.OriginAuto, 3 }, ec2: "stopped", result: Requeue},
		{name: "started from outside", status: power.WorkerStopped, set: desired(power.WorkerStopped), ec2: "pending", result: Success, to: power.WorkerStarting, check: func(t *testing.T, w worker.Worker, _ *Controller) {
			if w.StartOrigin != worker.OriginExternal || w.DesiredStatus != power.WorkerRunning {
				t.Errorf("recorded as %s, desired %s", w.StartOrigin, w.DesiredStatus)
			}
		}},
		{name: "terminated while stopped", status: power.WorkerStopped, set: desired(power.WorkerStopped), ec2: "terminated", result: Success, to: power.WorkerTerminated},
		// TERMINATING.
		{name: "never launched", status: power.WorkerTerminating, set: fresh, result: Success, to: power.WorkerTerminated},
		{name: "launch may have been sent", status: power.WorkerTerminating, set: both(fresh, func(w *worker.Worker) { at := time.Now(); w.Launch = &worker.Launch{Token: "x", SentAt: &at} }), result: Requeue},
		{name: "terminate is sent", status: power.WorkerTerminating, ec2: "running", result: Requeue, calls: "terminate"},
		{name: "a user's is sent though all is halted", status: power.WorkerTerminating, halted: true, ec2: "running", result: Requeue, calls: "terminate"},
		{name: "a ttl's is held by a halt", status: power.WorkerTerminating, halted: true, set: func(w *worker.Worker) { w.TerminateFor = power.ReasonTTL }, ec2: "running", result: Retry, reason: "halted"},
		{name: "a ttl's is held in dry-run mode", status: power.WorkerTerminating, set: func(w *worker.Worker) { w.TerminateFor, w.Armed = power.ReasonTTL, false }, ec2: "running", result: Retry, reason: "dry-run"},
		{name: "a ttl's", status: power.WorkerTerminating, set: func(w *worker.Worker) { w.TerminateFor = power.ReasonTTL }, ec2: "running", result: Requeue, calls: "terminate"},
		{name: "shutting down", status: power.WorkerTerminating, ec2: "shutting-down", result: Requeue},
		{name: "terminated", status: power.WorkerTerminating, ec2: "terminated", result: Success, to: power.WorkerTerminated, check: counters(func(s Stats) int64 { return s.Terminated }, 1)},
		{name: "terminated by its ttl", status: power.WorkerTerminating, ec2: "terminated", set: func(w *worker.Worker) {
			at := time.Now()
			w.DesiredStatus, w.TTLDeadline, w.TerminateFor, w.TerminateBy = power.WorkerTerminated, &at, power.ReasonTTL, &audit.ByController
		}, result: Success, to: power.WorkerTerminated, reason: "by its ttl_deadline", check: ended(power.ReasonTTL, audit.ByController)},
		{name: "terminated by a user", status: power.WorkerTerminating, ec2: "terminated", set: func(w *worker.Worker) {
			w.DesiredStatus, w.TerminateBy = power.WorkerTerminated, &operator
		}, result: Success, to: power.WorkerTerminated, reason: "by " + operator.Name, check: ended(power.ReasonManual, operator)},
		{name: "terminated from outside, late", status: power.WorkerTerminating, ec2: "terminated", set: func(w *worker.Worker) {
			w.DesiredStatus, w.TerminateFor = power.WorkerTerminated, power.ReasonExternal
		}, result: Success, to: power.WorkerTerminated, check: ended(power.ReasonExternal, audit.ByCloud)},
		{name: "termination protected", status: power.WorkerTerminating, ec2: "running", world: failing("terminate", Protected, false), result: Retry, to: power.WorkerFailed, reason: "refused the termination", calls: "terminate"},
		{name: "missing while terminating, once", status: power.WorkerTerminating, result: Requeue},
		// FAILED, UNKNOWN, TERMINATED.
		{name: "no instance", status: power.WorkerFailed, set: fresh, result: Skip},
		{name: "never retried by itself", status: power.WorkerFailed, ec2: "running", result: Success},
		{name: "started from outside", status: power.WorkerFailed, set: func(w *worker.Worker) { w.EC2State = "stopped" }, ec2: "running", result: Success, to: power.WorkerStarting},
		{name: "terminated from outside", status: power.WorkerFailed, ec2: "terminated", result: Success, to: power.WorkerTerminated},
		{name: "imported, stopped", status: power.WorkerUnknown, set: func(w *worker.Worker) { w.Imported, w.EC2State = true, "" }, ec2: "stopped", result: Success, to: power.WorkerStopped},
		{name: "imported, running", status: power.WorkerUnknown, set: func(w *worker.Worker) { w.Imported, w.EC2State = true, "" }, ec2: "running", result: Success, to: power.WorkerStarting, check: func(t *testing.T, w worker.Worker, _ *Controller) {
			if w.StartOrigin != worker.OriginNone {
				t.Errorf("it will count as a resume: %s", w.StartOrigin)
			}
		}},
		{name: "unknown for too long", status: power.WorkerUnknown, ec2: "melting", age: long, result: Retry, to: power.WorkerFailed, reason: "melting"},
		{name: "the end", status: power.WorkerTerminated, result: Skip},
	}
	for _, r := range rows {
		t.Run(string(r.status)+"/"+r.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { runRow(t, r) })
		})
	}
}

// failing makes one call fail each time.
func failing(call string, k Kind, applied bool) func(w *world) {
	return func(w *world) {
		w.fault = func(c string) (time.Duration, error, bool) {
			if c == call {
				return 0, callErr(k), applied
			}
			return 0, nil, false
		}
	}
}
