package host

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
)

// fullDisk rejects all writes of records while full is set.
type fullDisk struct {
	*hosttest.Disk
	full atomic.Bool
}

func (d *fullDisk) Put(r *instance.Record) error {
	if d.full.Load() {
		return &errNoSpace{}
	}
	return d.Disk.Put(r)
}

func (d *fullDisk) Note(r *instance.Record) error { return d.Put(r) }

type errNoSpace struct{}

func (*errNoSpace) Error() string { return "write /data/instances/x: no space left on device" }
func (*errNoSpace) Unwrap() error { return syscall.ENOSPC }

// onFullDisk runs f on a host whose disk becomes full after prepare. Then it frees
// space and checks that the records on disk match the state.
func onFullDisk(t *testing.T, prepare, f func(r *rig)) {
	t.Helper()
	d := &fullDisk{}
	inTuned(t, func(c *Config) {
		d.Disk = c.Records.(*hosttest.Session).Disk
		c.Records = d
	}, func(r *rig) {
		prepare(r)
		d.full.Store(true)
		f(r)
		synctest.Wait()
		d.full.Store(false)
		time.Sleep(5 * time.Second) // several attempts of the saver
		synctest.Wait()
		if err := r.saver.Failing(); err != nil {
			t.Errorf("with space again: %v", err)
		}
		for _, rec := range d.All() {
			if o, err := r.Get(rec.ID); err != nil || o.State != string(rec.State) || o.Enabled != rec.Enabled {
				t.Errorf("on disk %s is %s, enabled %t; it is %s, enabled %t: %v", rec.Spec.Name, rec.State, rec.Enabled, o.State, o.Enabled, err)
			}
		}
		if n := len(d.All()); n != len(r.List(false)) {
			t.Errorf("%d records are on disk, and there are %d instances", n, len(r.List(false)))
		}
	})
}

// TestUsersActOnAFullDisk checks that users can pause, resume, stop, disable and
// remove instances in every state while the disk is full.
func TestUsersActOnAFullDisk(t *testing.T) {
	asleep := func(r *rig) {
		if err := r.Pause(r.ctx, "a", ByManual, false); err != nil {
			r.t.Fatal(err)
		}
	}
	run := func(r *rig) { r.run("a", nil) }
	for name, row := range map[string]struct {
		prepare []func(*rig)
		do      func(ctx context.Context, r *rig) error
		want    power.Instance // empty if it must be removed
	}{
		"pause":          {[]func(*rig){run}, func(ctx context.Context, r *rig) error { return r.Pause(ctx, "a", ByManual, false) }, power.Paused},
		"resume":         {[]func(*rig){run, asleep}, func(ctx context.Context, r *rig) error { return r.Resume(ctx, "a", ByManual) }, power.Running},
		"stop":           {[]func(*rig){run}, func(ctx context.Context, r *rig) error { return r.Stop(ctx, "a", ByManual, false) }, power.Stopped},
		"stop of paused": {[]func(*rig){run, asleep}, func(ctx context.Context, r *rig) error { return r.Stop(ctx, "a", ByManual, false) }, power.Stopped},
		"disable":        {[]func(*rig){run}, func(ctx context.Context, r *rig) error { return r.Stop(ctx, "a", ByManual, true) }, power.Stopped},
		"rm":             {[]func(*rig){run}, func(ctx context.Context, r *rig) error { return r.Delete(ctx, "a", ByManual) }, ""},
		"rm of paused":   {[]func(*rig){run, asleep}, func(ctx context.Context, r *rig) error { return r.Delete(ctx, "a", ByManual) }, ""},
		"stop and rm": {[]func(*rig){run}, func(ctx context.Context, r *rig) error {
			return errors.Join(r.Stop(ctx, "a", ByManual, true), r.Delete(ctx, "a", ByManual))
		}, ""},
		"exit by itself": {[]func(*rig){run}, func(_ context.Context, r *rig) error { r.k.Proc(r.byName["a"].id).Exit(0); return nil }, power.Stopped},
		"pause and again": {[]func(*rig){run}, func(ctx context.Context, r *rig) error {
			return errors.Join(r.Pause(ctx, "a", ByManual, false), r.Resume(ctx, "a", ByManual), r.Pause(ctx, "a", ByManual, false))
		}, power.Paused},
	} {
		t.Run(name, func(t *testing.T) {
			onFullDisk(t, func(r *rig) {
				for _, f := range row.prepare {
					f(r)
				}
			}, func(r *rig) {
				if err := row.do(r.ctx, r); err != nil {
					t.Errorf("on a full disk: %v", err)
				}
				if row.want == "" {
					if _, err := r.Get("a"); err == nil {
						t.Error("it is still there")
					}
					return
				}
				r.is("a", row.want)
			})
		})
	}
}

