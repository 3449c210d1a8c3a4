package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"lull/internal/platform/etcd/etcdtest"
	"lull/internal/store"
)

// ledger records the outcome of every update that the writers made.
type ledger struct {
	step chan struct{} // one element per completed update, up to its capacity

	mu            sync.Mutex
	done, unknown map[string]bool
	refused       int
	bad           []error
}

func (l *ledger) note(mark string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		l.done[mark] = true
		select {
		case l.step <- struct{}{}:
		default:
		}
	case errors.Is(err, store.ErrAmbiguous):
		l.unknown[mark] = true
	case errors.Is(err, store.ErrUnavailable):
		l.refused++
	default:
		l.bad = append(l.bad, err)
	}
}

// progress waits until n more updates have completed.
func (l *ledger) progress(t *testing.T, n int) {
	t.Helper()
	for len(l.step) > 0 {
		<-l.step
	}
	deadline := time.After(time.Minute)
	for i := range n {
		select {
		case <-l.step:
		case <-deadline:
			t.Fatalf("no progress beyond %d updates", i)
		}
	}
}

// writeUntil makes updates until ctx ends. Each changes one of two shared keys,
// chosen by the writer's number, and puts a unique mark in the same transaction.
func (l *ledger) writeUntil(ctx context.Context, s store.Store, writer int) {
	for i := 0; ctx.Err() == nil; i++ {
		mark := fmt.Sprintf("m/%d/%d", writer, i)
		_, err := store.Update(context.WithoutCancel(ctx), s, fmt.Sprintf("n/%d", writer%2), func(old store.Value) ([]byte, []store.Op, error) {
			return fmt.Appendf(nil, `{"from":%d}`, old.Version), []store.Op{store.Put(mark, []byte("x"))}, nil
		})
		l.note(mark, err)
	}
}

// check compares the ledger with the marks in the store: every acknowledged
// update must have its mark, and no refused one.
func (l *ledger) check(t *testing.T, s store.Store) {
	t.Helper()
	page, err := store.List(t.Context(), s, store.Prefix("m/"))
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, v := range page.Values {
		if v.Version != 1 {
			t.Errorf("%s was applied %d times", v.Key, v.Version)
		}
		switch {
		case l.done[v.Key]:
			found++
		case !l.unknown[v.Key]:
			t.Errorf("%s was applied and reported as refused", v.Key)
		}
	}
	if found != len(l.done) {
		t.Errorf("%d updates were reported done, %d are there", len(l.done), found)
	}
	if err := errors.Join(l.bad...); err != nil {
		t.Error(err)
	}
	t.Logf("%d done, %d unknown, %d refused", len(l.done), len(l.unknown), l.refused)
}

// TestClusterFaults kills, pauses and cuts off members of a cluster of three
// while writers are active. It checks that every acknowledged update was made
// exactly once, and no refused one.
func TestClusterFaults(t *testing.T) {
	c := etcdtest.Start(t, 3)
	s, err := Dial(t.Context(), ExternalConfig{Endpoints: c.Endpoints(), CallTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer closeTest(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	l := &ledger{step: make(chan struct{}, 10), done: map[string]bool{}, unknown: map[string]bool{}}
	var writers sync.WaitGroup
	stop := func() { cancel(); writers.Wait() }
	defer stop()
	for w := range 8 {
		writers.Go(func() { l.writeUntil(ctx, s, w) })
	}
	for i := range 3 {
		l.progress(t, 30)
		c.Kill(i)
		l.progress(t, 30)
		c.Restart(i)
		c.AwaitHealthy(i)
		c.Pause((i + 1) % 3)
		l.progress(t, 30)
		c.Resume((i + 1) % 3)
		c.Cut((i + 2) % 3)
		l.progress(t, 30)
		c.Cut()
	}
	stop()
	l.check(t, s)
}
