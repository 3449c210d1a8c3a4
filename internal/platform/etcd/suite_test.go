package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"lull/internal/platform/etcd/etcdtest"
	"lull/internal/store"
	"lull/internal/store/storetest"
)

// testLogger returns a logger that writes to the test's log.
func testLogger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

func openTest(t testing.TB, cfg EmbeddedConfig) *Store {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(t.TempDir(), "data")
	}
	cfg.ShortTicks = true
	cfg.Logger = testLogger(t)
	s, err := OpenEmbedded(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeTest(t, s) })
	return s
}

func closeTest(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

// deafLease is a lease client whose renewals fail while deaf is set.
type deafLease struct {
	clientv3.Lease
	deaf atomic.Bool
}

func (d *deafLease) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	if d.deaf.Load() {
		return nil, errors.New("cannot hear")
	}
	return d.Lease.KeepAliveOnce(ctx, id)
}

// suite runs the conformance suite of package store, with the same stores for all
// cases.
func suite(t *testing.T, one, two *Store) {
	deaf := &deafLease{Lease: one.client.Lease}
	one.client.Lease = deaf
	n := 0
	harness := func() storetest.Harness {
		n++
		return storetest.Harness{
			Store: one, Other: two, Prefix: fmt.Sprintf("t%d/", n),
			Compact: func(ctx context.Context, r int64) error { return one.compact(ctx, r) },
			Expire: func(ctx context.Context, id store.LeaseID) error {
				_, err := two.client.Revoke(ctx, clientv3.LeaseID(id))
				return err
			},
			DropRenewals: func() { deaf.deaf.Store(true) },
		}
	}
	for _, c := range storetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			defer deaf.deaf.Store(false)
			c.Run(t, harness())
		})
	}
	t.Run("Model", func(t *testing.T) {
		storetest.Model(t, func(_ *testing.T, run func(storetest.Harness) error) error { return run(harness()) })
	})
}

func TestSuiteEmbedded(t *testing.T) {
	s := openTest(t, EmbeddedConfig{})
	suite(t, s, s)
}

func TestSuiteDebian(t *testing.T) {
	c := etcdtest.Start(t, 1)
	suite(t, dialTest(t, c), dialTest(t, c))
}

func dialTest(t *testing.T, c *etcdtest.Cluster) *Store {
	t.Helper()
	s, err := Dial(t.Context(), ExternalConfig{Endpoints: c.Endpoints(), Logger: testLogger(t), Maintain: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeTest(t, s) })
	return s
}
