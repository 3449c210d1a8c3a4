package halt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
)

// rig keeps the halts of a host in a bubble.
type rig struct {
	*Halts
	own, fleet atomic.Pointer[idle.HaltedBy] // as stored on disk
	full       atomic.Bool                   // the disk is full

	mu        sync.Mutex
	published []string
}

// take returns what was published since the last call.
func (r *rig) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.published
	r.published = nil
	return out
}

func in(t *testing.T, f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{}
		keep := func(to *atomic.Pointer[idle.HaltedBy]) func(*idle.HaltedBy) error {
			return func(x *idle.HaltedBy) error {
				if r.full.Load() {
					return errors.New("full")
				}
				to.Store(x)
				return nil
			}
		}
		r.Halts = New(Options{KeepOwn: keep(&r.own), KeepFleet: keep(&r.fleet), Now: time.Now, Log: slog.New(slog.DiscardHandler),
			Changed: func(x *idle.HaltedBy, by, _ string) {
				r.published = append(r.published, fmt.Sprintf("%s %t", by, x != nil))
			}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { r.Run(ctx); close(ended) }()
		f(r)
		cancel()
		<-ended
	})
}

func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestExpires checks that a halt with an end ends at that time, is removed from the
// disk, and that its end is published once.
func TestExpires(t *testing.T) {
	in(t, func(r *rig) {
		end := time.Now().Add(time.Hour)
		if err := errors.Join(r.Set(&idle.HaltedBy{By: "ada", Since: time.Now(), Until: &end}, "ada"),
			r.SetFleet(&idle.HaltedBy{By: "bob", Fleet: true, Since: time.Now()})); err != nil {
			t.Fatal(err)
		}
		pass(time.Hour - time.Nanosecond)
		if in := r.InEffect(); len(in) != 2 || in[0].By != "ada" || r.own.Load() == nil {
			t.Errorf("just before the end: %v", in)
		}
		pass(time.Minute)
		if in := r.InEffect(); len(in) != 1 || in[0].By != "bob" || r.own.Load() != nil || r.fleet.Load() == nil {
			t.Errorf("after the end: %v, on disk %v and %v", in, r.own.Load(), r.fleet.Load())
		}
		got := r.take()
		if want := []string{"ada true", "bob true", "lull false"}; !slices.Equal(got, want) {
			t.Errorf("published %q, want %q", got, want)
		}
	})
}

// TestUnkept checks that a halt takes effect even if it cannot be stored, and that
// ending a halt then fails.
func TestUnkept(t *testing.T) {
	in(t, func(r *rig) {
		r.full.Store(true)
		if err := r.Set(&idle.HaltedBy{By: "ada"}, "ada"); err == nil || len(r.InEffect()) != 1 {
			t.Errorf("%v, in effect: %v", err, r.InEffect())
		}
		if err := r.Set(nil, "ada"); err == nil || len(r.InEffect()) != 1 {
			t.Errorf("its end: %v, in effect: %v", err, r.InEffect())
		}
		if err := r.SetFleet(&idle.HaltedBy{By: "bob"}); err == nil || r.Fleet() == nil {
			t.Errorf("the fleet's: %v, %v", err, r.Fleet())
		}
		if err := r.SetFleet(nil); err == nil || r.Fleet() != nil {
			t.Errorf("its end: %v, %v", err, r.Fleet())
		}
	})
}

// TestSlack checks that an end that moves by less than slack is no change.
func TestSlack(t *testing.T) {
	in(t, func(r *rig) {
		since, end := time.Now(), time.Now().Add(time.Hour)
		for moved, changes := range map[time.Duration]int{slack - time.Nanosecond: 0, slack: 1} {
			to := end.Add(moved)
			for _, x := range []*time.Time{&end, &to} {
				errtest.None(t, r.SetFleet(&idle.HaltedBy{By: "bob", Since: since, Until: x}))
			}
			if n := len(r.take()) - 1; n != changes {
				t.Errorf("an end that moves by %s: %d changes, want %d", moved, n, changes)
			}
			errtest.None(t, r.SetFleet(nil))
			r.take()
		}
	})
}
