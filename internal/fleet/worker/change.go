package worker

import (
	"errors"
	"fmt"
	"time"

	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/store"
)

// Pool is the record of the fleet-wide limits. It changes in the same
// transaction as every worker that goes up or down, so that floor and cooldown
// apply across servers.
type Pool struct {
	// Up counts the workers that run and that are not intended to stop.
	Up              int        `json:"up"`
	LastScaleDownAt *time.Time `json:"last_scale_down_at,omitempty"`
	// Spent counts against the budgets.
	Spent policy.Ledger `json:"spent,omitempty"`
}

var poolCodec = store.Codec[Pool]{Version: 1}

func DecodePool(v store.Value) (Pool, error) {
	if !v.Exists() {
		return Pool{}, nil
	}
	return poolCodec.Decode(v.Key, v.Data)
}

// Tx is a change of one worker in progress. It may be repeated on fresh state
// until the store accepts it.
type Tx struct {
	Now      time.Time
	Settings settings.Settings
	// Pool and Halted are read if the change requested them.
	Pool   Pool
	Halted bool

	By      audit.Actor
	entries []audit.Entry
	pooled  bool
	spent   bool // Pool.Spent was changed
}

// NewTx begins a change of a worker by someone.
func NewTx(now time.Time, s settings.Settings, by audit.Actor) *Tx {
	return &Tx{Now: now, Settings: s, By: by}
}

// Limit gives the change the pool and whether automatic actions are halted.
func (tx *Tx) Limit(p Pool, halted bool) { tx.Pool, tx.Halted, tx.pooled = p, halted, true }

// Spend replaces the amounts spent of the budgets.
func (tx *Tx) Spend(l policy.Ledger) { tx.Pool.Spent, tx.spent = l, true }

// Note adds an audit entry to the change. It fills in At, By and the worker.
func (tx *Tx) Note(e audit.Entry) {
	if e.By == (audit.Actor{}) {
		e.By = tx.By
	}
	tx.entries = append(tx.entries, e)
}

// ErrPool requests the same change with the pool in its transaction.
var ErrPool = errors.New("the pool is needed")

// Writes returns the writes that turn old, whose record is was, into w, without
// those of the pool. The worker's own write comes first.
func (tx *Tx) Writes(was []byte, old, w *Worker) ([]store.Op, error) {
	if old.Status != w.Status {
		if err := power.WorkerTable.Check(old.Status, w.Status); err != nil {
			return nil, fmt.Errorf("cannot change worker %q: %w", w.ID, err)
		}
		w.StatusSince = tx.Now
		tx.moved(old.Status, w.Status, w.StatusReason)
	}
	data, err := w.Encode()
	if err != nil {
		return nil, err
	}
	var ops []store.Op
	if string(was) != string(data) {
		ops = append(ops, store.Put(Key(w.ID), data))
	}
	if w.EC2InstanceID != old.EC2InstanceID && w.EC2InstanceID != "" {
		op, err := InstanceOp(w)
		if err != nil {
			return nil, err
		}
		ops = append(ops, op)
	}
	for i, e := range tx.entries {
		// A nanosecond apart, so that the log keeps their order.
		at := tx.Now.Add(time.Duration(i))
		e.At, e.WorkerID, e.WorkerName, e.Region = at, w.ID, w.Name, w.AWSRegion
		note, err := audit.Ops(e)
		if err != nil {
			return nil, err
		}
		ops = append(ops, note...)
	}
	return ops, nil
}

// moved adds a change of status to the change's audit entries.
func (tx *Tx) moved(from, to power.Worker, why string) {
	if len(tx.entries) == 0 {
		tx.Note(audit.Entry{Action: "status_changed", Detail: why})
	}
	e := &tx.entries[0]
	e.From, e.To = from, to
	e.Events = append(e.Events, audit.EventStatus)
}

// PoolOp returns the write of the pool if the worker went up or down, or if fn changed it.
func (tx *Tx) PoolOp(old, w *Worker) (*store.Op, error) {
	delta := 0
	switch before, after := old.Counted(), w.Counted(); {
	case before && !after:
		delta = -1
	case !before && after:
		delta = 1
	}
	if delta == 0 && !tx.scaled() && !tx.spent {
		return nil, nil
	}
	if !tx.pooled {
		return nil, ErrPool
	}
	tx.Pool.Up = max(0, tx.Pool.Up+delta)
	data, err := poolCodec.Encode(PoolKey, tx.Pool)
	op := store.Put(PoolKey, data)
	return &op, err
}

// scaled reports whether the change starts the cooldown.
func (tx *Tx) scaled() bool {
	return tx.Pool.LastScaleDownAt != nil && tx.Pool.LastScaleDownAt.Equal(tx.Now)
}

// instanceRef records the owner of an instance, so that none is imported twice.
type instanceRef struct {
	Worker string `json:"worker"`
}

var instanceCodec = store.Codec[instanceRef]{Version: 1}

func InstanceKey(region, instance string) string { return "instances/" + region + "/" + instance }

// InstanceOwner returns the ID of the worker in the record at an instance's key.
func InstanceOwner(v store.Value) (string, error) {
	ref, err := instanceCodec.Decode(v.Key, v.Data)
	return ref.Worker, err
}

func InstanceOp(w *Worker) (store.Op, error) {
	key := InstanceKey(w.AWSRegion, w.EC2InstanceID)
	data, err := instanceCodec.Encode(key, instanceRef{Worker: w.ID})
	return store.Put(key, data), err
}
