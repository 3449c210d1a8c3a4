package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"runtime/pprof"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"

	"lull/internal/lib/lockfile"
	"lull/internal/store"
)

// EmbeddedConfig configures the embedded server.
type EmbeddedConfig struct {
	// Dir is the data directory. It is created if needed, and made private to
	// its owner (mode 0700).
	Dir string
	// Logger receives etcd's log; nil discards it.
	Logger *slog.Logger
	// QuotaBytes is the maximum size of the store; 0 means 4 GiB.
	QuotaBytes int64
	// KeepRevisions is how many revisions of history Run keeps; 0 means 100,000.
	KeepRevisions int64
	// ShortTicks makes the start ten times faster, for tests.
	ShortTicks bool
	// NoSync disables fsync, for tests: a crash of the machine (not of the
	// process) then loses data.
	NoSync bool
}

const (
	defaultQuota = 4 << 30
	defaultKeep  = 100_000
	// catchUp is how many applied log entries etcd keeps in memory for members
	// that lag behind. A cluster of one has no such members.
	catchUp    = 100
	memberName = "lull"
	// memberURL is the peer address of the only member. Nothing listens there and
	// nothing connects to it.
	memberURL = "http://127.0.0.1:1"
	// etcdDir is etcd's own directory inside the data directory.
	etcdDir = "etcd"
)

// OpenEmbedded starts an etcd server in this process and waits until it is
// usable. Close the Store to stop the server. If another process has the
// directory open, the error names that process. If the disk fails later, the
// process panics, because etcd must not continue without its log.
func OpenEmbedded(ctx context.Context, cfg EmbeddedConfig) (*Store, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.QuotaBytes == 0 {
		cfg.QuotaBytes = defaultQuota
	}
	if cfg.KeepRevisions == 0 {
		cfg.KeepRevisions = defaultKeep
	}
	if err := makePrivate(cfg.Dir); err != nil {
		return nil, err
	}
	lock, err := lockDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	var server *embed.Etcd
	pprof.Do(ctx, pprof.Labels("part", "store"), func(ctx context.Context) { server, err = startServer(ctx, cfg) })
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cannot start the store in %q: %w", cfg.Dir, err), lock.Close())
	}
	s := newStore(v3client.New(server.Server), cfg.Logger)
	s.keep = cfg.KeepRevisions
	s.defragment = func(context.Context) error { return server.Server.Defragment() }
	s.shut = func() error {
		server.Close()
		return lock.Close()
	}
	s.endLeases(ctx)
	return s, nil
}

// endLeases revokes every lease. The lock on the directory proves that the
// holders are gone, so their leases need not be waited for. A lease that cannot
// be revoked expires by itself.
func (s *Store) endLeases(ctx context.Context) {
	call, done, err := s.begin(ctx)
	if err != nil {
		return
	}
	defer done()
	all, err := s.client.Leases(call)
	for i := 0; err == nil && i < len(all.Leases); i++ {
		_, err = s.client.Revoke(call, all.Leases[i].ID)
	}
	if err != nil {
		s.log.Warn("old leases run out by themselves", "err", err)
	}
}

func startServer(ctx context.Context, cfg EmbeddedConfig) (*embed.Etcd, error) {
	server, err := embed.StartEtcd(embedConfig(cfg))
	if err != nil {
		return nil, err
	}
	select {
	case <-server.Server.ReadyNotify():
		return server, nil
	case <-server.Server.StopNotify():
		server.Close()
		return nil, errors.New("the embedded server stopped unexpectedly")
	case <-ctx.Done():
		server.Close()
		return nil, context.Cause(ctx)
	}
}

func embedConfig(cfg EmbeddedConfig) *embed.Config {
	c := embed.NewConfig()
	c.Name = memberName
	c.Dir = filepath.Join(cfg.Dir, etcdDir)
	c.ListenPeerUrls = nil
	c.ListenClientUrls = nil
	c.ListenMetricsUrls = nil
	c.AdvertiseClientUrls = nil
	own, err := url.Parse(memberURL)
	if err != nil {
		panic(err) // a constant URL
	}
	c.AdvertisePeerUrls = []url.URL{*own}
	c.InitialCluster = memberName + "=" + memberURL
	c.EnableGRPCGateway = false
	c.QuotaBackendBytes = cfg.QuotaBytes
	c.SnapshotCatchUpEntries = catchUp
	c.MaxTxnOps = store.MaxOps
	c.UnsafeNoFsync = cfg.NoSync
	c.WatchProgressNotifyInterval = time.Minute
	if cfg.ShortTicks {
		c.TickMs, c.ElectionMs = 10, 50
		c.WatchProgressNotifyInterval = 100 * time.Millisecond
	}
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zapLogger(cfg.Logger))
	return c
}

// makePrivate creates dir if needed and makes it accessible only to its owner.
func makePrivate(dir string) error {
	if dir == "" {
		return errors.New("cannot open a data directory without a name")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("cannot make data directory: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("cannot use data directory: %w", err)
	}
	if info.Mode().Perm()&0o077 == 0 {
		return nil
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("cannot make data directory private: %w", err)
	}
	return nil
}

// lockDir takes the lock that keeps a second process out of dir. The kernel
// releases it when the process ends, in whatever way.
func lockDir(dir string) (*os.File, error) {
	f, err := lockfile.Take(filepath.Join(dir, "lock"))
	var held *lockfile.HeldError
	switch {
	case errors.As(err, &held) && held.PID != 0:
		return nil, fmt.Errorf("cannot open data directory %q: it is in use by process %d", dir, held.PID)
	case errors.As(err, &held):
		return nil, fmt.Errorf("cannot open data directory %q: it is in use by another process", dir)
	case err != nil:
		return nil, fmt.Errorf("cannot lock data directory %q: %w", dir, err)
	}
	return f, nil
}
