package fleet_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// counting is a store that counts the records and the keys without data that are read
// from it.
type counting struct {
	store.Store
	records, keys int
}

func (c *counting) Range(ctx context.Context, q store.Query) (store.Page, error) {
	p, err := c.Store.Range(ctx, q)
	if q.KeysOnly {
		c.keys += len(p.Values)
	} else {
		c.records += len(p.Values)
	}
	return p, err
}

func (c *counting) Commit(ctx context.Context, t store.Txn) (store.Result, error) {
	r, err := c.Store.Commit(ctx, t)
	c.records += len(r.Read)
	return r, err
}

// TestAuditReadsItsOwn checks that a query about one worker, and one about the newest
// entries, read no more of a log that has many other entries.
func TestAuditReadsItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(mem.Options{}).Client()
		defer c.Close()
		db := &counting{Store: c}
		f, err := fleet.New(fleet.Options{Store: db, ID: "f1"})
		if err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		write := func(worker string, n int, gap time.Duration) {
			for i := range n {
				ops, err := audit.Ops(audit.Entry{Action: "act" + fmt.Sprint(i%2), WorkerID: worker, Detail: fmt.Sprint(i)})
				if err == nil {
					_, err = c.Commit(ctx, store.Txn{Then: ops})
				}
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(gap)
			}
		}
		write("mine", 20, time.Hour)
		for i := range 300 {
			write(fmt.Sprint("other-", i), 10, time.Second)
		}
		write("", 5, time.Second)
		write("mine", 5, 48*time.Hour)
		write("mine-too", 5, time.Minute) // its ID begins with the ID of the other worker
		asked := func(name string, records, keys int, ask func() []audit.Entry, want ...string) {
			t.Helper()
			db.records, db.keys = 0, 0
			var got []string
			for _, e := range ask() {
				got = append(got, e.Detail)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
			if db.records > records || db.keys > keys {
				t.Errorf("%s read %d records and %d keys, want at most %d and %d", name, db.records, db.keys, records, keys)
			}
		}
		newest := func(q audit.Query, n int) func() []audit.Entry {
			return func() []audit.Entry {
				q.Limit = n
				page, err := f.NewestAudit(ctx, q)
				if err != nil {
					t.Error(err)
				}
				return page.Entries
			}
		}
		asked("its newest", 7, 60, newest(audit.Query{WorkerID: "mine"}, 7), "4", "3", "2", "1", "0", "19", "18")
		asked("its newest of an action", 25, 60, newest(audit.Query{WorkerID: "mine", Action: "act1"}, 4), "3", "1", "19", "17")
		asked("the fleet's newest", 3, 20, newest(audit.Query{}, 3), "4", "3", "2")
		asked("missing", 0, 0, newest(audit.Query{WorkerID: "missing"}, 3))
		asked("before it was", 0, 27, newest(audit.Query{WorkerID: "mine", To: time.Now().Add(-1e6 * time.Hour)}, 3))
		all := func(q audit.Query) func() []audit.Entry {
			return func() (all []audit.Entry) {
				for {
					page, err := f.Audit(ctx, q)
					if err != nil {
						t.Error(err)
						return nil
					}
					all = append(all, page.Entries...)
					if q.After = page.Next; q.After == "" {
						return all
					}
				}
			}
		}
		var want []string
		for i := range 20 {
			want = append(want, fmt.Sprint(i))
		}
		want = append(want, "0", "1", "2", "3", "4")
		asked("all of it", 25, 25, all(audit.Query{WorkerID: "mine"}), want...)
		asked("all of it by pages", 25, 25, all(audit.Query{WorkerID: "mine", Limit: 3}), want...)
		asked("from a time", 5, 5, all(audit.Query{WorkerID: "mine", From: time.Now().Add(-241 * time.Hour)}), "0", "1", "2", "3", "4")

		// A log of an earlier version has no marks, and gets them once.
		page, err := store.List(ctx, c, store.Prefix("audit-of/"))
		errtest.None(t, err)
		for _, v := range page.Values {
			errtest.Get(c.Commit(ctx, store.Txn{Then: []store.Op{store.Delete(v.Key)}}))(t)
		}
		for range 2 {
			errtest.None(t, f.MarkAudit(ctx))
		}
		again, err := store.List(ctx, c, store.Prefix("audit-of/"))
		if err != nil || len(again.Values) != len(page.Values) {
			t.Errorf("%d marks were made again, want %d: %v", len(again.Values), len(page.Values), err)
		}
		if power, err := store.List(ctx, c, store.Prefix("audit-power/")); err != nil || len(power.Values) != 0 {
			t.Errorf("%d entries are taken to be about power: %v", len(power.Values), err)
		}
		db.records = 0
		if err := f.MarkAudit(ctx); err != nil || db.records > 1 {
			t.Errorf("a marked log is read again: %d records, %v", db.records, err)
		}
	})
}

