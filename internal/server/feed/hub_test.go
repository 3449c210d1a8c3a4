package feed

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// write commits n changes of two entries each. It returns the store's revision before
// them.
func write(c store.Store, n int) (before int64, err error) {
	for i := range n {
		var ops []store.Op
		for k := range 2 {
			more, err := audit.Ops(audit.Entry{Action: fmt.Sprintf("a%d.%d", i, k)})
			if err != nil {
				return 0, err
			}
			ops = append(ops, more...)
		}
		r, err := c.Commit(context.Background(), store.Txn{Then: ops})
		if err != nil {
			return 0, err
		}
		if i == 0 {
			before = r.Revision - 1
		}
	}
	return before, nil
}

// reader counts the changes that it gets, and fails on a duplicate or a wrong order.
type reader struct {
	got, resets atomic.Int64
	last        int64
	slow        time.Duration
}

func (r *reader) take(m Message) error {
	switch {
	case m.Reset != "":
		r.resets.Add(1)
	case m.Entry != nil:
		if len(m.Data) == 0 {
			return errors.New("an entry without its data")
		}
		if m.ID > 0 && m.ID <= r.last {
			return fmt.Errorf("%d comes after %d", m.ID, r.last)
		}
		r.last = max(r.last, m.ID)
		r.got.Add(1)
		time.Sleep(r.slow)
	}
	return nil
}

// TestHub checks that readers that start now, that start before the hub's buffer, and
// that fall behind all get every change once and in order. Readers that keep up must
// share one watch of the store.
func TestHub(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(mem.Options{}).Client()
		defer c.Close()
		var watches atomic.Int64
		c.Inject(func(call mem.Call) mem.Fault {
			if call.Kind == mem.Watch {
				watches.Add(1)
			}
			return mem.Fault{}
		})
		old, err := write(c, 30)
		errtest.None(t, err)
		h := NewHub(c)
		h.most = 5
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 100)
		go func() { ended <- h.Run(ctx) }()
		<-h.Ready()
		var now []*reader
		follow := func(r *reader, s Start) {
			go func() { ended <- h.Follow(ctx, s, r.take) }()
		}
		for range 50 {
			r := &reader{}
			now = append(now, r)
			follow(r, Start{})
		}
		synctest.Wait()
		if n := watches.Load(); n != 1 {
			t.Errorf("%d watches of the store for 50 readers and the hub", n)
		}
		back, slow := &reader{}, &reader{slow: time.Second}
		follow(back, Start{After: old, Known: true})
		follow(slow, Start{})
		synctest.Wait()
		for range 40 {
			errtest.Get(write(c, 1))(t)
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(5 * time.Minute)
		for i, r := range now {
			if r.got.Load() != 80 || r.resets.Load() != 0 {
				t.Errorf("reader %d got %d of 80 entries and %d resets", i, r.got.Load(), r.resets.Load())
			}
		}
		if back.got.Load() != 140 || slow.got.Load() != 80 || back.resets.Load()+slow.resets.Load() != 0 {
			t.Errorf("who began at the first got %d of 140, who was slow %d of 80", back.got.Load(), slow.got.Load())
		}
		if n := watches.Load(); n < 3 || n > 20 {
			t.Errorf("%d watches: the two who were behind have their own, for a while", n)
		}
		cancel()
		for range 53 {
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
	})
}

// TestHubBeginsAgain checks that a hub that has lost its position restarts from now,
// and that readers miss nothing because they follow the store themselves meanwhile.
func TestHubBeginsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(mem.Options{}).Client()
		defer c.Close()
		h := NewHub(c)
		ended := make(chan error, 10)
		first, end := context.WithCancel(t.Context())
		go func() { ended <- h.Run(first) }()
		<-h.Ready()
		ctx, cancel := context.WithCancel(t.Context())
		r := &reader{}
		go func() { ended <- h.Follow(ctx, Start{}, r.take) }()
		more := func() {
			synctest.Wait()
			errtest.Get(write(c, 10))(t)
			time.Sleep(time.Minute)
		}
		more()
		end()
		<-ended
		h.forget()
		more()
		go func() { ended <- h.Run(ctx) }()
		more()
		more()
		if r.got.Load() != 80 || r.resets.Load() != 0 {
			t.Errorf("%d of 80 entries, and %d resets", r.got.Load(), r.resets.Load())
		}
		h.mu.Lock()
		if !h.begun || len(h.batches) == 0 {
			t.Error("the hub follows no more")
		}
		h.mu.Unlock()
		cancel()
		<-ended
		<-ended
	})
}
