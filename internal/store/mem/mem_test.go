package mem_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"lull/internal/store"
	"lull/internal/store/mem"
	"lull/internal/store/storetest"
)

func harness(db *mem.DB) (storetest.Harness, func()) {
	one, two := db.Client(), db.Client()
	h := storetest.Harness{
		Store: one, Other: two, Prefix: "t/",
		Compact: func(_ context.Context, r int64) error { db.Compact(r); return nil },
		Expire: func(_ context.Context, id store.LeaseID) error {
			if !db.Expire(id) {
				return fmt.Errorf("cannot expire lease %x: %w", int64(id), store.ErrLeaseLost)
			}
			return nil
		},
		DropRenewals: func() {
			one.Inject(func(c mem.Call) mem.Fault {
				if c.Kind == mem.Renew {
					return mem.Fault{Err: fmt.Errorf("cannot renew: %w", store.ErrUnavailable)}
				}
				return mem.Fault{}
			})
		},
	}
	return h, func() { one.Close(); two.Close() }
}

func TestSuite(t *testing.T) {
	for _, c := range storetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			h, done := harness(mem.New(mem.Options{}))
			defer done()
			c.Run(t, h)
		})
	}
}

func TestSuiteInBubble(t *testing.T) {
	for _, c := range storetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, done := harness(mem.New(mem.Options{}))
				defer done()
				c.Run(t, h)
			})
		})
	}
}

func TestModel(t *testing.T) {
	storetest.Model(t, func(_ *testing.T, run func(storetest.Harness) error) error {
		h, done := harness(mem.New(mem.Options{}))
		defer done()
		return run(h)
	})
}

func TestModelInBubble(t *testing.T) {
	storetest.Model(t, func(t *testing.T, run func(storetest.Harness) error) (err error) {
		synctest.Test(t, func(*testing.T) {
			h, done := harness(mem.New(mem.Options{}))
			defer done()
			err = run(h)
		})
		return err
	})
}
