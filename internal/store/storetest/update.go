package storetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"lull/internal/store"
)

// lossy is a Store that loses the answers of some writes. plan is called for each
// write, under a lock, and returns its outcome.
type lossy struct {
	store.Store
	mu   sync.Mutex
	n    int
	plan func(n int) writeOutcome
}

type writeOutcome int

const (
	answered writeOutcome = iota
	lostApplied
	lostRefused
	lostLate // applied shortly after the answer was lost
)

func (l *lossy) Commit(ctx context.Context, txn store.Txn) (store.Result, error) {
	if len(txn.Then) == 0 {
		return l.Store.Commit(ctx, txn)
	}
	l.mu.Lock()
	what := l.plan(l.n)
	l.n++
	l.mu.Unlock()
	lost := fmt.Errorf("cannot hear the answer: %w", store.ErrAmbiguous)
	switch what {
	case lostRefused:
		return store.Result{}, lost
	case lostLate:
		time.AfterFunc(2*time.Millisecond, func() { _, _ = l.Store.Commit(context.WithoutCancel(ctx), txn) })
		return store.Result{}, lost
	case lostApplied:
		if _, err := l.Store.Commit(ctx, txn); err != nil {
			return store.Result{}, err
		}
		return store.Result{}, lost
	}
	return l.Store.Commit(ctx, txn)
}

// once returns a lossy store that gives the first write the outcome what, and
// succeeds for all others.
func once(h Harness, what writeOutcome) *lossy {
	return &lossy{Store: h.Store, plan: func(n int) writeOutcome {
		if n == 0 {
			return what
		}
		return answered
	}}
}

type counter struct {
	N int `json:"n"`
}

// increment adds one to the counter of a key. For each call that reports success it
// also creates a key of its own.
func increment(ctx context.Context, s store.Store, key, mark string) error {
	_, err := store.Update(ctx, s, key, func(old store.Value) ([]byte, []store.Op, error) {
		var c counter
		if old.Exists() {
			if err := json.Unmarshal(old.Data, &c); err != nil {
				return nil, nil, err
			}
		}
		c.N++
		data, err := json.Marshal(c)
		return data, []store.Op{store.Put(mark+fmt.Sprint(c.N), []byte("x"))}, err
	})
	return err
}

func wantCount(t *testing.T, h Harness, name string, want int) {
	t.Helper()
	var c counter
	v := get(t, h, name)
	if err := json.Unmarshal(store.StripWriteID(v.Data), &c); err != nil {
		t.Fatal(err)
	}
	if c.N != want || v.Version != int64(want) {
		t.Errorf("counter %s is %d after %d writes, want %d", name, c.N, v.Version, want)
	}
}

