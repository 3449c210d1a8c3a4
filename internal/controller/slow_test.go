package controller

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/fleet"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/lib/scaletest"
)

// slowConsole is a CML whose answers each take 1 to 5 s and fail one time in twenty.
// A telemetry read or system status takes as many answers as with the real client.
type slowConsole struct {
	console
	answer func(ctx context.Context, n int) error
}

func (c slowConsole) Telemetry(ctx context.Context, seen json.RawMessage) worker.Telemetry {
	if err := c.answer(ctx, 2); err != nil {
		return worker.Telemetry{CheckedAt: time.Now(), Unknown: err.Error(), Seen: seen}
	}
	return c.console.Telemetry(ctx, seen)
}

func (c slowConsole) System(ctx context.Context) (System, error) {
	if err := c.answer(ctx, 3); err != nil {
		return System{}, err
	}
	return c.console.System(ctx)
}

func (c slowConsole) State(ctx context.Context) (LicenseState, error) {
	if err := c.answer(ctx, 1); err != nil {
		return LicenseState{}, err
	}
	return c.console.State(ctx)
}

func (c slowConsole) Warn(ctx context.Context, x warning.Warning) (string, error) {
	if err := c.answer(ctx, 2); err != nil {
		return "", err
	}
	return c.console.Warn(ctx, x)
}

func (c slowConsole) Withdraw(ctx context.Context, id string) error {
	if err := c.answer(ctx, 1); err != nil {
		return err
	}
	return c.console.Withdraw(ctx, id)
}

// TestSlowConsoles checks that an unused fleet behind slow CML hosts, some of
// whose answers fail, is stopped within two idle checks of the moment at which
// all are due, and no worker earlier. The ratio of lanes to workers is that of
// a server with 3,000 workers.
func TestSlowConsoles(t *testing.T) {
	n := max(scaletest.N(t, 300), 300)
	rng := scaletest.Random(t)
	synctest.Test(t, func(t *testing.T) {
		const interval, timeout = time.Minute, time.Hour
		w := newWorld(rng.Uint64())
		var mu sync.Mutex
		answer := func(ctx context.Context, n int) error {
			for range n {
				mu.Lock()
				d, fails := time.Second+time.Duration(rng.Int64N(int64(4*time.Second))), rng.IntN(20) == 0
				mu.Unlock()
				if err := delay.For(ctx, d); err != nil {
					return err
				}
				if fails {
					return errors.New("refused: status 503")
				}
			}
			return nil
		}
		deadline := time.Now().Add(10 * time.Minute)
		var sent []time.Duration
		w.onStop = func(_ string, at time.Time) {
			mu.Lock()
			defer mu.Unlock()
			sent = append(sent, at.Sub(deadline))
		}
		r := newRig(t, options{world: w, lanes: defaultLanes * n / 3000, settings: map[string]any{
			"idle_detection_interval": int(interval.Seconds()), "worker_activity_detection_interval": 300,
			"worker_idle_timeout_minutes": int(timeout.Minutes()), "worker_warn_before_minutes": 1,
		}, consoles: func(wk worker.Worker) (Console, error) {
			c, err := w.console(wk)
			if err != nil {
				return nil, err
			}
			return slowConsole{c.(console), answer}, nil
		}})
		defer r.stop()
		for range n {
			w.mu.Lock()
			m := w.add("running")
			m.LaunchTime, m.PrivateIP = deadline.Add(-timeout), "10.0.0.1"
			id := m.ID
			w.mu.Unlock()
			is, err := r.fleet.ImportWorker(t.Context(), operator, fleet.ImportedWorker{AWSRegion: region0, EC2InstanceID: id})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.fleet.ArmWorker(t.Context(), operator, is.ID, true); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Until(deadline) + 2*interval)
		mu.Lock()
		defer mu.Unlock()
		if len(sent) != n {
			t.Errorf("%d of %d workers were told to stop within %s of their deadline", len(sent), n, 2*interval)
		}
		for _, at := range sent {
			if at < 0 {
				t.Errorf("a worker was told to stop %s before its deadline", -at)
			}
		}
	})
}
