package fleet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/sealed"
	"lull/internal/store"
)

// Options configure a Fleet.
type Options struct {
	Store store.Store
	ID    string // of this fleet, the value of the tag managed-by; never empty
	Seal  *sealed.Sealer
	// Accounts are the names of the accounts, besides the credentials' own,
	// that workers may be in.
	Accounts []string
	// Flags, Env and File are the layers of settings above and below the stored
	// ones.
	Flags, Env, File Layer
}

// Fleet is the only way to read and change the fleet's records. It is safe for
// concurrent use. Any number of processes may have one on the same store.
type Fleet struct {
	*audit.Log
	*channel.Outbox
	opts   Options
	store  store.Store
	guards []store.Cond
	now    *snapshot
}

// snapshot is the state that Run keeps current for all views of a Fleet.
type snapshot struct {
	settings atomic.Pointer[effective]
	halt     atomic.Pointer[Halt]
	haltSet  chan struct{} // closed and replaced, under mu, when the halt was read again
	mu       sync.Mutex
	pool     atomic.Pointer[Pool]
	rules    atomic.Pointer[rules]
	changed  atomic.Pointer[func()]
	size     atomic.Pointer[func(policy.Scope) int]
	poolers  poolers
}

type effective struct {
	Settings
	all      []Setting
	revision int64
}

// New returns a Fleet over a store. It does no I/O: the settings are those of
// the process until Refresh or Run has read the stored ones. Errors: faults of
// the layers.
func New(o Options) (*Fleet, error) {
	if err := failure.CheckName("fleet id", o.ID); err != nil {
		return nil, err
	}
	o.Flags.Source, o.Env.Source, o.File.Source = FromFlag, FromEnv, FromFile
	f := &Fleet{Log: audit.New(o.Store), opts: o, store: o.Store, now: &snapshot{haltSet: make(chan struct{})}}
	s, all, err := Resolve(o.Flags, o.Env, o.File)
	if err != nil {
		return nil, err
	}
	f.now.settings.Store(&effective{Settings: s, all: all})
	f.Outbox = channel.NewOutbox(o.Store, f.channels)
	f.now.halt.Store(&Halt{})
	f.now.pool.Store(&Pool{})
	f.now.rules.Store(&rules{Set: policy.New(nil, nil, nil, nil, nil)})
	return f, nil
}

// ID returns the fleet's ID.
func (f *Fleet) ID() string { return f.opts.ID }

// Store returns the fleet's store.
func (f *Fleet) Store() store.Store { return f.store }

// Guarded returns a view of f whose writes succeed only while conds hold.
// Otherwise they fail with store.ErrLeaseLost.
func (f *Fleet) Guarded(conds ...store.Cond) *Fleet {
	g := *f
	g.guards = append(append([]store.Cond(nil), f.guards...), conds...)
	g.Log = audit.New(g.store, g.guards...)
	g.Outbox = channel.NewOutbox(g.store, f.channels, g.guards...)
	return &g
}

// Settings returns the effective settings as last read.
func (f *Fleet) Settings() Settings { return f.now.settings.Load().Settings }

func (f *Fleet) channels() map[string]channel.Channel { return f.Settings().NotifyChannels }

// AllSettings lists the effective settings with their sources, and the
// revision of the stored ones.
func (f *Fleet) AllSettings() ([]Setting, int64) {
	e := f.now.settings.Load()
	return e.all, e.revision
}

// TrimAudit removes the oldest entries beyond the age and size in the settings,
// after archive has stored them. It returns their number.
func (f *Fleet) TrimAudit(ctx context.Context, now time.Time, archive func([]audit.Entry) error) (int, error) {
	s := f.Settings()
	return f.Trim(ctx, now, s.AuditRetention, int64(s.AuditMaxMiB)<<20, archive)
}

// storedSettings is the record of the settings changed by users.
type storedSettings struct {
	Values map[string]any `json:"values"`
}

var settingsCodec = store.Codec[storedSettings]{Version: 1}

