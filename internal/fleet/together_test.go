package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// slowStore answers each commit after a delay, and counts the commits.
type slowStore struct {
	store.Store
	slow    atomic.Bool
	commits atomic.Int64
}

func (s *slowStore) Commit(ctx context.Context, t store.Txn) (store.Result, error) {
	if s.slow.Load() {
		s.commits.Add(1)
		if err := delay.For(ctx, 10*time.Millisecond); err != nil {
			return store.Result{}, err
		}
	}
	return s.Store.Commit(ctx, t)
}

// TestPausesTogether checks that idle workers that are decided at the same moment are
// paused in few transactions, and that floor, cooldown and budget hold exactly as if
// each had been decided alone. A worker whose shard is lost must not be paused, one
// that has changed must be stale, and a user's stop must not wait for them.
func TestPausesTogether(t *testing.T) {
	for range scaletest.N(t, 10) {
		rng := scaletest.Random(t)
		synctest.Test(t, func(t *testing.T) { pausesTogether(t, rng) })
	}
}

func pausesTogether(t *testing.T, rng *rand.Rand) {
	ctx := t.Context()
	c := mem.New(mem.Options{}).Client()
	defer c.Close()
	db := &slowStore{Store: c}
	seal, err := sealed.NewSealer([]byte(strings.Repeat("k", 32)))
	errtest.None(t, err)
	const n = 64
	floor, scaleDown := rng.IntN(n), rng.IntN(3) == 0
	fl, err := fleet.New(fleet.Options{Store: db, ID: "f1", Seal: seal, File: settings.Layer{Values: map[string]any{
		"min_workers": floor, "worker_warn_before_minutes": 0, "scale_down_enabled": scaleDown, "max_workers_per_region": 2 * n,
		"scale_down_cooldown_defers_pause": true}}})
	if err != nil {
		t.Fatal(err)
	}
	errtest.Get(fl.PutTemplate(ctx, ada, launch.Template{Name: "small", InstanceType: "t3.small", AMINameFilter: "cml*", Enabled: true}, 0))(t)
	budget := n + 1
	if rng.IntN(2) == 0 {
		budget = rng.IntN(n)
		errtest.Get(fl.PutBudget(ctx, ada, policy.Budget{Name: "few", For: policy.Stops, MaxActions: &budget, PerMinutes: 60}))(t)
	}
	var workers []worker.Worker
	for i := range n {
		w, err := fl.CreateWorker(ctx, ada, fleet.NewWorker{Name: fmt.Sprint("w", i), TemplateName: "small"})
		if err != nil {
			t.Fatal(err)
		}
		workers = append(workers, put(t, fl, w.ID, power.WorkerRunning))
	}
	errtest.None(t, fl.Refresh(ctx))
	// Each decision uses the view of one of four shards. One of the shards may
	// already be held by another server.
	lost := rng.IntN(2) == 0
	var shards []*fleet.Fleet
	for i := range 4 {
		key := fmt.Sprint("shards/", i)
		res, err := c.Commit(ctx, store.Txn{Then: []store.Op{store.Put(key, []byte(`{}`))}})
		if err != nil {
			t.Fatal(err)
		}
		at := res.Revision
		if lost && i == 3 {
			at--
		}
		shards = append(shards, fl.Guarded(store.CreatedAt(key, at)))
	}
	stale := rng.IntN(n)
	errtest.Get(fl.SnoozeWorker(ctx, ada, workers[stale].ID, time.Now().Add(time.Minute)))(t)
	time.Sleep(3 * time.Hour)
	db.slow.Store(true)

	var mu sync.Mutex
	var all sync.WaitGroup
	actions := map[worker.Action]int{}
	began := time.Now()
	for i, w := range workers {
		all.Go(func() {
			out, err := shards[i%4].Decide(ctx, w.ID, worker.Judgement{At: w.Revision(), Now: time.Now(),
				Rules:    func(w *worker.Worker) policy.Resolved { return fl.PolicyWith(time.Now(), w, nil) },
				Readings: []idle.Reading{{Signal: worker.SourceCML, State: idle.Quiet, At: time.Now()}}})
			switch {
			case lost && i%4 == 3 && i != stale:
				// A decision that changes nothing succeeds without the shard.
				if stored, read := fl.Worker(ctx, w.ID); !errors.Is(err, store.ErrLeaseLost) && (err != nil || out.Action != worker.ActNothing) || read != nil || stored.Intent != nil {
					t.Errorf("of a lost shard: %s, %v; the record has %+v, %v", out.Action, err, stored.Intent, read)
				}
				return
			case i == stale:
				if !errors.Is(err, fleet.ErrStale) && !errors.Is(err, store.ErrLeaseLost) {
					t.Errorf("of a changed worker: %v", err)
				}
				return
			case err != nil:
				t.Error(err)
				return
			}
			if err := out.Decision.Replay(); err != nil {
				t.Error(err)
			}
			if stored, err := fl.Worker(ctx, w.ID); err != nil || stored.Revision() != out.Worker.Revision() || (stored.Intent != nil) != (out.Action != worker.ActNothing) {
				t.Errorf("%s, and the record has %+v at %d, not %d: %v", out.Action, stored.Intent, stored.Revision(), out.Worker.Revision(), err)
			}
			mu.Lock()
			defer mu.Unlock()
			actions[out.Action]++
		})
	}
	all.Wait()
	commits := db.commits.Load()
	mayPause := n - 1
	if lost {
		mayPause -= n / 4
		if stale%4 == 3 {
			mayPause++
		}
	}
	want := max(0, min(mayPause, n-floor, budget))
	kind := worker.ActPause
	if scaleDown {
		kind, want = worker.ActDrain, min(want, 1) // the cooldown holds back the others
	}
	if got := actions[kind]; got != want || actions[worker.ActPause]+actions[worker.ActDrain] != want {
		t.Errorf("%v, want %d of kind %s: %d of %d may pause, floor %d, budget %d", actions, want, kind, mayPause, n, floor, budget)
	}
	pool, err := fl.Pool(ctx)
	if err != nil || pool.Up != n-want {
		t.Errorf("%d are up, want %d: %v", pool.Up, n-want, err)
	}
	t.Logf("%d transactions in %s for %d workers, %d paused, a shard lost: %t", commits, time.Since(began), n, want, lost)
	if _, err := fl.StopWorker(ctx, ada, workers[0].ID); err != nil {
		if _, refused := errors.AsType[*failure.Refused](err); !refused {
			t.Error(err)
		}
	}
}

