package mem_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

func bubble(t *testing.T, opts mem.Options, f func(t *testing.T, db *mem.DB, c *mem.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		db := mem.New(opts)
		c := db.Client()
		defer c.Close()
		f(t, db, c)
	})
}

func putA(ctx context.Context, c *mem.Client) error {
	_, err := c.Commit(ctx, store.Txn{Then: []store.Op{store.Put("a", []byte("x"))}})
	return err
}

func TestFaults(t *testing.T) {
	broken := fmt.Errorf("cannot: %w", store.ErrUnavailable)
	for _, c := range []struct {
		name    string
		fault   mem.Fault
		kind    error
		took    time.Duration
		applied bool          // applied by the time the call returns
		later   time.Duration // how long after the return it is applied
	}{
		{"none", mem.Fault{}, nil, 0, true, 0},
		{"latency", mem.Fault{Latency: 2 * time.Second}, nil, 2 * time.Second, true, 0},
		{"error", mem.Fault{Err: broken, Latency: time.Second}, store.ErrUnavailable, time.Second, false, 0},
		{"answer lost", mem.Fault{LoseAnswer: true}, store.ErrAmbiguous, 0, true, 0},
		{"late", mem.Fault{LoseAnswer: true, Late: 3 * time.Second}, store.ErrAmbiguous, 0, false, 3 * time.Second},
		{"over the deadline", mem.Fault{Latency: time.Hour}, store.ErrAmbiguous, 10 * time.Second, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, mem.Options{}, func(t *testing.T, db *mem.DB, client *mem.Client) {
				client.Inject(func(mem.Call) mem.Fault { return c.fault })
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				start := time.Now()
				if err := putA(ctx, client); !errors.Is(err, c.kind) {
					t.Errorf("put: %v, want %v", err, c.kind)
				}
				if took := time.Since(start); took != c.took {
					t.Errorf("took %v, want %v", took, c.took)
				}
				if applied := db.Revision() == 2; applied != c.applied {
					t.Errorf("applied %v, want %v", applied, c.applied)
				}
				time.Sleep(c.later + 1)
				if applied := db.Revision() == 2; applied != (c.applied || c.later > 0) {
					t.Errorf("applied %v after %v", applied, c.later)
				}
			})
		})
	}
}

func TestPartition(t *testing.T) {
	bubble(t, mem.Options{}, func(t *testing.T, db *mem.DB, c *mem.Client) {
		other := db.Client()
		defer other.Close()
		l, err := c.Grant(t.Context(), 15*time.Second)
		errtest.None(t, err)
		errtest.Get(store.Claim(t.Context(), c, l, "owner", nil))(t)
		time.Sleep(time.Hour) // long enough for many renewals
		watch := c.Watch(t.Context(), store.Prefix(""), 0)
		synctest.Wait()
		c.Partition()
		cut := time.Now()
		if b := <-watch; !errors.Is(b.Err, store.ErrUnavailable) {
			t.Errorf("watch over the partition: %+v", b)
		}
		if err := putA(t.Context(), c); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("put over the partition: %v", err)
		}
		if err := putA(t.Context(), other); err != nil {
			t.Errorf("put by the other: %v", err)
		}
		<-l.Lost()
		lost := time.Since(cut)
		l2, err := other.Grant(t.Context(), 15*time.Second)
		errtest.None(t, err)
		errtest.Get(store.Campaign(t.Context(), other, l2, "owner", nil))(t)
		taken := time.Since(cut)
		if lost > 15*time.Second || taken < lost || taken > 16*time.Second {
			t.Errorf("lost after %v, taken over after %v", lost, taken)
		}
		c.Inject(nil)
		if err := putA(t.Context(), c); err != nil {
			t.Errorf("put after the partition: %v", err)
		}
	})
}

func TestNoSpace(t *testing.T) {
	bubble(t, mem.Options{QuotaBytes: 10}, func(t *testing.T, db *mem.DB, c *mem.Client) {
		var err error
		n := 0
		for ; err == nil; n++ {
			err = putA(t.Context(), c)
		}
		if n != 6 || !errors.Is(err, store.ErrNoSpace) {
			t.Errorf("put %d: %v", n, err)
		}
		if _, err := c.Commit(t.Context(), store.Txn{Then: []store.Op{store.Delete("a")}}); err != nil {
			t.Errorf("delete: %v", err)
		}
		db.Compact(db.Revision())
		if err := putA(t.Context(), c); err != nil {
			t.Errorf("put after compaction: %v", err)
		}
	})
}

func TestHistoryIsBounded(t *testing.T) {
	bubble(t, mem.Options{KeepRevisions: 10}, func(t *testing.T, db *mem.DB, c *mem.Client) {
		for range 100 {
			errtest.None(t, putA(t.Context(), c))
		}
		if b := <-c.Watch(t.Context(), store.Prefix(""), 50); !errors.Is(b.Err, store.ErrCompacted) {
			t.Errorf("watch of old history: %+v", b)
		}
		if _, err := c.Range(t.Context(), store.Query{Keys: store.Key("a"), Revision: db.Revision() - 10}); err != nil {
			t.Errorf("recent history: %v", err)
		}
	})
}

// TestLostAnswersForADay has three clients increment counters for a simulated day
// with random faults, including writes that are applied after their answer was lost.
// It checks that no increment is lost or done twice.
func TestLostAnswersForADay(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	bubble(t, mem.Options{KeepRevisions: 200}, func(t *testing.T, db *mem.DB, reader *mem.Client) {
		end := time.Now().Add(24 * time.Hour)
		done := make(chan [2]int)
		for i := range 3 {
			go func() {
				rng := rand.New(rand.NewPCG(seed, uint64(i)))
				c := db.Client()
				defer c.Close()
				c.Inject(func(call mem.Call) mem.Fault {
					f := mem.Fault{Latency: time.Duration(rng.IntN(300)) * time.Millisecond}
					switch rng.IntN(6) {
					case 0:
						f.LoseAnswer = true
					case 1:
						f.LoseAnswer, f.Late = true, time.Duration(1+rng.IntN(2000))*time.Millisecond
					case 2:
						f.Err = fmt.Errorf("cannot: %w", store.ErrUnavailable)
					}
					return f
				})
				good, unknown := 0, 0
				for time.Now().Before(end) {
					_, err := store.Update(context.Background(), c, "n", func(old store.Value) ([]byte, []store.Op, error) {
						n := 0
						if old.Exists() {
							if _, err := fmt.Sscanf(string(old.Data), `{"n":%d}`, &n); err != nil {
								return nil, nil, err
							}
						}
						return fmt.Appendf(nil, `{"n":%d}`, n+1), nil, nil
					})
					switch {
					case err == nil:
						good++
					case errors.Is(err, store.ErrAmbiguous):
						unknown++
					case !errors.Is(err, store.ErrUnavailable):
						t.Error(err)
					}
					time.Sleep(time.Duration(rng.IntN(60)) * time.Second)
				}
				done <- [2]int{good, unknown}
			}()
		}
		good, unknown := 0, 0
		for range 3 {
			d := <-done
			good, unknown = good+d[0], unknown+d[1]
		}
		time.Sleep(time.Minute)
		v, err := store.Get(t.Context(), reader, "n")
		if err != nil || v.Version < int64(good) || v.Version > int64(good+unknown) {
			t.Errorf("counted to %d, %v; %d were done and %d unknown", v.Version, err, good, unknown)
		}
		if good < 1000 {
			t.Errorf("only %d updates in a day", good)
		}
		t.Logf("%d done, %d unknown", good, unknown)
	})
}