// Refresh reads the stored settings, the halt, the pool and the rules.
func (f *Fleet) Refresh(ctx context.Context) error {
	res, err := f.store.Commit(ctx, store.Txn{Read: []string{settingsKey, haltKey, poolKey}})
	if err != nil {
		return fmt.Errorf("cannot read the settings: %w", err)
	}
	return errors.Join(f.take(res.Read[0]), f.take(res.Read[1]), f.take(res.Read[2]), f.RefreshRules(ctx))
}

// take puts a record that was read or watched into the snapshot.
func (f *Fleet) take(v store.Value) error {
	switch v.Key {
	case settingsKey:
		var rec storedSettings
		if v.Exists() {
			var err error
			if rec, err = settingsCodec.Decode(v.Key, v.Data); err != nil {
				return err
			}
		}
		s, all, err := Resolve(f.opts.Flags, f.opts.Env, Layer{Source: FromStored, Values: rec.Values}, f.opts.File)
		if err != nil {
			return err // the last good ones apply
		}
		f.now.settings.Store(&effective{Settings: s, all: all, revision: v.ModRevision})
	case haltKey:
		h, err := decodeHalt(v)
		if err != nil {
			return err
		}
		f.now.mu.Lock()
		f.now.halt.Store(&h)
		close(f.now.haltSet)
		f.now.haltSet = make(chan struct{})
		f.now.mu.Unlock()
	case poolKey:
		p, err := decodePool(v)
		if err != nil {
			return err
		}
		f.now.pool.Store(&p)
	}
	return nil
}

// Run keeps settings, halt, pool and rules current until ctx ends. It calls
// fault for each unreadable record; the last good one then applies.
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
	for _, key := range []string{settingsKey, poolKey} {
		go func() { done <- follow(key) }()
	}
	go func() { done <- f.followRules(ctx, fault) }()
	err := follow(haltKey)
	return errors.Join(err, <-done, <-done, <-done)
}

// PutSettings changes stored settings. A nil value removes the stored one, so
// that the layer below applies. Errors: Invalid with the field, Conflict for a
// key that a flag or the environment pins.
func (f *Fleet) PutSettings(ctx context.Context, by audit.Actor, values map[string]any) ([]Setting, error) {
	for key, v := range values {
		field, ok := FieldOf(key)
		if !ok {
			return nil, &failure.NotFound{Kind: "setting", Name: key}
		}
		for _, l := range []Layer{f.opts.Flags, f.opts.Env} {
			if _, pinned := l.Values[key]; pinned {
				return nil, &failure.Conflict{Kind: "setting", Name: key, Detail: fmt.Sprintf("it is pinned by %s %s", l.Source, field.Env)}
			}
		}
		if field.Key == "cml_default_password" && v != nil {
			s, ok := v.(string)
			if !ok {
				return nil, failure.Invalidf(key, "it is not a text")
			}
			sealed, err := f.opts.Seal.Seal(key, s)
			if err != nil {
				return nil, err
			}
			values[key] = string(sealed)
		}
	}
	var all []Setting
	v, err := store.Update(ctx, f.store, settingsKey, func(old store.Value) ([]byte, []store.Op, error) {
		rec := storedSettings{}
		if old.Exists() {
			var err error
			if rec, err = settingsCodec.Decode(settingsKey, old.Data); err != nil {
				return nil, nil, err
			}
		}
		merged := map[string]any{}
		for k, v := range rec.Values {
			merged[k] = v
		}
		for k, v := range values {
			if v == nil {
				delete(merged, k)
			} else {
				merged[k] = v
			}
		}
		var err error
		if _, all, err = Resolve(f.opts.Flags, f.opts.Env, Layer{Source: FromStored, Values: merged}, f.opts.File); err != nil {
			if bad, ok := errors.AsType[*failure.Invalid](err); ok {
				return nil, nil, bad
			}
			return nil, nil, err
		}
		data, err := settingsCodec.Encode(settingsKey, storedSettings{Values: merged})
		if err != nil {
			return nil, nil, err
		}
		ops, err := audit.Ops(audit.Entry{Action: "settings_changed", By: by, Detail: joinKeys(values)})
		return data, ops, err
	}, f.guards...)
	if err != nil {
		return nil, err
	}
	return all, f.take(v)
}

func joinKeys(m map[string]any) string {
	return strings.Join(slices.Sorted(maps.Keys(m)), ", ")
}