// TestFewTransactions checks that one transaction pauses up to sixteen workers that
// are decided at the same moment, and that a user's stop goes first.
func TestFewTransactions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		c := mem.New(mem.Options{}).Client()
		defer c.Close()
		db := &slowStore{Store: c}
		seal, err := sealed.NewSealer([]byte(strings.Repeat("k", 32)))
		errtest.None(t, err)
		const n = 320
		fl, err := fleet.New(fleet.Options{Store: db, ID: "f1", Seal: seal, File: settings.Layer{Values: map[string]any{
			"worker_warn_before_minutes": 0, "max_workers_per_region": 2 * n}}})
		if err != nil {
			t.Fatal(err)
		}
		errtest.Get(fl.PutTemplate(ctx, ada, launch.Template{Name: "small", InstanceType: "t3.small", AMINameFilter: "cml*", Enabled: true}, 0))(t)
		var workers []worker.Worker
		for i := range n + 1 {
			w, err := fl.CreateWorker(ctx, ada, fleet.NewWorker{Name: fmt.Sprint("w", i), TemplateName: "small"})
			if err != nil {
				t.Fatal(err)
			}
			workers = append(workers, put(t, fl, w.ID, power.WorkerRunning))
		}
		time.Sleep(3 * time.Hour)
		db.slow.Store(true)
		began := time.Now()
		var all sync.WaitGroup
		for _, w := range workers[1:] {
			all.Go(func() {
				out, err := fl.Decide(ctx, w.ID, worker.Judgement{At: w.Revision(), Now: time.Now(),
					Rules:    func(w *worker.Worker) policy.Resolved { return fl.PolicyWith(time.Now(), w, nil) },
					Readings: []idle.Reading{{Signal: worker.SourceCML, State: idle.Quiet, At: time.Now()}}})
				if err != nil || out.Action != worker.ActPause {
					t.Errorf("%s, %v", out.Action, err)
				}
			})
		}
		time.Sleep(time.Millisecond)
		if _, err := fl.StopWorker(ctx, ada, workers[0].ID); err != nil {
			t.Error(err)
		}
		if d := time.Since(began); d > 200*time.Millisecond {
			t.Errorf("a user's stop took %s behind %d pauses", d, n)
		}
		all.Wait()
		if got, most := db.commits.Load(), int64(3*n/16); got > most {
			t.Errorf("%d transactions for %d pauses, at most %d wanted", got, n, most)
		}
	})
}