// TestFullDiskIsNamed checks that no automatic action happens while the disk is
// full, that why, ps and the events give that reason, and that automatic actions
// resume once there is space.
func TestFullDiskIsNamed(t *testing.T) {
	for name, asleep := range map[string]bool{"running": false, "paused": true} {
		t.Run(name, func(t *testing.T) {
			onFullDisk(t, func(r *rig) {
				r.run("a", nil)
				if asleep {
					time.Sleep(62 * time.Second)
					r.is("a", power.Paused)
				}
			}, func(r *rig) {
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				want := power.Running
				if asleep {
					want = power.Paused
				}
				o := r.is("a", want)
				if o.Unwritable == "" || o.PauseAt != nil || o.NextStepAt != nil || o.StopAt != nil {
					t.Errorf("unwritable %q, paused at %v, next step at %v, stopped at %v", o.Unwritable, o.PauseAt, o.NextStepAt, o.StopAt)
				}
				if !asleep && !slices.ContainsFunc(o.Blocks, func(b idle.Block) bool { return b.Code == DiskUnwritable }) {
					t.Errorf("blocks %v", o.Blocks)
				}
				y, err := r.Why(r.ctx, "a", time.Time{})
				if err != nil || y.Instance.Unwritable == "" {
					t.Errorf("why: %+v, %v", y, err)
				}
				if n := len(r.happenings("a", "trouble")); n != 1 {
					t.Errorf("told %d times", n)
				}
			})
		})
	}
}

// TestHaltOnAFullDisk checks that a halt takes effect although it cannot be
// recorded, and that the error says so.
func TestHaltOnAFullDisk(t *testing.T) {
	inTuned(t, func(c *Config) { c.KeepHalt = func(*idle.HaltedBy) error { return syscall.ENOSPC } }, func(r *rig) {
		r.run("a", nil)
		if err := r.Halt(&idle.HaltedBy{By: "ada", Since: time.Now()}, "ada"); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("halted: %v", err)
		}
		time.Sleep(10 * time.Minute)
		r.is("a", power.Running)
	})
}

// lateWriter changes an instance's record while the record is being deleted.
type lateWriter struct {
	*hosttest.Disk
	change func()
}

func (d *lateWriter) Delete(id string) error {
	err := d.Disk.Delete(id)
	if d.change != nil {
		d.change()
		time.Sleep(time.Second) // longer than the saver's delay
	}
	return err
}

// TestRemovedStaysRemoved checks that a write that is due while an instance is
// removed does not restore its record.
func TestRemovedStaysRemoved(t *testing.T) {
	d := &lateWriter{}
	inTuned(t, func(c *Config) {
		d.Disk = c.Records.(*hosttest.Session).Disk
		c.Records = d
	}, func(r *rig) {
		r.run("a", nil)
		i, err := r.find("a")
		errtest.None(t, err)
		d.change = func() {
			i.update(func(r *instance.Record) { r.StatusReason = "late" })
			r.saver.WriteLater(i, i.id)
		}
		errtest.None(t, r.Delete(r.ctx, "a", ByManual))
		time.Sleep(5 * time.Second) // several attempts of the saver
		synctest.Wait()
		if all := d.All(); len(all) != 0 {
			t.Errorf("%d records after the removal: %+v", len(all), all)
		}
	})
}
