package history

import (
	"context"
	"testing"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// reads is a store that counts the records that are read from it.
type reads struct {
	store.Store
	records int
}

func (r *reads) Range(ctx context.Context, q store.Query) (store.Page, error) {
	p, err := r.Store.Range(ctx, q)
	if !q.KeysOnly {
		r.records += len(p.Values)
	}
	return p, err
}

func (r *reads) Commit(ctx context.Context, t store.Txn) (store.Result, error) {
	res, err := r.Store.Commit(ctx, t)
	r.records += len(res.Read)
	return res, err
}

// TestAt checks a worker's power at past moments of a long life, and limits how many
// records are read for each, and for the savings of the whole fleet.
func TestAt(t *testing.T) {
	c := mem.New(mem.Options{}).Client()
	defer c.Close()
	db := &reads{Store: c}
	f, err := fleet.New(fleet.Options{Store: db, ID: "f1"})
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var ops []store.Op
	write := func(minute int, e audit.Entry) {
		t.Helper()
		e.At, e.WorkerID = begun.Add(time.Duration(minute)*time.Minute), "w"
		more, err := audit.Ops(e)
		if err == nil && len(ops) > store.MaxOps-3 {
			_, err = c.Commit(t.Context(), store.Txn{Then: ops})
			ops = nil
		}
		if ops = append(ops, more...); err != nil {
			t.Fatal(err)
		}
	}
	move := func(minute int, from, to power.Worker, by, reason string, events ...string) {
		write(minute, audit.Entry{Action: "moved", From: from, To: to, By: audit.Actor{Name: by}, Reason: reason, Events: events})
	}
	move(0, "", power.WorkerPending, "ada", "")
	move(5, power.WorkerPending, power.WorkerStarting, "c", "")
	move(6, power.WorkerStarting, power.WorkerRunning, "c", "")
	for m := 10; m < 20_000; m += 5 {
		write(m, audit.Entry{Action: "activity_updated"})
	}
	write(20_000, audit.Entry{Action: "pause_intended", Reason: "idle_timeout", Events: []string{audit.EventPaused}, By: audit.Actor{Name: "ben"}})
	move(20_001, power.WorkerRunning, power.WorkerStopping, "c", "")
	move(20_002, power.WorkerStopping, power.WorkerStopped, "c", "idle_timeout")
	move(21_000, power.WorkerStopped, power.WorkerStarting, "c", "")
	write(21_001, audit.Entry{Action: "resumed", From: power.WorkerStarting, To: power.WorkerRunning, By: audit.Actor{Name: "c"}, Reason: "manual", Detail: "eve", Events: []string{audit.EventResumed}})
	for m := 21_010; m < 24_000; m++ {
		write(m, audit.Entry{Action: "activity_updated"})
	}
	errtest.Get(c.Commit(t.Context(), store.Txn{Then: ops}))(t)
	w := &worker.Worker{ID: "w", Status: power.WorkerRunning}
	for _, q := range []struct {
		minute, paused, resumed int // minute of the last pause and resume; 0 for none
		state                   power.Worker
		reason                  string
		most                    int
	}{
		{-10, 0, 0, "", "", 1200},
		{1, 0, 0, power.WorkerPending, "", 5},
		{19_000, 0, 0, power.WorkerRunning, "", 5100}, // a first launch is no resume
		{20_001, 20_001, 0, power.WorkerStopping, "idle_timeout", 5100},
		{20_500, 20_001, 0, power.WorkerStopped, "idle_timeout", 5100},
		{21_005, 20_001, 21_001, power.WorkerRunning, "idle_timeout", 110},
		{23_999, 20_001, 21_001, power.WorkerRunning, "idle_timeout", 3200},
	} {
		db.records = 0
		got, err := At(t.Context(), f, w, begun.Add(time.Duration(q.minute)*time.Minute))
		errtest.None(t, err)
		if got.State != string(q.state) || db.records > q.most {
			t.Errorf("minute %d: %q, want %q; read %d records, want at most %d", q.minute, got.State, q.state, db.records, q.most)
		}
		if came := got.Created; (came != nil) != (q.minute < 0) || came != nil && came.By.Name != "ada" {
			t.Errorf("minute %d: it came with %+v", q.minute, came)
		}
		if e := got.Decided; (e != nil) != (q.minute > 20_000) || e != nil && !e.At.Equal(begun.Add(20_000*time.Minute)) {
			t.Errorf("minute %d: the stop was decided by %+v", q.minute, e)
		}
		if p := got.Paused; p != nil && p.By != "ben" {
			t.Errorf("minute %d: paused by %s, who asked for it was ben", q.minute, p.By)
		}
		if r := got.Resumed; r != nil && q.resumed == 21_001 && r.By != "eve" {
			t.Errorf("minute %d: resumed by %s, who asked for it was eve", q.minute, r.By)
		}
		if p := got.Paused; (p == nil) != (q.paused == 0) || p != nil && (!p.At.Equal(begun.Add(time.Duration(q.paused)*time.Minute)) || p.Reason != q.reason) {
			t.Errorf("minute %d: paused %+v, want at %d for %s", q.minute, p, q.paused, q.reason)
		}
		if r := got.Resumed; (r == nil) != (q.resumed == 0) || r != nil && !r.At.Equal(begun.Add(time.Duration(q.resumed)*time.Minute)) {
			t.Errorf("minute %d: resumed %+v, want at %d", q.minute, r, q.resumed)
		}
	}
	db.records = 0
	changes, err := Changes(t.Context(), f, audit.Query{})
	if err != nil || len(changes["w"]) != 7 || db.records != 8 {
		t.Errorf("%d changes of %d records: %v", len(changes["w"]), db.records, err)
	}
}
