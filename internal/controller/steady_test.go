package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// steadyWorld is a region in which nothing changes. Its answers are computed
// once, so that only the controller is measured.
type steadyWorld struct {
	*world
	states map[string]string
	insts  map[string]Instance
	active time.Time
}

func (s *steadyWorld) States(context.Context) (map[string]string, error) {
	s.count("states")
	return s.states, nil
}

func (s *steadyWorld) count(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[name]++
}

func (s *steadyWorld) Instances(_ context.Context, ids []string) (map[string]Instance, []string, error) {
	s.mu.Lock()
	s.calls["instances"] += (len(ids) + 999) / 1000
	s.mu.Unlock()
	found := make(map[string]Instance, len(ids))
	for _, id := range ids {
		found[id] = s.insts[id]
	}
	return found, nil, nil
}

func (s *steadyWorld) console(worker.Worker) (Console, error) { return steadyConsole{s}, nil }

type steadyConsole struct{ s *steadyWorld }

func (c steadyConsole) Telemetry(context.Context, json.RawMessage) worker.Telemetry {
	c.s.count("telemetry")
	return worker.Telemetry{CheckedAt: time.Now(), Newest: c.s.active, Recent: []worker.Event{{Category: "start_lab", Timestamp: c.s.active}}}
}
func (c steadyConsole) System(context.Context) (System, error) {
	return System{Version: "2.9.0", Ready: true}, nil
}
func (c steadyConsole) RunningLabs(context.Context) (int, error) { return 1, nil }

// cpu returns the CPU time used by this process.
func cpu(t *testing.T) time.Duration {
	var u syscall.Rusage
	errtest.None(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestSteadyCycle checks that a steady cycle costs one listing and the telemetry that
// is due, and almost no writes, however many workers there are.
func TestSteadyCycle(t *testing.T) {
	for _, n := range []int{1000, 10000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			if testing.Short() && n > 1000 {
				t.Skip("short")
			}
			synctest.Test(t, func(t *testing.T) { steady(t, n) })
		})
	}
}

func steady(t *testing.T, n int) {
	db := mem.New(mem.Options{KeepRevisions: 1000})
	client := db.Client()
	defer client.Close()
	var writes, reads atomic.Int64
	client.Inject(func(c mem.Call) mem.Fault {
		if c.Kind == mem.Commit && len(c.Txn.Then) > 0 {
			writes.Add(1)
		} else if c.Kind == mem.Commit {
			reads.Add(1)
		}
		return mem.Fault{}
	})
	w := &steadyWorld{world: newWorld(1), states: map[string]string{}, insts: map[string]Instance{}, active: time.Now().Add(10 * time.Minute)}
	timeout := 24 * 60
	now := time.Now().UTC()
	for i := range n {
		id := fmt.Sprintf("i-%017x", i)
		rec := worker.Worker{
			ID: fmt.Sprintf("w-%d", i), Name: "n", AWSRegion: region0, DesiredStatus: power.WorkerStopped, Status: power.WorkerStopped, StatusSince: now,
			IsIdleDetectionEnabled: true, PauseHolder: worker.HolderController, Armed: true, CreatedAt: now, EC2InstanceID: id, EC2State: "stopped",
			License: worker.License{Status: worker.LicenseUnregistered}, IdleTimeoutMinutes: &timeout, RecentActivityEvents: []worker.Event{},
		}
		w.states[id] = "stopped"
		if i%10 == 0 {
			rec.Status, rec.DesiredStatus, rec.EC2State, rec.PrivateIP, rec.PublicIP = power.WorkerRunning, power.WorkerRunning, "running", "10.0.0.1", "1.2.3.4"
			rec.CMLVersion, rec.CMLReady = "2.9.0", true
			w.states[id] = "running"
		}
		w.insts[id] = Instance{ID: id, State: w.states[id], PrivateIP: rec.PrivateIP, PublicIP: rec.PublicIP, Tags: map[string]string{"lull:managed-by": "fleet-1"}}
		body, err := json.Marshal(rec)
		errtest.None(t, err)
		errtest.Get(client.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("workers/"+rec.ID, append([]byte(`{"v":1,`), body[1:]...))}}))(t)
	}
	f, err := fleet.New(fleet.Options{Store: client, ID: "fleet-1", File: settings.Layer{Values: (&rig{}).settingsOf(options{})}})
	if err != nil {
		t.Fatal(err)
	}
	cloud := Cloud{Observe: w, Move: w.world, Launch: w.world, Check: w.world, Tag: w.world}
	c, err := New(Config{Fleet: f, Server: "s", Clouds: func(string, string) (Cloud, error) { return cloud, nil }, Consoles: w.console})
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	begun := cpu(t)
	go func() { done <- c.Run(ctx) }()
	time.Sleep(80 * time.Minute) // until all activity is older than a check interval, and nothing changes
	runtime.GC()
	runtime.ReadMemStats(&after)
	warm := cpu(t) - begun
	const cycles = 120 // an hour
	w.mu.Lock()
	clear(w.calls)
	w.mu.Unlock()
	writes.Store(0)
	reads.Store(0)
	results := c.Stats().Results
	start := cpu(t)
	time.Sleep(cycles * 30 * time.Second)
	used := cpu(t) - start
	var rec []string
	for k, v := range c.Stats().Results {
		rec = append(rec, fmt.Sprintf("%s %.1f", k, float64(v-results[k])/cycles))
	}
	w.mu.Lock()
	calls := map[string]int{}
	for k, v := range w.calls {
		calls[k] = v
	}
	w.mu.Unlock()
	t.Logf("%d workers, a tenth RUNNING; per cycle of 30 s: CPU %s, listings %.2f, describe calls %.2f, telemetry %.1f, writes %.2f, read transactions %.2f, reconciliations %s; memory %d B a worker; start and 80 min %s",
		n, used/cycles, float64(calls["states"])/cycles, float64(calls["instances"])/cycles, float64(calls["telemetry"])/cycles,
		float64(writes.Load())/cycles, float64(reads.Load())/cycles, strings.Join(rec, " "), (int64(after.HeapAlloc)-int64(before.HeapAlloc))/int64(n), warm)
	if scans := cycles / 10; calls["states"] > cycles+scans+2 { // discovery lists the region every 5 minutes
		t.Errorf("%d listings in %d cycles", calls["states"], cycles)
	}
	if most := cycles * (1 + n/1000); calls["instances"] > most {
		t.Errorf("%d describe calls in %d cycles, want at most %d", calls["instances"], cycles, most)
	}
	// The check times of each RUNNING worker are written every 30 minutes.
	if most := int64(n/10*3 + 200); writes.Load() > most {
		t.Errorf("%d writes in %d cycles, want at most %d", writes.Load(), cycles, most)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