func testUpdate(t *testing.T, h Harness) {
	key := h.key("rec")
	set := func(data string, ops ...store.Op) (store.Value, error) {
		return store.Update(t.Context(), h.Store, key, func(store.Value) ([]byte, []store.Op, error) {
			if data == "" {
				return nil, ops, nil
			}
			return []byte(data), ops, nil
		})
	}
	v, err := set(`{"a":1}`, store.Put(h.key("event"), []byte("made")))
	if err != nil || v.Version != 1 || v.CreateRevision != v.ModRevision || string(v.Data) != `{"a":1}` {
		t.Errorf("create: %+v, %v", v, err)
	}
	if e := get(t, h, "event"); e.ModRevision != v.ModRevision {
		t.Errorf("the further write is at %d, the change at %d", e.ModRevision, v.ModRevision)
	}
	same, err := set(`{"a":1}`)
	if err != nil || same.ModRevision != v.ModRevision || get(t, h, "rec").Version != 1 {
		t.Errorf("no change: %+v, %v", same, err)
	}
	changed, err := set(`{ }`)
	if err != nil || changed.Version != 2 || changed.CreateRevision != v.CreateRevision {
		t.Errorf("change: %+v, %v", changed, err)
	}
	stop := errors.New("stop")
	_, err = store.Update(t.Context(), h.Store, key, func(old store.Value) ([]byte, []store.Op, error) {
		if string(old.Data) != `{}` {
			t.Errorf("the old data is %s", old.Data)
		}
		return nil, nil, stop
	})
	wantKind(t, "error of the function", err, stop)
	_, err = set(`no object`)
	wantKind(t, "data that is no object", err, store.ErrInvalid)
	if v, err = set(""); err != nil || v.Exists() || get(t, h, "rec").Exists() {
		t.Errorf("delete: %+v, %v", v, err)
	}
	if v, err = set(""); err != nil || v.Exists() {
		t.Errorf("delete of nothing: %+v, %v", v, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantKind(t, "context that has ended", increment(ctx, h.Store, key, h.key("m/")), store.ErrUnavailable)
}

func testUpdateConcurrent(t *testing.T, h Harness) {
	const writers, each = 16, 20
	parallel(t, writers, func(i int) error {
		for range each {
			s := h.Store
			if i%2 == 1 {
				s = h.Other
			}
			if err := increment(t.Context(), s, h.key("n"), h.key("m/")); err != nil {
				return err
			}
		}
		return nil
	})
	wantCount(t, h, "n", writers*each)
}

// testUpdateAmbiguous loses two of three answers, in every way, under contention. It
// checks that each increment reported as done was done exactly once.
func testUpdateAmbiguous(t *testing.T, h Harness) {
	const writers, each = 16, 8
	s := &lossy{Store: h.Store, plan: func(n int) writeOutcome {
		return []writeOutcome{lostApplied, answered, lostRefused, lostLate, answered, lostApplied}[n%6]
	}}
	parallel(t, writers, func(int) error {
		for range each {
			if err := increment(t.Context(), s, h.key("n"), h.key("m/")); err != nil {
				return err
			}
		}
		return nil
	})
	wantCount(t, h, "n", writers*each)
	page, err := store.List(t.Context(), h.Store, store.Prefix(h.key("m/")))
	if err != nil || len(page.Values) != writers*each {
		t.Errorf("%d marks, %v, want %d", len(page.Values), err, writers*each)
	}
}

// interfere is a Store that applies the first write, loses its answer, and then calls
// a function.
type interfere struct {
	store.Store
	apply bool
	then  func() error
	done  bool
}

func (i *interfere) Commit(ctx context.Context, txn store.Txn) (store.Result, error) {
	if i.done || len(txn.Then) == 0 {
		return i.Store.Commit(ctx, txn)
	}
	i.done = true
	if i.apply {
		if _, err := i.Store.Commit(ctx, txn); err != nil {
			return store.Result{}, err
		}
	}
	if err := i.then(); err != nil {
		return store.Result{}, err
	}
	return store.Result{}, fmt.Errorf("cannot hear the answer: %w", store.ErrAmbiguous)
}

// testAmbiguousOverwritten checks an Update whose answer is lost and whose record
// another writer changes, possibly to the same data, before the outcome is
// determined.
func testAmbiguousOverwritten(t *testing.T, h Harness) {
	for i, apply := range []bool{true, false} {
		for others := 1; others <= 4; others += 3 {
			name := fmt.Sprintf("n%d-%d", i, others)
			s := &interfere{Store: h.Store, apply: apply, then: func() error {
				for range others {
					if err := increment(t.Context(), h.Other, h.key(name), h.key("m/"+name)); err != nil {
						return err
					}
				}
				return nil
			}}
			if err := increment(t.Context(), s, h.key(name), h.key("m/"+name)); err != nil {
				t.Errorf("applied=%v, %d others: %v", apply, others, err)
			}
			wantCount(t, h, name, others+1)
		}
	}
}

// testAmbiguousDeleted checks an Update whose answer is lost and whose record another
// writer deletes, and possibly recreates. The deleted record must not come back.
func testAmbiguousDeleted(t *testing.T, h Harness) {
	for i, apply := range []bool{true, false} {
		for j, anew := range []bool{false, true} {
			name := fmt.Sprintf("n%d-%d", i, j)
			s := &interfere{Store: h.Store, apply: apply, then: func() error {
				key := h.key(name)
				_, err := h.Other.Commit(t.Context(), store.Txn{Then: []store.Op{store.Delete(key)}})
				if err == nil && anew {
					_, err = h.Other.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put(key, []byte(`{"n":100}`))}})
				}
				return err
			}}
			v, err := store.Update(t.Context(), s, h.key(name), func(old store.Value) ([]byte, []store.Op, error) {
				if old.Exists() {
					return []byte(`{"n":101}`), nil, nil
				}
				return []byte(`{"n":1}`), nil, nil
			})
			if err != nil {
				t.Errorf("applied=%v anew=%v: %v", apply, anew, err)
			}
			want := map[bool]map[bool]string{
				true:  {false: "", true: `{"n":100}`},
				false: {false: `{"n":1}`, true: `{"n":101}`},
			}[apply][anew]
			if got := string(store.StripWriteID(get(t, h, name).Data)); got != want {
				t.Errorf("applied=%v anew=%v: record is %q, want %q (update says %s)", apply, anew, got, want, v.Data)
			}
		}
	}
}

