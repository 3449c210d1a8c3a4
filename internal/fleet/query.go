package fleet

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/store"
)

// Worker reads one record. Errors: NotFound, Invalid.
func (f *Fleet) Worker(ctx context.Context, id string) (Worker, error) {
	if err := failure.CheckName("worker_id", id); err != nil {
		return Worker{}, err
	}
	v, err := store.Get(ctx, f.store, workerKey(id))
	if errors.Is(err, store.ErrNotFound) {
		return Worker{}, &failure.NotFound{Kind: "worker", Name: id}
	}
	if err != nil {
		return Worker{}, fmt.Errorf("cannot read worker %q: %w", id, err)
	}
	return DecodeWorker(v)
}

// WorkerFilter selects workers; empty fields select all.
type WorkerFilter struct {
	Region, Template, Owner string
	Status                  power.Worker
	Tags                    map[string]string
	WithTerminated          bool
}

// Matches reports whether w is selected.
func (q WorkerFilter) Matches(w *Worker) bool {
	if q.Region != "" && w.AWSRegion != q.Region || q.Template != "" && w.TemplateName != q.Template ||
		q.Owner != "" && w.Owner != q.Owner || q.Status != "" && w.Status != q.Status ||
		w.Status == power.WorkerTerminated && !q.WithTerminated && q.Status != power.WorkerTerminated {
		return false
	}
	for k, v := range q.Tags {
		if got, ok := w.Tags[k]; !ok || v != "" && got != v {
			return false
		}
	}
	return true
}

// WorkerPage is one page of a listing, by ID. Next is empty at the end.
type WorkerPage struct {
	Workers []Worker `json:"workers"`
	Next    string   `json:"next,omitempty"`
}

