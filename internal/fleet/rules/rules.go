// Package rules holds the policies, schedules, groups, overrides and budgets of a
// fleet, and how users change them.
package rules

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"lull/internal/core/policy"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Keys of the rules: policies, schedules, groups, overrides and budgets. The mark is
// rewritten with each of them, so that a transaction can check that its rules are the
// newest.
const (
	rulesPrefix    = "policy/"
	namedPrefix    = rulesPrefix + "named/"
	schedulePrefix = rulesPrefix + "schedule/"
	groupPrefix    = rulesPrefix + "group/"
	overridePrefix = rulesPrefix + "override/"
	budgetPrefix   = rulesPrefix + "budget/"
	Mark           = rulesPrefix + "mark"
)

var (
	policyCodec   = store.Codec[policy.Named]{Version: 1}
	scheduleCodec = store.Codec[policy.Schedule]{Version: 1}
	groupCodec    = store.Codec[policy.Group]{Version: 1}
	overrideCodec = store.Codec[policy.Override]{Version: 1}
	budgetCodec   = store.Codec[policy.Budget]{Version: 1}
	markCodec     = store.Codec[mark]{Version: 1}
)

type mark struct {
	Changed string `json:"changed"` // key of the rule that was changed
}

// Book holds the rules in a store, as last read.
type Book struct {
	store   store.Store
	guards  []store.Cond
	workers Workers
	now     *lastRead
}

// Workers reads the workers that rules apply to.
type Workers interface {
	Worker(ctx context.Context, id string) (worker.Worker, error)
	Workers(ctx context.Context, q worker.Filter, after string, limit int) (worker.Page, error)
}

// lastRead is shared by all views of a Book.
type lastRead struct {
	rules   atomic.Pointer[version]
	changed atomic.Pointer[func()]
	size    atomic.Pointer[func(policy.Scope) int]
}

// NewBook returns a Book with the built-in rules. RefreshRules or FollowRules reads
// those in the store.
func NewBook(s store.Store, of Workers) *Book {
	b := &Book{store: s, workers: of, now: &lastRead{}}
	b.now.rules.Store(&version{Set: policy.New(nil, nil, nil, nil, nil)})
	return b
}

// Guarded returns a view of r whose writes fail unless all guards hold.
func (r *Book) Guarded(guards []store.Cond) *Book {
	g := *r
	g.guards = guards
	return &g
}

// RulesAt returns the store revision at which the rules were read.
func (r *Book) RulesAt() int64 { return r.now.rules.Load().revision }

// version is a Set, the store revision at which it was read, and what identifies its
// content: the number of records, and the revision of the newest.
type version struct {
	*policy.Set
	revision int64
	records  int
	newest   int64
}

// Rules returns the policies, schedules, groups, overrides and budgets as last
// read.
func (r *Book) Rules() *policy.Set { return r.now.rules.Load().Set }

// ruleBook holds the records of a Set by key, and is updated record by record.
type ruleBook map[string]store.Value

func (b ruleBook) set() (*policy.Set, error) {
	var errs []error
	var policies []policy.Named
	var schedules []policy.Schedule
	var groups []policy.Group
	var overrides []policy.Override
	var budgets []policy.Budget
	for key, v := range b {
		switch {
		case strings.HasPrefix(key, namedPrefix):
			errs = append(errs, decodeInto(policyCodec, v, &policies))
		case strings.HasPrefix(key, schedulePrefix):
			errs = append(errs, decodeInto(scheduleCodec, v, &schedules))
		case strings.HasPrefix(key, groupPrefix):
			errs = append(errs, decodeInto(groupCodec, v, &groups))
		case strings.HasPrefix(key, overridePrefix):
			errs = append(errs, decodeInto(overrideCodec, v, &overrides))
		case strings.HasPrefix(key, budgetPrefix):
			errs = append(errs, decodeInto(budgetCodec, v, &budgets))
		}
	}
	return policy.New(policies, schedules, groups, overrides, budgets), errors.Join(errs...)
}

func decodeInto[T any](c store.Codec[T], v store.Value, to *[]T) error {
	rec, err := c.Decode(v.Key, v.Data)
	if err == nil {
		*to = append(*to, rec)
	}
	return err
}

// takeRules makes a Set of b current unless the present one is newer. If a record is
// unreadable, the last good Set stays in effect.
func (r *Book) takeRules(b ruleBook, revision int64) error {
	made := &version{revision: revision, records: len(b)}
	for _, v := range b {
		made.newest = max(made.newest, v.ModRevision)
	}
	var built *policy.Set
	same := false
	for {
		old := r.now.rules.Load()
		if revision < old.revision {
			return nil
		}
		if same = old.records == made.records && old.newest == made.newest; same {
			made.Set = old.Set
		} else {
			if built == nil {
				var err error
				if built, err = b.set(); err != nil {
					return err
				}
			}
			made.Set = built
		}
		if r.now.rules.CompareAndSwap(old, made) {
			break
		}
	}
	if same {
		return nil
	}
	if changed := r.now.changed.Load(); changed != nil {
		(*changed)()
	}
	return nil
}

// OnRules sets the function that is called after the rules have changed; it must not
// block.
func (r *Book) OnRules(fn func()) { r.now.changed.Store(&fn) }

// CountBy sets the function that counts the workers of a selector, for budgets
// in percent.
func (r *Book) CountBy(fn func(policy.Scope) int) { r.now.size.Store(&fn) }

func (r *Book) Size(s policy.Scope) int {
	if fn := r.now.size.Load(); fn != nil {
		return (*fn)(s)
	}
	return 0
}

// RefreshRules reads the rules.
func (r *Book) RefreshRules(ctx context.Context) error {
	page, err := store.List(ctx, r.store, store.Prefix(rulesPrefix))
	if err != nil {
		return fmt.Errorf("cannot read the policies: %w", err)
	}
	book := ruleBook{}
	for _, v := range page.Values {
		book[v.Key] = v
	}
	return r.takeRules(book, page.Revision)
}

// FollowRules keeps the rules current until ctx ends.
func (r *Book) FollowRules(ctx context.Context, fault func(error)) error {
	book := ruleBook{}
	take := func(revision int64) error {
		if err := r.takeRules(book, revision); err != nil {
			fault(err)
		}
		return nil
	}
	return store.Follow(ctx, r.store, store.Prefix(rulesPrefix), store.Follower{
		Reset: func(p store.Page) error {
			clear(book)
			for _, v := range p.Values {
				book[v.Key] = v
			}
			return take(p.Revision)
		},
		Apply: func(b store.Batch) error {
			for _, e := range b.Events {
				if e.Deleted {
					delete(book, e.Value.Key)
				} else {
					book[e.Value.Key] = e.Value
				}
			}
			return take(b.Revision)
		},
	})
}
