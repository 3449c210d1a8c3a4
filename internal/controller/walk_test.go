package controller

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/trace"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/store/mem"
)

const region0 = "us-east-1"

var operator = audit.Actor{Name: "ada", Kind: audit.KindUser}

// rig is a fleet, with a controller and a simulated world, in a bubble.
type rig struct {
	t     *testing.T
	db    *mem.DB
	fleet *fleet.Fleet
	world *world
	c     *Controller
	stop  func()
}

type options struct {
	seed     uint64
	settings map[string]any
	shadow   bool
	world    *world
	db       *mem.DB
	server   string
	tracer   trace.Tracer
	log      *slog.Logger
	consoles func(worker.Worker) (Console, error) // nil: those of the world
	lanes    int
}

// newRig creates a fleet with a template and a running controller.
func newRig(t *testing.T, o options) *rig {
	t.Helper()
	r := &rig{t: t, db: o.db, world: o.world}
	if r.db == nil {
		r.db = mem.New(mem.Options{})
	}
	if r.world == nil {
		r.world = newWorld(o.seed)
	}
	values := map[string]any{"aws_region_configs": map[string]any{region0: map[string]any{
		"security_group_ids": []any{"sg-1"}, "subnet_id": "subnet-1", "default_tags": map[string]any{"team": "net"}}}}
	for k, v := range o.settings {
		values[k] = v
	}
	client, mine := r.db.Client(), r.db.Client()
	t.Cleanup(mine.Close)
	f, err := fleet.New(fleet.Options{Store: mine, ID: "fleet-1", File: settings.Layer{Values: values}})
	if err != nil {
		t.Fatal(err)
	}
	r.fleet = f
	if o.server == "" {
		o.server = "server-1"
	}
	_, err = f.PutTemplate(t.Context(), operator, launch.Template{Name: "small", InstanceType: "t3.small", AMINameFilter: "cml*", Enabled: true}, 0)
	if err != nil {
		t.Fatal(err)
	}
	r.run(client, o)
	return r
}

// run starts a controller with its own client.
func (r *rig) run(client *mem.Client, o options) {
	f, err := fleet.New(fleet.Options{Store: client, ID: "fleet-1", File: settings.Layer{Values: r.settingsOf(o)}})
	if err != nil {
		r.t.Fatal(err)
	}
	if o.log == nil {
		o.log = slog.New(slog.NewTextHandler(testLog{r.t}, nil))
	}
	if o.consoles == nil {
		o.consoles = r.world.console
	}
	c, err := New(Config{Lanes: o.lanes,
		Tracer: o.tracer, Log: o.log, Fleet: f, Server: o.server, Shadow: o.shadow,
		Clouds:   func(string, string) (Cloud, error) { return r.world.cloud(), nil },
		Consoles: o.consoles,
		Secret:   func(s sealed.Secret) (sealed.Plain, error) { return sealed.Plain(s), nil },
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.c = c
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	r.stop = func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("Run: %v", err)
		}
		client.Close()
	}
}

func (r *rig) settingsOf(o options) map[string]any {
	values := map[string]any{"aws_region_configs": map[string]any{region0: map[string]any{
		"security_group_ids": []any{"sg-1"}, "subnet_id": "subnet-1", "default_tags": map[string]any{"team": "net"}}}}
	for k, v := range o.settings {
		values[k] = v
	}
	return values
}

type testLog struct{ t *testing.T }

func (l testLog) Write(b []byte) (int, error) {
	if testing.Verbose() {
		l.t.Logf("%s %s", time.Now().Format("15:04:05"), b)
	}
	return len(b), nil
}

func (r *rig) worker(id string) worker.Worker {
	r.t.Helper()
	w, err := r.fleet.Worker(r.t.Context(), id)
	if err != nil {
		r.t.Fatal(err)
	}
	return w
}

// await waits until the worker has status s, and fails the test after within.
func (r *rig) await(id string, s power.Worker, within time.Duration) worker.Worker {
	r.t.Helper()
	end := time.Now().Add(within)
	for {
		w := r.worker(id)
		if w.Status == s {
			return w
		}
		if time.Now().After(end) {
			r.t.Fatalf("worker %s is %s (%s) after %s, want %s", id, w.Status, w.StatusReason, within, s)
		}
		time.Sleep(time.Second)
	}
}

func (r *rig) create() worker.Worker {
	r.t.Helper()
	w, err := r.fleet.CreateWorker(r.t.Context(), operator, fleet.NewWorker{Name: "one", AWSRegion: region0, TemplateName: "small"})
	if err != nil {
		r.t.Fatal(err)
	}
	return w
}

func (r *rig) machine(id string) *machine {
	r.t.Helper()
	r.world.mu.Lock()
	defer r.world.mu.Unlock()
	m := r.world.insts[r.worker(id).EC2InstanceID]
	if m == nil {
		r.t.Fatalf("worker %s has no instance", id)
	}
	return m
}

func TestLifeOfOneWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer r.stop()
		w := r.create()
		begun := time.Now()
		w = r.await(w.ID, power.WorkerRunning, 5*time.Minute)
		if w.LastResumedAt == nil || w.ManualResumeCount+w.AutoResumeCount != 0 || w.Launch == nil || w.PrivateIP == "" || w.EC2State != "running" {
			t.Errorf("after the launch: %+v", w)
		}
		// The worker is in use for 30 minutes and then unused.
		time.Sleep(30 * time.Minute)
		m := r.machine(w.ID)
		r.world.mu.Lock()
		last := time.Now()
		m.events = append(m.events, cmlEvent{at: last, arrives: last})
		r.world.mu.Unlock()
		w = r.await(w.ID, power.WorkerStopped, 3*time.Hour)
		idleFor := w.LastPausedAt.Sub(last)
		if idleFor < 60*time.Minute || idleFor > 66*time.Minute {
			t.Errorf("paused %s after the last activity", idleFor)
		}
		if w.PauseReason != power.ReasonIdleTimeout || w.AutoPauseCount != 1 || w.ManualPauseCount != 0 || w.LastPausedBy != "worker-controller" {
			t.Errorf("pause recorded as %s, counts %d/%d, by %s", w.PauseReason, w.AutoPauseCount, w.ManualPauseCount, w.LastPausedBy)
		}
		if len(m.warned) == 0 {
			t.Error("no warning was sent")
		}
		time.Sleep(time.Hour)
		if _, err := r.fleet.ResumeWorker(t.Context(), operator, w.ID); err != nil {
			t.Fatal(err)
		}
		w = r.await(w.ID, power.WorkerRunning, 5*time.Minute)
		if w.ManualResumeCount != 1 || w.LastResumedBy != "ada" || w.TargetPauseAt != nil {
			t.Errorf("resume recorded %d times by %s", w.ManualResumeCount, w.LastResumedBy)
		}
		resumed := *w.LastResumedAt
		w = r.await(w.ID, power.WorkerStopped, 3*time.Hour)
		if d := w.LastPausedAt.Sub(resumed); d < time.Hour {
			t.Errorf("paused %s after the resume, in the snooze", d)
		}
		if w.AutoPauseCount != 2 {
			t.Errorf("auto_pause_count %d", w.AutoPauseCount)
		}
		t.Logf("life took %s, calls %v, stats %+v", time.Since(begun), r.world.calls, r.c.Stats())
	})
}
