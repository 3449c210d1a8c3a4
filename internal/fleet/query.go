package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Worker reads one record. Errors: NotFound, Invalid.
func (f *Fleet) Worker(ctx context.Context, id string) (worker.Worker, error) {
	if err := failure.CheckName("worker_id", id); err != nil {
		return worker.Worker{}, err
	}
	v, err := store.Get(ctx, f.store, worker.Key(id))
	if errors.Is(err, store.ErrNotFound) {
		return worker.Worker{}, &failure.NotFound{Kind: "worker", Name: id}
	}
	if err != nil {
		return worker.Worker{}, fmt.Errorf("cannot read worker %q: %w", id, err)
	}
	return worker.Decode(v)
}

// Workers lists workers that q selects in the order of their IDs, starting after the
// ID after. It returns at most limit; 0 means 100, and the maximum is 1000.
func (f *Fleet) Workers(ctx context.Context, q worker.Filter, after string, limit int) (worker.Page, error) {
	switch {
	case limit == 0:
		limit = 100
	case limit < 0 || limit > 1000:
		return worker.Page{}, failure.Invalidf("limit", "%d is not between 1 and 1000", limit)
	case len(after) > 128:
		return worker.Page{}, failure.Invalidf("after", "it is not a cursor")
	}
	out := worker.Page{Workers: []worker.Worker{}}
	key := worker.Key(after)
	for {
		page, err := f.store.Range(ctx, store.Query{Keys: worker.Keys(), After: key, Limit: 500})
		if err != nil {
			return worker.Page{}, fmt.Errorf("cannot list the workers: %w", err)
		}
		for _, v := range page.Values {
			key = v.Key
			w, err := worker.Decode(v)
			if err != nil {
				return worker.Page{}, err
			}
			if !q.Matches(&w) {
				continue
			}
			if out.Workers = append(out.Workers, w); len(out.Workers) == limit {
				out.Next = w.ID
				return out, nil
			}
		}
		if !page.More {
			return out, nil
		}
	}
}

// WorkersByID reads workers in the order of ids, and omits those that are gone.
func (f *Fleet) WorkersByID(ctx context.Context, ids []string) ([]worker.Worker, error) {
	out := make([]worker.Worker, 0, len(ids))
	for part := range slices.Chunk(ids, store.MaxOps) {
		keys := make([]string, len(part))
		for i, id := range part {
			keys[i] = worker.Key(id)
		}
		res, err := f.store.Commit(ctx, store.Txn{Read: keys})
		if err != nil {
			return nil, fmt.Errorf("cannot list the workers: %w", err)
		}
		for _, v := range res.Read {
			if !v.Exists() {
				continue
			}
			w, err := worker.Decode(v)
			if err != nil {
				return nil, err
			}
			out = append(out, w)
		}
	}
	return out, nil
}

// StatusOf computes the idle status of a worker from its record, its effective policy
// and its readings. Without readings, every signal is unknown and ReadingsUnknown is
// set. The time of the next check is left out, because only the worker's owner plans
// it. shadow means that the whole server is in dry run.
func (f *Fleet) StatusOf(now time.Time, w *worker.Worker, r *policy.Resolved, readings []idle.Reading, guards []idle.Block, shadow bool) worker.IdleStatus {
	halt := f.Halted()
	guards = slices.Concat(guards, worker.Standstill(w, r, halt, shadow))
	d := worker.Case{Now: now, Worker: w, Rules: r, Readings: readings, Guards: guards, Budget: f.StopBudget(now, w), ScaleDown: f.Settings().ScaleDownEnabled}.Judge()
	s := f.Settings()
	l := worker.LimitsOf(w, d.Reason, f.now.pool.Load(), &s)
	if act, guard := worker.Arbitrate(now, d.Verdict, l); d.Verdict.Eligible {
		d.Decision = l.Hold(d.Decision, act, guard)
	}
	d.Verdict.NextIdleCheckAt = time.Time{}
	st := worker.IdleStatus{
		WorkerID: w.ID, Verdict: d.Verdict, IdleDuration: d.Verdict.IdleMinutes * 60,
		TimeoutMinutes: time.Duration(d.Policy.Timeout).Minutes(), AutoPauseEnabled: d.Policy.AutoPause && d.Policy.Detection,
		CheckedAt: d.Verdict.At, Readings: d.Evidence.Readings, ReadingsUnknown: len(readings) == 0, PolicyName: d.Policy.Name,
	}
	if !shadow {
		st.Expiry = w.Ends(now, r, halt)
	}
	return st
}

// GetWorkerIdleStatus returns the idle status from the stored record alone, for use
// when the worker's owner cannot be reached.
func (f *Fleet) GetWorkerIdleStatus(ctx context.Context, id string) (worker.IdleStatus, error) {
	w, err := f.Worker(ctx, id)
	if err != nil {
		return worker.IdleStatus{}, err
	}
	p, err := f.Policy(ctx, &w)
	if err != nil {
		return worker.IdleStatus{}, err
	}
	return f.StatusOf(time.Now(), &w, &p, nil, nil, false), nil
}

// GetWorkerActivity returns the activity group of a worker.
func (f *Fleet) GetWorkerActivity(ctx context.Context, id string) (worker.Activity, error) {
	w, err := f.Worker(ctx, id)
	if err != nil {
		return worker.Activity{}, err
	}
	p, err := f.Policy(ctx, &w)
	if err != nil {
		return worker.Activity{}, err
	}
	v := worker.Case{Now: time.Now(), Worker: &w, Rules: &p}.Idle().Verdict
	return worker.Activity{
		WorkerID: w.ID, LastActivityAt: w.LastActivityAt, LastActivityCheckAt: w.LastActivityCheckAt,
		RecentActivityEvents: w.RecentActivityEvents, AutoPauseCount: w.AutoPauseCount, ManualPauseCount: w.ManualPauseCount,
		AutoResumeCount: w.AutoResumeCount, ManualResumeCount: w.ManualResumeCount,
		ExternalPauseCount: w.ExternalPauseCount, ExternalResumeCount: w.ExternalResumeCount,
		LastPausedAt: w.LastPausedAt, LastResumedAt: w.LastResumedAt, LastPausedBy: w.LastPausedBy, LastResumedBy: w.LastResumedBy,
		PauseReason: w.PauseReason, SnoozedUntil: w.SnoozedUntil, SnoozedBy: w.SnoozedBy,
		InSnoozePeriod: v.InSnoozePeriod, SnoozeUntil: v.SnoozeUntil,
		NextIdleCheckAt: w.NextIdleCheckAt, TargetPauseAt: w.TargetPauseAt, IsIdleDetectionEnabled: w.IsIdleDetectionEnabled,
	}, nil
}

// GetWorkerTelemetryEvents returns the last relevant events, newest first.
func (f *Fleet) GetWorkerTelemetryEvents(ctx context.Context, id string) ([]worker.Event, error) {
	w, err := f.Worker(ctx, id)
	return w.RecentActivityEvents, err
}

// GetWorkerEC2State returns the state in the record, for use without a live
// observation. Its observed_at is null.
func (f *Fleet) GetWorkerEC2State(ctx context.Context, id string) (worker.EC2State, error) {
	w, err := f.Worker(ctx, id)
	return worker.EC2State{State: w.EC2State, Tags: w.Tags}, err
}