// Workers lists the workers that q selects, at most limit (0 means 100, at most
// 1000), beginning after the ID after.
func (f *Fleet) Workers(ctx context.Context, q WorkerFilter, after string, limit int) (WorkerPage, error) {
	switch {
	case limit == 0:
		limit = 100
	case limit < 0 || limit > 1000:
		return WorkerPage{}, failure.Invalidf("limit", "%d is not between 1 and 1000", limit)
	case len(after) > 128:
		return WorkerPage{}, failure.Invalidf("after", "it is not a cursor")
	}
	out := WorkerPage{Workers: []Worker{}}
	key := workerKey(after)
	for {
		page, err := f.store.Range(ctx, store.Query{Keys: WorkerKeys(), After: key, Limit: 500})
		if err != nil {
			return WorkerPage{}, fmt.Errorf("cannot list the workers: %w", err)
		}
		for _, v := range page.Values {
			key = v.Key
			w, err := DecodeWorker(v)
			if err != nil {
				return WorkerPage{}, err
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
func (f *Fleet) WorkersByID(ctx context.Context, ids []string) ([]Worker, error) {
	out := make([]Worker, 0, len(ids))
	for part := range slices.Chunk(ids, store.MaxOps) {
		keys := make([]string, len(part))
		for i, id := range part {
			keys[i] = workerKey(id)
		}
		res, err := f.store.Commit(ctx, store.Txn{Read: keys})
		if err != nil {
			return nil, fmt.Errorf("cannot list the workers: %w", err)
		}
		for _, v := range res.Read {
			if !v.Exists() {
				continue
			}
			w, err := DecodeWorker(v)
			if err != nil {
				return nil, err
			}
			out = append(out, w)
		}
	}
	return out, nil
}

// StatusOf computes the idle status of a worker from its record, its effective
// policy and its readings. Without readings every signal is unknown, and the
// status says so. Only the worker's owner plans its next check. shadow means
// that the whole server is in dry run.
func (f *Fleet) StatusOf(now time.Time, w *Worker, r *policy.Resolved, readings []idle.Reading, guards []idle.Block, shadow bool) IdleStatus {
	halt := f.Halted()
	guards = slices.Concat(guards, Standstill(w, r, halt, shadow))
	d := Case{Now: now, Worker: w, Rules: r, Readings: readings, Guards: guards, Budget: f.StopBudget(now, w), ScaleDown: f.Settings().ScaleDownEnabled}.Judge()
	s := f.Settings()
	l := limits(w, d.Reason, f.now.pool.Load(), &s)
	if act, guard := Arbitrate(now, d.Verdict, l); d.Verdict.Eligible {
		d.Decision = l.hold(d.Decision, act, guard)
	}
	d.Verdict.NextIdleCheckAt = time.Time{}
	st := IdleStatus{
		WorkerID: w.ID, Verdict: d.Verdict, IdleDuration: d.Verdict.IdleMinutes * 60,
		TimeoutMinutes: time.Duration(d.Policy.Timeout).Minutes(), AutoPauseEnabled: d.Policy.AutoPause && d.Policy.Detection,
		CheckedAt: d.Verdict.At, Readings: d.Evidence.Readings, ReadingsUnknown: len(readings) == 0, PolicyName: d.Policy.Name,
	}
	if !shadow {
		st.Expiry = w.Ends(now, r, halt)
	}
	return st
}

// Standstill returns the blocks of every automatic action on w: a halt, and dry
// run. Every judgement of w, for the record, for an answer or for the action
// itself, gets them from here.
func Standstill(w *Worker, r *policy.Resolved, h halt.Halt, shadow bool) []idle.Block {
	var out []idle.Block
	if h.On {
		out = append(out, h.Block())
	}
	switch {
	case !w.Armed:
		out = append(out, idle.Block{Code: idle.Shadow, Sentence: "It is in dry-run mode until it is armed: lull decides and records, but takes no action."})
	case r.Shadow:
		out = append(out, idle.Block{Code: idle.Shadow, Sentence: shadowed(r)})
	case shadow:
		out = append(out, idle.Block{Code: idle.Shadow, Sentence: "It is in dry-run mode: lull decides and records, but takes no action."})
	}
	return out
}

// shadowed returns the sentence of the block of a policy in dry run.
func shadowed(r *policy.Resolved) string {
	return "Its policy is in dry-run mode (" + r.From["shadow"].String() + "): lull decides and records, but takes no action."
}

// GetWorkerIdleStatus judges a worker by its stored record alone, for answers
// when the owner of the live readings cannot be reached.
func (f *Fleet) GetWorkerIdleStatus(ctx context.Context, id string) (IdleStatus, error) {
	w, err := f.Worker(ctx, id)
	if err != nil {
		return IdleStatus{}, err
	}
	p, err := f.Policy(ctx, &w)
	if err != nil {
		return IdleStatus{}, err
	}
	return f.StatusOf(time.Now(), &w, &p, nil, nil, false), nil
}

// GetWorkerActivity returns the activity group of a worker.
func (f *Fleet) GetWorkerActivity(ctx context.Context, id string) (Activity, error) {
	w, err := f.Worker(ctx, id)
	if err != nil {
		return Activity{}, err
	}
	p, err := f.Policy(ctx, &w)
	if err != nil {
		return Activity{}, err
	}
	v := Case{Now: time.Now(), Worker: &w, Rules: &p}.idle().Verdict
	return Activity{
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
func (f *Fleet) GetWorkerTelemetryEvents(ctx context.Context, id string) ([]Event, error) {
	w, err := f.Worker(ctx, id)
	return w.RecentActivityEvents, err
}

// EC2State is EC2's state of a worker's instance.
type EC2State struct {
	State      string            `json:"state"`
	Tags       map[string]string `json:"tags"`
	LaunchTime *time.Time        `json:"launch_time"`
	ObservedAt *time.Time        `json:"observed_at,omitempty"`
}

// GetWorkerEC2State returns the recorded state, for use when there is no live
// observation; observed_at is then null.
func (f *Fleet) GetWorkerEC2State(ctx context.Context, id string) (EC2State, error) {
	w, err := f.Worker(ctx, id)
	return EC2State{State: w.EC2State, Tags: w.Tags}, err
}

// Request is a command that only the owner of a worker can carry out. It is
// durable until the owner has answered it, or for RequestTTL.
type Request struct {
	ID         string        `json:"id"`
	Kind       string        `json:"kind"` // RequestDetect or RequestReconcile
	WorkerID   string        `json:"worker_id"`
	By         audit.Actor   `json:"by"`
	At         time.Time     `json:"at"`
	Force      bool          `json:"force,omitempty"`
	AnsweredAt *time.Time    `json:"answered_at,omitempty"`
	Detect     *DetectResult `json:"detect,omitempty"`
	Error      string        `json:"error,omitempty"`
}

// Kinds of requests, and how long one is kept.
const (
	RequestDetect    = "detect-idle"
	RequestReconcile = "reconcile"
	RequestTTL       = 10 * time.Minute
)

var requestCodec = store.Codec[Request]{Version: 1}

// DecodeRequest decodes a request from a watch or a listing.
func DecodeRequest(v store.Value) (Request, error) { return requestCodec.Decode(v.Key, v.Data) }

// AskOwner writes a request for the owner of a worker. Await waits for its
// answer. Errors: NotFound, Invalid.
func (f *Fleet) AskOwner(ctx context.Context, by audit.Actor, kind, worker string, force bool) (Request, error) {
	if _, err := f.Worker(ctx, worker); err != nil {
		return Request{}, err
	}
	if kind != RequestDetect && kind != RequestReconcile {
		return Request{}, failure.Invalidf("kind", "%.40q is not a kind of request", kind)
	}
	r := Request{ID: strings.ToLower(rand.Text()), Kind: kind, WorkerID: worker, By: by, At: time.Now().UTC().Round(0), Force: force}
	_, err := store.Update(ctx, f.store, requestPrefix+r.ID, func(store.Value) ([]byte, []store.Op, error) {
		data, err := requestCodec.Encode(requestPrefix+r.ID, r)
		return data, nil, err
	})
	return r, err
}

// Request reads a request again. Errors: NotFound.
func (f *Fleet) Request(ctx context.Context, id string) (Request, error) {
	if err := failure.CheckName("request", id); err != nil {
		return Request{}, err
	}
	v, err := store.Get(ctx, f.store, requestPrefix+id)
	if errors.Is(err, store.ErrNotFound) {
		return Request{}, &failure.NotFound{Kind: "request", Name: id}
	}
	if err != nil {
		return Request{}, fmt.Errorf("cannot read request %q: %w", id, err)
	}
	return DecodeRequest(v)
}

// Await waits until a request is answered or ctx ends. In the latter case it
// returns the unanswered request without an error.
func (f *Fleet) Await(ctx context.Context, r Request) (Request, error) {
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	batches := f.store.Watch(watch, store.Key(requestPrefix+r.ID), 0)
	for {
		now, err := f.Request(context.WithoutCancel(ctx), r.ID)
		if err != nil || now.AnsweredAt != nil {
			return now, err
		}
		select {
		case <-ctx.Done():
			return now, nil
		case b, ok := <-batches:
			if !ok || b.Err != nil {
				return now, nil
			}
		}
	}
}

// Answer writes the owner's answer to a request.
func (f *Fleet) Answer(ctx context.Context, r Request) error {
	now := time.Now().UTC().Round(0)
	r.AnsweredAt = &now
	key := requestPrefix + r.ID
	_, err := store.Update(ctx, f.store, key, func(old store.Value) ([]byte, []store.Op, error) {
		if !old.Exists() {
			return nil, nil, nil
		}
		data, err := requestCodec.Encode(key, r)
		return data, nil, err
	}, f.guards...)
	return err
}

// DropRequest removes a request that is older than RequestTTL.
func (f *Fleet) DropRequest(ctx context.Context, id string) error {
	_, err := store.Update(ctx, f.store, requestPrefix+id, func(store.Value) ([]byte, []store.Op, error) {
		return nil, nil, nil
	}, f.guards...)
	return err
}

// Discovered is an instance that discovery found and that is not imported yet.
type Discovered struct {
	Region        string            `json:"aws_region"`
	Account       string            `json:"account,omitempty"`
	EC2InstanceID string            `json:"ec2_instance_id"`
	Name          string            `json:"name,omitempty"`
	AMIName       string            `json:"ami_name,omitempty"`
	State         string            `json:"state"`
	Tags          map[string]string `json:"tags,omitempty"`
	FirstSeenAt   time.Time         `json:"first_seen_at"`
	// Orphan means that it carries this fleet's tag, but no worker is known for
	// it.
	Orphan bool `json:"orphan,omitempty"`
}

var discoveredCodec = store.Codec[Discovered]{Version: 1}

// Discovered lists the findings of discovery.
func (f *Fleet) Discovered(ctx context.Context) ([]Discovered, error) {
	page, err := store.List(ctx, f.store, store.Prefix(foundPrefix))
	if err != nil {
		return nil, err
	}
	out := make([]Discovered, 0, len(page.Values))
	for _, v := range page.Values {
		d, err := discoveredCodec.Decode(v.Key, v.Data)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// PutDiscovered records a finding; gone removes it.
func (f *Fleet) PutDiscovered(ctx context.Context, d Discovered, gone bool) error {
	key := foundPrefix + d.Region + "/" + d.EC2InstanceID
	_, err := store.Update(ctx, f.store, key, func(old store.Value) ([]byte, []store.Op, error) {
		if gone {
			return nil, nil, nil
		}
		if old.Exists() {
			was, err := discoveredCodec.Decode(key, old.Data)
			if err != nil {
				return nil, nil, err
			}
			d.FirstSeenAt = was.FirstSeenAt
		}
		data, err := discoveredCodec.Encode(key, d)
		return data, nil, err
	}, f.guards...)
	return err
}

// WorkerOf returns the ID of the worker that an instance belongs to, or "".
func (f *Fleet) WorkerOf(ctx context.Context, region, instance string) (string, error) {
	v, err := store.Get(ctx, f.store, instanceKey(region, instance))
	if errors.Is(err, store.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("cannot look up instance %q: %w", instance, err)
	}
	ref, err := instanceCodec.Decode(v.Key, v.Data)
	return ref.Worker, err
}
