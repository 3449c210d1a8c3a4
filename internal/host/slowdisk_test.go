package host

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// TestWakeDoesNotWaitForDisk checks that a client that comes while the record of a
// pause or an automatic stop is being written is answered before the write
// completes, on both paths, and that the pause or stop is canceled.
func TestWakeDoesNotWaitForDisk(t *testing.T) {
	for _, at := range []power.Instance{power.Paused, power.Reclaimed, power.Hibernated, power.Stopping} {
		for _, path := range []instance.Path{instance.PathDirect, instance.PathRelay} {
			t.Run(string(at)+"/"+string(path), func(t *testing.T) {
				inBubble(t, func(r *rig) {
					r.k.Deep = true
					writing := make(chan struct{})
					slow := true
					r.disk.On = func(rec *instance.Record) {
						if rec.State == at && slow {
							slow = false
							close(writing)
							time.Sleep(time.Hour)
						}
					}
					id := r.run("a", func(s *instance.Spec) {
						switch at {
						case power.Reclaimed:
							s.ReclaimAfter = idle.Duration(time.Minute)
						case power.Hibernated:
							s.HibernateAfter = idle.Duration(time.Minute)
						}
					})
					<-writing
					began := time.Now()
					var c *hosttest.Client
					if path == instance.PathDirect {
						c = r.k.Connect(id)
					} else {
						var err error
						if c, err = r.gates["a"].Arrive(r.ctx); err != nil {
							t.Fatal(err)
						}
					}
					synctest.Wait()
					if c.Outcome() != "answered" || time.Since(began) > time.Second {
						t.Errorf("after %s the client is %s", time.Since(began), c.Outcome())
					}
					o := r.is("a", power.Running)
					counts := map[power.Instance][2]uint64{power.Paused: {0, 0}, power.Reclaimed: {1, 1}, power.Hibernated: {1, 1}, power.Stopping: {1, 1}}
					if got := [2]uint64{o.PauseCount, o.WakeCount}; got != counts[at] {
						t.Errorf("pauses and wakes are %v, want %v", got, counts[at])
					}
					c.Close()
					time.Sleep(2 * time.Hour)
					rec := r.disk.All()[0]
					if rec.State == power.Running {
						t.Error("it does not go to sleep anymore")
					}
					r.is("a", rec.State)
				})
			})
		}
	}
}

// TestCalledOffStopOverCrash checks that an automatic stop that a client has
// canceled stays canceled if the daemon is killed before it records that. The next
// daemon then finds "stopping" on disk and a program that serves. A stop that was
// not canceled is decided again.
func TestCalledOffStopOverCrash(t *testing.T) {
	for name, served := range map[string]bool{"client": true, "no client": false} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				writing := make(chan struct{})
				var stopping, crashed atomic.Bool
				r.disk.On = func(rec *instance.Record) {
					switch {
					case crashed.Load():
					case rec.State == power.Stopping && !stopping.Swap(true):
						close(writing)
						time.Sleep(time.Minute)
					case stopping.Load():
						time.Sleep(time.Hour)
					}
				}
				id := r.run("a", nil)
				<-writing
				var c *hosttest.Client
				if served {
					c = r.k.Connect(id) // the connection stays open
				}
				time.Sleep(time.Minute + time.Second)
				if s := r.disk.All()[0].State; s != power.Stopping {
					t.Fatalf("the disk says %s", s)
				}
				crashed.Store(true)
				r.crash()
				r.boot()
				time.Sleep(time.Minute)
				if !served {
					time.Sleep(10 * time.Minute)
					r.is("a", power.Stopped)
					return
				}
				r.is("a", power.Running)
				if n := r.k.Starts(); n != 1 || c.Outcome() != "answered" {
					t.Errorf("%d starts, and the client is %s", n, c.Outcome())
				}
			})
		})
	}
}
