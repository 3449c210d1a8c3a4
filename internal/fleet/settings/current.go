package settings

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"lull/internal/core/failure"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
	"lull/internal/store"
)

// Current holds the effective settings: those of the process combined with the stored
// ones.
type Current struct {
	store            store.Store
	guards           []store.Cond
	seal             *sealed.Sealer
	flags, env, file Layer
	now              *atomic.Pointer[effective]
}

// NewCurrent returns the settings of the process. The stored ones are added by Take.
// Errors: invalid layers.
func NewCurrent(s store.Store, seal *sealed.Sealer, flags, env, file Layer) (*Current, error) {
	flags.Source, env.Source, file.Source = FromFlag, FromEnv, FromFile
	c := &Current{store: s, seal: seal, flags: flags, env: env, file: file, now: &atomic.Pointer[effective]{}}
	set, all, err := Resolve(flags, env, file)
	if err != nil {
		return nil, err
	}
	c.now.Store(&effective{Settings: set, all: all})
	return c, nil
}

// Guarded returns a view of c whose writes fail unless all guards hold.
func (c *Current) Guarded(guards []store.Cond) *Current {
	g := *c
	g.guards = guards
	return &g
}

// Take applies stored settings that were read or watched. If they are invalid, the
// last good ones stay in effect.
func (c *Current) Take(v store.Value) error {
	var rec stored
	if v.Exists() {
		var err error
		if rec, err = codec.Decode(v.Key, v.Data); err != nil {
			return err
		}
	}
	s, all, err := Resolve(c.flags, c.env, Layer{Source: FromStored, Values: rec.Values}, c.file)
	if err != nil {
		return err
	}
	c.now.Store(&effective{Settings: s, all: all, revision: v.ModRevision})
	return nil
}

type effective struct {
	Settings
	all      []Setting
	revision int64
}

// Settings returns the effective settings as last read.
func (c *Current) Settings() Settings { return c.now.Load().Settings }

// AllSettings lists the effective settings with their sources. It also returns the
// revision of the stored ones.
func (c *Current) AllSettings() ([]Setting, int64) {
	e := c.now.Load()
	return e.all, e.revision
}

// Key is the store key of the settings.
const Key = "settings"

// stored is the record of the settings changed by users.
type stored struct {
	Values map[string]any `json:"values"`
}

var codec = store.Codec[stored]{Version: 1}

// PutSettings changes stored settings. A nil value removes the stored one, so that
// the layer below applies. Errors: Invalid with the field; Conflict for a key that a
// flag or the environment sets.
func (c *Current) PutSettings(ctx context.Context, by audit.Actor, values map[string]any) ([]Setting, error) {
	for key, v := range values {
		field, ok := FieldOf(key)
		if !ok {
			return nil, &failure.NotFound{Kind: "setting", Name: key}
		}
		for _, l := range []Layer{c.flags, c.env} {
			if _, pinned := l.Values[key]; pinned {
				return nil, &failure.Conflict{Kind: "setting", Name: key, Detail: fmt.Sprintf("it is pinned by %s %s", l.Source, field.Env)}
			}
		}
		if field.Key == "cml_default_password" && v != nil {
			s, ok := v.(string)
			if !ok {
				return nil, failure.Invalidf(key, "not a string")
			}
			sealed, err := c.seal.Seal(key, s)
			if err != nil {
				return nil, err
			}
			values[key] = string(sealed)
		}
	}
	var all []Setting
	v, err := store.Update(ctx, c.store, Key, func(old store.Value) ([]byte, []store.Op, error) {
		rec := stored{}
		if old.Exists() {
			var err error
			if rec, err = codec.Decode(Key, old.Data); err != nil {
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
		if _, all, err = Resolve(c.flags, c.env, Layer{Source: FromStored, Values: merged}, c.file); err != nil {
			if bad, ok := errors.AsType[*failure.Invalid](err); ok {
				return nil, nil, bad
			}
			return nil, nil, err
		}
		data, err := codec.Encode(Key, stored{Values: merged})
		if err != nil {
			return nil, nil, err
		}
		ops, err := audit.Ops(audit.Entry{Action: "settings_changed", By: by, Detail: joinKeys(values)})
		return data, ops, err
	}, c.guards...)
	if err != nil {
		return nil, err
	}
	return all, c.Take(v)
}

func joinKeys(m map[string]any) string {
	return strings.Join(slices.Sorted(maps.Keys(m)), ", ")
}
