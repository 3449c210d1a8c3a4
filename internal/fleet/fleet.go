package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"lull/internal/core/failure"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/rules"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Options configure a Fleet.
type Options struct {
	Store store.Store
	ID    string // of this fleet, the value of the tag managed-by; never empty
	Seal  *sealed.Sealer
	// Accounts are the names of the accounts that workers may be in, besides the
	// credentials' own.
	Accounts []string
	// Flags, Env and File are the layers of settings above and below the stored
	// ones.
	Flags, Env, File settings.Layer
}

// Fleet is the only way to read and change the fleet's records. It is safe for
// concurrent use. Any number of processes may have a Fleet on the same store.
type Fleet struct {
	*audit.Log
	*channel.Outbox
	*launch.Launches
	*rules.Book
	*settings.Current
	*halt.Switch
	opts   Options
	store  store.Store
	guards []store.Cond
	now    *snapshot
}

// snapshot is the state that Run keeps current, shared by all views of a Fleet.
type snapshot struct {
	pool    atomic.Pointer[worker.Pool]
	poolers poolers
}

// New returns a Fleet over a store. It does no I/O: until Refresh or Run has read the
// stored settings, those of the process apply. Errors: invalid layers.
func New(o Options) (*Fleet, error) {
	if err := failure.CheckName("fleet id", o.ID); err != nil {
		return nil, err
	}
	current, err := settings.NewCurrent(o.Store, o.Seal, o.Flags, o.Env, o.File)
	if err != nil {
		return nil, err
	}
	f := &Fleet{Log: audit.New(o.Store), Current: current, Switch: halt.NewSwitch(o.Store), opts: o, store: o.Store, now: &snapshot{}}
	f.Outbox = channel.NewOutbox(o.Store, f.channels)
	f.Launches = launch.New(o.Store, o.Seal, o.ID, f.Settings)
	f.now.pool.Store(&worker.Pool{})
	f.Book = rules.NewBook(o.Store, f)
	return f, nil
}

// ID returns the fleet's ID.
func (f *Fleet) ID() string { return f.opts.ID }

// Store returns the fleet's store.
func (f *Fleet) Store() store.Store { return f.store }

// Guarded returns a view of f whose writes fail with store.ErrLeaseLost unless all
// conds hold.
func (f *Fleet) Guarded(conds ...store.Cond) *Fleet {
	g := *f
	g.guards = append(append([]store.Cond(nil), f.guards...), conds...)
	g.Log = audit.New(g.store, g.guards...)
	g.Outbox = channel.NewOutbox(g.store, f.channels, g.guards...)
	g.Current, g.Switch = f.Current.Guarded(g.guards), f.Switch.Guarded(g.guards)
	g.Book = f.Book.Guarded(g.guards)
	return &g
}

func (f *Fleet) channels() map[string]channel.Channel { return f.Settings().NotifyChannels }

// Refresh reads the stored settings, the halt, the pool and the rules.
func (f *Fleet) Refresh(ctx context.Context) error {
	res, err := f.store.Commit(ctx, store.Txn{Read: []string{settings.Key, halt.Key, worker.PoolKey}})
	if err != nil {
		return fmt.Errorf("cannot read the settings: %w", err)
	}
	return errors.Join(f.take(res.Read[0]), f.take(res.Read[1]), f.take(res.Read[2]), f.RefreshRules(ctx))
}

// take stores a record that was read or watched in the snapshot.
func (f *Fleet) take(v store.Value) error {
	switch v.Key {
	case settings.Key:
		return f.Current.Take(v)
	case halt.Key:
		return f.Switch.Take(v)
	case worker.PoolKey:
		p, err := worker.DecodePool(v)
		if err != nil {
			return err
		}
		f.now.pool.Store(&p)
	}
	return nil
}

// Run keeps settings, halt, pool and rules current until ctx ends. It calls fault for
// each unreadable record; the last good one then stays in effect.
func (f *Fleet) Run(ctx context.Context, fault func(error)) error {
	follow := func(key string) error {
		return store.Follow(ctx, f.store, store.Key(key), store.Follower{
			Reset: func(p store.Page) error {
				v := store.Value{Key: key}
				if len(p.Values) > 0 {
					v = p.Values[0]
				}
				if err := f.take(v); err != nil {
					fault(err)
				}
				return nil
			},
			Apply: func(b store.Batch) error {
				for _, e := range b.Events {
					v := e.Value
					if e.Deleted {
						v = store.Value{Key: key}
					}
					if err := f.take(v); err != nil {
						fault(err)
					}
				}
				return nil
			},
		})
	}
	done := make(chan error, 3)
	for _, key := range []string{settings.Key, worker.PoolKey} {
		go func() { done <- follow(key) }()
	}
	go func() { done <- f.FollowRules(ctx, fault) }()
	err := follow(halt.Key)
	return errors.Join(err, <-done, <-done, <-done)
}

// TrimAudit removes the oldest entries beyond the age and size in the settings,
// after archive has stored them. It returns their number.
func (f *Fleet) TrimAudit(ctx context.Context, now time.Time, archive func([]audit.Entry) error) (int, error) {
	s := f.Settings()
	return f.Trim(ctx, now, s.AuditRetention, int64(s.AuditMaxMiB)<<20, archive)
}
