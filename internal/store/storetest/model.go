package storetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"lull/internal/store"
)

// step is one transaction of the model: a few writes, some of them conditional on a
// key being absent.
type step struct {
	ops    []store.Op
	absent string
}

// Model runs random transactions of concurrent writers. It checks, at every revision,
// that applying the events of a watch to a map gives the content of the store. with
// passes a Harness to each run; it may call run inside a bubble, because all random
// choices are made before.
func Model(t *testing.T, with func(t *testing.T, run func(Harness) error) error) {
	names := []string{"a", "a/b", "b", "c/1", "c/2"}
	rapid.Check(t, func(rt *rapid.T) {
		writers := make([][]step, rapid.IntRange(1, 4).Draw(rt, "writers"))
		for w := range writers {
			for i := range rapid.IntRange(1, 12).Draw(rt, "steps") {
				s := step{absent: rapid.SampledFrom(append(names, "", "", "")).Draw(rt, "absent")}
				for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom(names), 1, 4, rapid.ID[string]).Draw(rt, "keys") {
					op := store.Put(name, fmt.Appendf(nil, "%d.%d", w, i))
					if rapid.IntRange(0, 3).Draw(rt, "delete") == 0 {
						op = store.Delete(name)
					}
					s.ops = append(s.ops, op)
				}
				writers[w] = append(writers[w], s)
			}
		}
		if err := with(t, func(h Harness) error { return runModel(h, writers) }); err != nil {
			rt.Fatal(err)
		}
	})
}

func runModel(h Harness, writers [][]step) error {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	start, err := h.Store.Range(ctx, store.Query{Keys: h.all()})
	if err != nil {
		return err
	}
	live := h.Other.Watch(ctx, h.all(), start.Revision+1)
	var wg sync.WaitGroup
	errs := make([]error, len(writers))
	for w, steps := range writers {
		wg.Go(func() { errs[w] = write(ctx, h, steps) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	last, err := h.Store.Commit(ctx, store.Txn{Then: []store.Op{store.Put(h.key("last"), nil)}})
	if err != nil {
		return err
	}
	first, err := replay(ctx, h, live, start.Revision, last.Revision, nil)
	if err != nil {
		return fmt.Errorf("live watch: %w", err)
	}
	_, err = replay(ctx, h, h.Store.Watch(ctx, h.all(), start.Revision+1), start.Revision, last.Revision, first)
	if err != nil {
		return fmt.Errorf("late watch: %w", err)
	}
	return nil
}

func write(ctx context.Context, h Harness, steps []step) error {
	for _, s := range steps {
		var txn store.Txn
		if s.absent != "" {
			txn.If = []store.Cond{store.Absent(h.key(s.absent))}
		}
		for _, op := range s.ops {
			op.Key = h.key(op.Key)
			txn.Then = append(txn.Then, op)
		}
		if _, err := h.Store.Commit(ctx, txn); err != nil {
			return err
		}
	}
	return nil
}

// replay applies the events of a watch to a map up to revision last, compares the map
// with the store at each revision, and returns the events. A second watch must
// deliver the same events.
func replay(ctx context.Context, h Harness, batches <-chan store.Batch, after, last int64, want []string) ([]string, error) {
	state := map[string]string{}
	var seen []string
	for b := range batches {
		if b.Err != nil {
			return nil, b.Err
		}
		if len(b.Events) == 0 {
			continue
		}
		if b.Revision <= after {
			return nil, fmt.Errorf("batch at %d after %d", b.Revision, after)
		}
		after = b.Revision
		var line []string
		for _, e := range b.Events {
			if e.Deleted {
				delete(state, e.Value.Key)
			} else {
				state[e.Value.Key] = fmt.Sprintf("%s@%d", e.Value.Data, e.Value.ModRevision)
			}
			line = append(line, fmt.Sprint(e))
		}
		slices.Sort(line)
		seen = append(seen, fmt.Sprint(b.Revision, line))
		page, err := h.Store.Range(ctx, store.Query{Keys: h.all(), Revision: b.Revision})
		if err != nil {
			return nil, err
		}
		held := map[string]string{}
		for _, v := range page.Values {
			held[v.Key] = fmt.Sprintf("%s@%d", v.Data, v.ModRevision)
		}
		if !maps.Equal(state, held) {
			return nil, fmt.Errorf("at %d the events make %v, the keys are %v", b.Revision, state, held)
		}
		if b.Revision == last {
			if want != nil && !slices.Equal(seen, want) {
				return nil, fmt.Errorf("saw\n%s\nwant\n%s", strings.Join(seen, "\n"), strings.Join(want, "\n"))
			}
			return seen, nil
		}
	}
	return nil, fmt.Errorf("watch ended at %d, before %d", after, last)
}