func testAmbiguousDelete(t *testing.T, h Harness) {
	for i, what := range []writeOutcome{lostApplied, lostRefused, lostLate} {
		for _, further := range []bool{false, true} {
			name := fmt.Sprintf("n%d-%v", i, further)
			put(t, h, name, `{"n":1}`)
			_, err := store.Update(t.Context(), once(h, what), h.key(name), func(store.Value) ([]byte, []store.Op, error) {
				if further {
					return nil, []store.Op{store.Put(h.key("log/"+name), []byte(`{"by":"me"}`))}, nil
				}
				return nil, nil, nil
			})
			if err != nil || get(t, h, name).Exists() || get(t, h, "log/"+name).Exists() != further {
				t.Errorf("fate %d, further=%v: %v, key %+v", what, further, err, get(t, h, name))
			}
		}
	}
}

// testAmbiguousCompacted checks that the outcome of an Update is reported as unknown
// if the history that would show it was removed.
func testAmbiguousCompacted(t *testing.T, h Harness) {
	s := &interfere{Store: h.Store, apply: true, then: func() error {
		var last int64
		for i := range 3 {
			last = put(t, h, "n", fmt.Sprintf(`{"n":%d}`, i))
		}
		return h.Compact(t.Context(), last)
	}}
	err := increment(t.Context(), s, h.key("n"), h.key("m/"))
	wantKind(t, "update whose history is gone", err, store.ErrAmbiguous)
}

func testTransact(t *testing.T, h Harness) {
	const total = 1000
	keys := []string{h.key("left"), h.key("right")}
	data := func(n int) []byte { return fmt.Appendf(nil, `{"n":%d}`, n) }
	commit(t, h, store.Txn{Then: []store.Op{store.Put(keys[0], data(total)), store.Put(keys[1], data(0))}})
	move := func(s store.Store, by int) error {
		_, err := store.Transact(t.Context(), s, keys, func(view []store.Value) ([]store.Op, error) {
			var left, right counter
			if err := errors.Join(json.Unmarshal(view[0].Data, &left), json.Unmarshal(view[1].Data, &right)); err != nil {
				return nil, err
			}
			if left.N+right.N != total {
				return nil, fmt.Errorf("the view has %d and %d, not of one revision", left.N, right.N)
			}
			return []store.Op{store.Put(keys[0], data(left.N-by)), store.Put(keys[1], data(right.N+by))}, nil
		})
		return err
	}
	lost := &lossy{Store: h.Store, plan: func(n int) writeOutcome { return writeOutcome(n % 4) }}
	parallel(t, 8, func(i int) error {
		for range 5 {
			if err := move(lost, i+1); err != nil {
				return err
			}
		}
		return nil
	})
	var right counter
	if err := json.Unmarshal(store.StripWriteID(get(t, h, "right").Data), &right); err != nil || right.N != 5*36 {
		t.Errorf("moved %d, %v, want %d", right.N, err, 5*36)
	}
	_, err := store.Transact(t.Context(), h.Store, nil, func([]store.Value) ([]store.Op, error) { return nil, nil })
	wantKind(t, "no keys", err, store.ErrInvalid)
}
