package fleet

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Keys of the rules: policies, schedules, groups, overrides and budgets. The
// mark changes with each of them, so that a transaction can check that its
// rules are the newest.
const (
	rulesPrefix    = "policy/"
	namedPrefix    = rulesPrefix + "named/"
	schedulePrefix = rulesPrefix + "schedule/"
	groupPrefix    = rulesPrefix + "group/"
	overridePrefix = rulesPrefix + "override/"
	budgetPrefix   = rulesPrefix + "budget/"
	rulesMark      = rulesPrefix + "mark"
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
	Changed string `json:"changed"` // the key that did
}

// rules is a Set, the store revision at which it was read, and its source: the
// number of records, and the revision of the newest.
type rules struct {
	*policy.Set
	revision int64
	records  int
	newest   int64
}

// Rules returns the policies, schedules, groups, overrides and budgets as last
// read.
func (f *Fleet) Rules() *policy.Set { return f.now.rules.Load().Set }

// ruleBook builds a Set from records, and is updated record by record.
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

// takeRules puts a Set into the snapshot unless that has a newer one. An
// unreadable record leaves the last good Set unchanged.
func (f *Fleet) takeRules(b ruleBook, revision int64) error {
	made := &rules{revision: revision, records: len(b)}
	for _, v := range b {
		made.newest = max(made.newest, v.ModRevision)
	}
	var built *policy.Set
	same := false
	for {
		old := f.now.rules.Load()
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
		if f.now.rules.CompareAndSwap(old, made) {
			break
		}
	}
	if same {
		return nil
	}
	if changed := f.now.changed.Load(); changed != nil {
		(*changed)()
	}
	return nil
}

// OnRules calls fn after the rules have changed; it must not block.
func (f *Fleet) OnRules(fn func()) { f.now.changed.Store(&fn) }

// CountBy sets the function that counts the workers of a selector, for budgets
// in percent.
func (f *Fleet) CountBy(fn func(policy.Scope) int) { f.now.size.Store(&fn) }

func (f *Fleet) size(s policy.Scope) int {
	if fn := f.now.size.Load(); fn != nil {
		return (*fn)(s)
	}
	return 0
}

// RefreshRules reads the rules.
func (f *Fleet) RefreshRules(ctx context.Context) error {
	page, err := store.List(ctx, f.store, store.Prefix(rulesPrefix))
	if err != nil {
		return fmt.Errorf("cannot read the policies: %w", err)
	}
	book := ruleBook{}
	for _, v := range page.Values {
		book[v.Key] = v
	}
	return f.takeRules(book, page.Revision)
}

// followRules keeps the rules current until ctx ends.
func (f *Fleet) followRules(ctx context.Context, fault func(error)) error {
	book := ruleBook{}
	take := func(revision int64) error {
		if err := f.takeRules(book, revision); err != nil {
			fault(err)
		}
		return nil
	}
	return store.Follow(ctx, f.store, store.Prefix(rulesPrefix), store.Follower{
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

// errRules requests the same change with newer rules.
var errRules = errors.New("newer rules are needed")

// subject returns the properties of w that rules depend on. tmpl may be nil.
func (f *Fleet) subject(w *worker.Worker, tmpl *Template) *policy.Subject {
	s := &policy.Subject{ID: w.ID, Region: w.AWSRegion, Tags: w.Tags, Policy: w.Policy, Own: policy.Values{
		IdleTimeoutMinutes: w.IdleTimeoutMinutes, SnoozeMinutes: w.SnoozeMinutes,
	}}
	if w.PauseAction != "" {
		s.Own.PauseAction = &w.PauseAction
	}
	if w.Schedule != "" {
		s.Own.Schedule = &w.Schedule
	}
	if len(w.ActivitySources) > 0 {
		s.Own.ActivitySources = w.ActivitySources
	}
	if len(w.AcceptedRisks) > 0 {
		s.Own.AcceptedRisks = w.AcceptedRisks
	}
	if w.PolicySince != nil {
		s.Since = *w.PolicySince
	}
	if tmpl != nil && tmpl.IdleDetection != nil {
		s.Template, s.FromTmpl = tmpl.Name, tmpl.values(f.Settings())
	}
	return s
}

// values returns a template's settings as a layer of policy.
func (t *Template) values(s settings.Settings) policy.Values {
	d := t.IdleDetection
	v := policy.Values{Enabled: &d.Enabled}
	timeout := int(s.WorkerIdleTimeout / time.Minute)
	if d.HibernateThresholdMinutes > 0 {
		timeout = d.HibernateThresholdMinutes
		v.IdleTimeoutMinutes = &timeout
	}
	if d.IdleThresholdMinutes > 0 {
		warn := max(0, timeout-d.IdleThresholdMinutes)
		v.WarnBeforeMinutes = &warn
	}
	if d.CheckIntervalMinutes > 0 {
		v.CheckIntervalMinutes = &d.CheckIntervalMinutes
	}
	return v
}

// Policy returns the effective policy of a worker now, with its template.
func (f *Fleet) Policy(ctx context.Context, w *worker.Worker) (policy.Resolved, error) {
	if w.TemplateName == "" {
		return f.PolicyWith(time.Now(), w, nil), nil
	}
	t, err := f.Template(ctx, w.TemplateName)
	if _, missing := errors.AsType[*failure.NotFound](err); missing {
		return f.PolicyWith(time.Now(), w, nil), nil
	}
	if err != nil {
		return policy.Resolved{}, err
	}
	return f.PolicyWith(time.Now(), w, &t), nil
}

// PolicyWith is Policy at a time with a given template, which may be nil.
func (f *Fleet) PolicyWith(now time.Time, w *worker.Worker, tmpl *Template) policy.Resolved {
	return f.Rules().Resolve(now, f.Settings().Base(), f.subject(w, tmpl))
}