// TestAuditPagesAreBounded limits how much is read for one page of a log, if few
// entries are selected and if many are written at one moment. A short or empty page
// must continue where it stopped.
func TestAuditPagesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(mem.Options{}).Client()
		defer c.Close()
		db := &counting{Store: c}
		f, err := fleet.New(fleet.Options{Store: db, ID: "f1"})
		if err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		const total, rare = 30_000, 7000
		var ops []store.Op
		for i := range total {
			e := audit.Entry{At: time.Now().Add(time.Duration(i)), Action: "often", Detail: fmt.Sprint(i), WorkerID: fmt.Sprint("w", i%3), From: power.WorkerRunning, To: power.WorkerStopped}
			if i%rare == 0 {
				e.Action = "rare"
			}
			if i%10 != 0 {
				e.From, e.To = "", ""
			}
			more, err := audit.Ops(e)
			errtest.None(t, err)
			if ops = append(ops, more...); len(ops) > store.MaxOps-3 || i == total-1 {
				errtest.Get(c.Commit(ctx, store.Txn{Then: ops}))(t)
				ops = nil
			}
			if i < total/2 && i%20 == 0 { // the second half is written within one second
				time.Sleep(5 * time.Minute)
			} else if i%5 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		type page struct {
			name string
			read func(audit.Query) (audit.Page, error)
			want []string
		}
		entries := func(q audit.Query) (audit.Page, error) { return f.Audit(ctx, q) }
		newest := func(q audit.Query) (audit.Page, error) { return f.NewestAudit(ctx, q) }
		for _, p := range []page{{"oldest first", entries, []string{"0", "7000", "14000", "21000", "28000"}}, {"newest first", newest, []string{"28000", "21000", "14000", "7000", "0"}}} {
			var got []string
			for q, pages := (audit.Query{Action: "rare"}), 0; ; pages++ {
				db.records, db.keys = 0, 0
				out, err := p.read(q)
				if err != nil || pages > 20 {
					t.Fatal(pages, err)
				}
				if db.records > 5700 || db.keys > 25_000 {
					t.Errorf("%s: a page read %d records and %d keys", p.name, db.records, db.keys)
				}
				for _, e := range out.Entries {
					got = append(got, e.Detail)
				}
				if q.After = out.Next; q.After == "" {
					break
				}
			}
			if !slices.Equal(got, p.want) {
				t.Errorf("%s: %q, want %q", p.name, got, p.want)
			}
		}
		// Selections across all entries, before and within the dense half, page by
		// page.
		seen := map[string]bool{}
		for q := (audit.Query{Limit: 100}); len(seen) < 2000; {
			db.records, db.keys = 0, 0
			out, err := f.NewestAudit(ctx, q)
			if err != nil || len(out.Entries) != 100 || db.records > 100 || db.keys > 4000 {
				t.Fatalf("%d entries of %d records and %d keys: %v", len(out.Entries), db.records, db.keys, err)
			}
			for _, e := range out.Entries {
				if want := fmt.Sprint(total - 1 - len(seen)); e.Detail != want {
					t.Fatalf("entry %s, want %s", e.Detail, want)
				}
				seen[e.Detail] = true
			}
			q.After = out.Next
		}
		db.records, db.keys = 0, 0
		if out, err := f.NewestAudit(ctx, audit.Query{To: time.Now().Add(-30 * time.Hour), Limit: 10}); err != nil || len(out.Entries) != 10 || db.records > 10 || db.keys > 600 {
			t.Errorf("at a past time %d entries of %d records and %d keys: %v", len(out.Entries), db.records, db.keys, err)
		}
		// Power changes are found without reading other entries.
		db.records = 0
		n := 0
		if err := f.PowerAudit(ctx, time.Time{}, func(*audit.Entry) error { n++; return nil }); err != nil || n != total/10 || db.records != n {
			t.Errorf("%d entries about power of %d records: %v", n, db.records, err)
		}
	})
}

// TestTrimTakesTheMarks checks that trimming the log removes the marks of the removed
// entries.
func TestTrimTakesTheMarks(t *testing.T) {
	bubble(t, map[string]any{"audit_retention_days": 1}, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		w := create(t, fl)
		time.Sleep(25 * time.Hour)
		errtest.Get(fl.SetIdleDetection(ctx, ada, w.ID, false))(t)
		if n, err := fl.TrimAudit(ctx, time.Now(), func([]audit.Entry) error { return nil }); err != nil || n != 2 {
			t.Errorf("removed %d: %v", n, err)
		}
		for prefix, n := range map[string]int{"audit-of/": 1, "audit-power/": 0} {
			page, err := store.List(ctx, fl.Store(), store.Prefix(prefix))
			if err != nil || len(page.Values) != n {
				t.Errorf("%d marks %s are left: %v", len(page.Values), prefix, err)
			}
		}
	})
}

// TestPastPauses checks that the log yields the pauses of a worker that have ended,
// newest first, without those of other workers and without one that a termination
// ended.
func TestPastPauses(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		move := func(id string, from, to power.Worker, after time.Duration) {
			ops, err := audit.Ops(audit.Entry{Action: "status_changed", WorkerID: id, From: from, To: to})
			if err == nil {
				_, err = fl.Store().Commit(t.Context(), store.Txn{Then: ops})
			}
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(after)
		}
		for i := range 25 {
			move("w", power.WorkerStopping, power.WorkerStopped, time.Duration(i+1)*time.Hour)
			move("w", power.WorkerStopped, power.WorkerStarting, time.Minute)
			move("w", power.WorkerStarting, power.WorkerRunning, time.Hour)
			move("other", power.WorkerStopping, power.WorkerStopped, time.Second)
		}
		move("w", power.WorkerStopping, power.WorkerStopped, time.Hour)
		move("w", power.WorkerStopped, power.WorkerTerminating, 0)
		got, err := fl.PastPauses(t.Context(), "w")
		var want []time.Duration
		for i := 25; i > 5; i-- {
			want = append(want, time.Duration(i)*time.Hour)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%v, want %v: %v", got, want, err)
		}
	})
}
