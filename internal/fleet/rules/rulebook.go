package rules

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Limits of the number of rules.
const (
	maxRules     = 1000 // policies, schedules, groups and budgets each
	maxOverrides = 5000
	// keepOverrides is how long an override is kept after its end. The last
	// boundaries of a schedule may be ones that the override skipped.
	keepOverrides = 60 * 24 * time.Hour
)

// changeRule writes one rule, the mark and an audit entry, and updates the cached
// rules. fn gets the stored rule, which may not exist, and returns the new data; nil
// deletes the rule.
func (r *Book) changeRule(ctx context.Context, key string, e audit.Entry, fn func(old store.Value) ([]byte, error)) error {
	return r.changeRuleSaying(ctx, key, func(old store.Value) ([]byte, audit.Entry, error) {
		data, err := fn(old)
		return data, e, err
	})
}

// changeRuleSaying is changeRule with an audit entry that fn derives from the stored
// rule.
func (r *Book) changeRuleSaying(ctx context.Context, key string, fn func(old store.Value) ([]byte, audit.Entry, error)) error {
	_, err := store.Transact(ctx, r.store, []string{key, Mark}, func(view []store.Value) ([]store.Op, error) {
		data, e, err := fn(view[0])
		e.Events = []string{audit.EventRules}
		if err != nil || string(data) == string(view[0].Data) {
			return nil, err
		}
		note, err := markCodec.Encode(Mark, mark{Changed: key + " " + rand.Text()[:8]})
		if err != nil {
			return nil, err
		}
		audit, err := audit.Ops(e)
		op := store.Put(key, data)
		if data == nil {
			op = store.Delete(key)
		}
		return append([]store.Op{store.Put(Mark, note), op}, audit...), err
	}, r.guards...)
	if err != nil {
		return err
	}
	return r.RefreshRules(ctx)
}

// put returns a function for changeRule that writes the rule that make returns. If
// revision is not 0, the stored rule must have that revision.
func put[T any](c store.Codec[T], kind, name, key string, revision int64, make func(old *T) (T, error)) func(store.Value) ([]byte, error) {
	return func(v store.Value) ([]byte, error) {
		if revision != 0 && v.ModRevision != revision {
			return nil, &failure.Conflict{Kind: kind, Name: name, Detail: "it was changed concurrently"}
		}
		var old *T
		if v.Exists() {
			rec, err := c.Decode(key, v.Data)
			if err != nil {
				return nil, err
			}
			old = &rec
		}
		rec, err := make(old)
		if err != nil {
			return nil, err
		}
		return c.Encode(key, rec)
	}
}

func stampOf(by audit.Actor) policy.Stamp {
	return policy.Stamp{UpdatedAt: time.Now().UTC().Round(0), UpdatedBy: by.Name}
}

func text(p *string) string {
	if p == nil {
		return ""
	}
	return *p
}

// knows returns NotFound if a named policy or schedule does not exist. Empty names
// are ignored.
func (r *Book) knows(policyName, schedule string) error {
	rules := r.Rules()
	if _, ok := rules.Policies[policyName]; !ok && policyName != "" {
		return &failure.NotFound{Kind: "policy", Name: policyName}
	}
	if rules.Schedules[schedule] == nil && schedule != "" {
		return &failure.NotFound{Kind: "schedule", Name: schedule}
	}
	return nil
}

// Policies lists all policies by name, including the built-in ones.
func (r *Book) Policies(ctx context.Context) ([]policy.Named, error) {
	if err := r.RefreshRules(ctx); err != nil {
		return nil, err
	}
	return slices.SortedFunc(maps.Values(r.Rules().Policies), func(a, b policy.Named) int { return cmp.Compare(a.Name, b.Name) }), nil
}

// NamedPolicy returns the policy of that name. Errors: NotFound.
func (r *Book) NamedPolicy(ctx context.Context, name string) (policy.Named, error) {
	if err := r.RefreshRules(ctx); err != nil {
		return policy.Named{}, err
	}
	p, ok := r.Rules().Policies[name]
	if !ok {
		return p, &failure.NotFound{Kind: "policy", Name: name}
	}
	return p, nil
}

// PutPolicy creates or replaces a policy. If create is set, it must not exist yet.
// Errors: Invalid, NotFound (its schedule), Conflict.
func (r *Book) PutPolicy(ctx context.Context, by audit.Actor, p policy.Named, create bool) (policy.Named, error) {
	if err := p.Validate(); err != nil {
		return p, err
	}
	if err := r.RefreshRules(ctx); err != nil {
		return p, err
	}
	if err := r.knows("", text(p.Schedule)); err != nil {
		return p, err
	}
	if _, exists := r.Rules().Policies[p.Name]; exists && create {
		return p, &failure.Conflict{Kind: "policy", Name: p.Name, Detail: "it exists already"}
	} else if !exists && len(r.Rules().Policies) >= maxRules {
		return p, &failure.Refused{Command: "create policy", Name: p.Name, Reason: "too_many", Detail: fmt.Sprintf("there are already %d, which is the limit", maxRules)}
	}
	p.Shipped, p.Stamp = false, stampOf(by)
	key := namedPrefix + p.Name
	err := r.changeRule(ctx, key, audit.Entry{Action: "policy_put", By: by, Detail: "policy " + p.Name},
		put(policyCodec, "policy", p.Name, key, 0, func(old *policy.Named) (policy.Named, error) {
			p.ScheduleSince = time.Time{}
			if p.Schedule != nil {
				p.ScheduleSince = p.UpdatedAt
				if old != nil && old.Schedule != nil && *old.Schedule == *p.Schedule {
					p.ScheduleSince = old.ScheduleSince
				}
			}
			return p, nil
		}))
	return p, err
}

// DeletePolicy removes a policy that is not in use. A built-in policy returns to its
// defaults. Errors: NotFound, Refused.
func (r *Book) DeletePolicy(ctx context.Context, by audit.Actor, name string) error {
	if _, err := r.NamedPolicy(ctx, name); err != nil {
		return err
	}
	if !policy.IsShipped(name) {
		users, err := r.usersOf(ctx, func(w *worker.Worker) bool { return w.Policy == name })
		if err != nil {
			return err
		}
		for _, g := range r.Rules().Groups {
			if g.Policy == name {
				users = append(users, g.Selector.String())
			}
		}
		if err := inUse("policy", name, users); err != nil {
			return err
		}
	}
	return r.changeRule(ctx, namedPrefix+name, audit.Entry{Action: "policy_deleted", By: by, Detail: "policy " + name},
		func(old store.Value) ([]byte, error) {
			if !old.Exists() {
				return nil, &failure.Refused{Command: "remove policy", Name: name, Reason: "shipped", Detail: "built-in policy is already at its defaults"}
			}
			return nil, nil
		})
}

func inUse(kind, name string, users []string) error {
	if len(users) == 0 {
		return nil
	}
	more := ""
	if n := len(users) - 3; n > 0 {
		users, more = users[:3], fmt.Sprintf(" and %d more", n)
	}
	return &failure.Refused{Command: "remove " + kind, Name: name, Reason: "in_use", Detail: "it is used by " + strings.Join(users, ", ") + more}
}

// usersOf returns the names of the workers for which uses returns true.
func (r *Book) usersOf(ctx context.Context, uses func(*worker.Worker) bool) ([]string, error) {
	var out []string
	for after := ""; ; {
		page, err := r.workers.Workers(ctx, worker.Filter{}, after, 1000)
		if err != nil {
			return nil, err
		}
		for i := range page.Workers {
			if uses(&page.Workers[i]) {
				out = append(out, "worker "+page.Workers[i].Name)
			}
		}
		if after = page.Next; after == "" {
			return out, nil
		}
	}
}

// Schedules lists all schedules by name.
func (r *Book) Schedules(ctx context.Context) ([]policy.Schedule, error) {
	if err := r.RefreshRules(ctx); err != nil {
		return nil, err
	}
	out := []policy.Schedule{}
	for _, name := range slices.Sorted(maps.Keys(r.Rules().Schedules)) {
		out = append(out, *r.Rules().Schedules[name])
	}
	return out, nil
}

// Schedule returns the schedule of that name. Errors: NotFound.
func (r *Book) Schedule(ctx context.Context, name string) (policy.Schedule, error) {
	if err := r.RefreshRules(ctx); err != nil {
		return policy.Schedule{}, err
	}
	if s := r.Rules().Schedules[name]; s != nil {
		return *s, nil
	}
	return policy.Schedule{}, &failure.NotFound{Kind: "schedule", Name: name}
}

// PutSchedule creates or replaces a schedule. If create is set, it must not exist
// yet. If its hours change, it first acts at its next boundary. Errors: Invalid,
// Conflict.
func (r *Book) PutSchedule(ctx context.Context, by audit.Actor, s policy.Schedule, create bool) (policy.Schedule, error) {
	if err := s.Validate(); err != nil {
		return s, err
	}
	s.Stamp = stampOf(by)
	key := schedulePrefix + s.Name
	err := r.changeRule(ctx, key, audit.Entry{Action: "schedule_put", By: by, Detail: "schedule " + s.Name},
		put(scheduleCodec, "schedule", s.Name, key, 0, func(old *policy.Schedule) (policy.Schedule, error) {
			if old != nil && create {
				return s, &failure.Conflict{Kind: "schedule", Name: s.Name, Detail: "it exists already"}
			}
			s.ChangedAt = s.UpdatedAt
			if old != nil && s.SameHours(*old) {
				s.ChangedAt = old.ChangedAt
			}
			return s, nil
		}))
	return s, err
}

// DeleteSchedule removes a schedule that nothing uses. Errors: NotFound,
// Refused.
func (r *Book) DeleteSchedule(ctx context.Context, by audit.Actor, name string) error {
	if _, err := r.Schedule(ctx, name); err != nil {
		return err
	}
	users, err := r.usersOf(ctx, func(w *worker.Worker) bool { return w.Schedule == name })
	if err != nil {
		return err
	}
	rules := r.Rules()
	for _, p := range slices.Sorted(maps.Keys(rules.Policies)) {
		if s := rules.Policies[p].Schedule; s != nil && *s == name {
			users = append(users, "policy "+p)
		}
	}
	for _, g := range rules.Groups {
		if g.Schedule != nil && *g.Schedule == name {
			users = append(users, g.Selector.String())
		}
	}
	for _, b := range rules.Budgets {
		if b.During == name {
			users = append(users, "budget "+b.Name)
		}
	}
	if err := inUse("schedule", name, users); err != nil {
		return err
	}
	return r.changeRule(ctx, schedulePrefix+name, audit.Entry{Action: "schedule_deleted", By: by, Detail: "schedule " + name},
		func(store.Value) ([]byte, error) { return nil, nil })
}

// Application says what to assign to the workers of a selector or, with Remove, to
// remove from them. Nil fields stay unchanged.
type Application struct {
	Policy, Schedule *string
	Priority         *int // priority of the group
	Remove           bool
}

// Known returns NotFound if the policy or schedule of a does not exist.
func (r *Book) Known(a Application) error { return r.knows(text(a.Policy), text(a.Schedule)) }

// becomes returns the new value of an assigned name that was was. It returns Refused
// if a name to be removed is not the assigned one. whom names the worker or group in
// that error.
func (a Application) becomes(kind, was string, asked *string, whom string) (string, error) {
	switch {
	case asked == nil:
		return was, nil
	case !a.Remove:
		return *asked, nil
	case was == *asked:
		return "", nil
	}
	there := whom + " has the " + kind + " " + was
	if was == "" {
		there = whom + " has no " + kind + " of its own"
	}
	return was, &failure.Refused{Command: "take away " + kind, Name: *asked, Reason: "not_in_place", Detail: there}
}

// Profile returns the changes that a makes to a worker.
func (a Application) Profile(w *worker.Worker) (worker.Profile, error) {
	name, err := a.becomes("policy", w.Policy, a.Policy, "worker "+w.Name)
	if err != nil {
		return worker.Profile{}, err
	}
	hours, err := a.becomes("schedule", w.Schedule, a.Schedule, "worker "+w.Name)
	if err != nil {
		return worker.Profile{}, err
	}
	out := worker.Profile{}
	if a.Policy != nil {
		out.Policy = &name
	}
	if a.Schedule != nil {
		out.Schedule = &hours
	}
	return out, nil
}

// groupID returns an ID that is the same for equal selectors.
func groupID(s policy.Scope) string {
	sum := sha256.Sum256([]byte(s.String()))
	return "g-" + hex.EncodeToString(sum[:5])
}

func (r *Book) ApplyGroup(ctx context.Context, by audit.Actor, sel policy.Scope, a Application) (policy.Group, error) {
	g := policy.Group{ID: groupID(sel), Selector: sel, Stamp: stampOf(by)}
	if err := g.Validate(); err != nil {
		return g, err
	}
	if len(r.Rules().Groups) >= maxRules {
		return g, &failure.Refused{Command: "make group", Name: sel.String(), Reason: "too_many", Detail: fmt.Sprintf("there are already %d, which is the limit", maxRules)}
	}
	key := groupPrefix + g.ID
	err := r.changeRuleSaying(ctx, key, func(v store.Value) ([]byte, audit.Entry, error) {
		e := audit.Entry{Action: "policy_applied", By: by}
		if v.Exists() {
			old, err := groupCodec.Decode(key, v.Data)
			if err != nil {
				return nil, e, err
			}
			old.Stamp = g.Stamp
			g = old
		}
		name, err := a.becomes("policy", g.Policy, a.Policy, sel.String())
		if err != nil {
			return nil, e, err
		}
		hours, err := a.becomes("schedule", text(g.Schedule), a.Schedule, sel.String())
		if err != nil {
			return nil, e, err
		}
		e.Detail = a.Describe(sel.String(), g.Policy, name, text(g.Schedule), hours)
		if a.Policy != nil {
			g.Policy, g.ScheduleSince = name, g.UpdatedAt
		}
		if a.Schedule != nil {
			g.Schedule, g.ScheduleSince = &hours, g.UpdatedAt
			if hours == "" {
				g.Schedule = nil
			}
		}
		if a.Priority != nil {
			g.Priority = *a.Priority
		}
		if err := g.Validate(); err != nil {
			return nil, e, err
		}
		if g.Policy == "" && g.Schedule == nil {
			return nil, e, nil
		}
		data, err := groupCodec.Encode(key, g)
		return data, e, err
	})
	return g, err
}

// Describe describes what a changes, including what is lost. whom is empty for the
// worker that the audit entry is about.
func (a Application) Describe(whom, policyWas, policyIs, scheduleWas, scheduleIs string) string {
	var parts []string
	part := func(asked *string, kind, was, is string) {
		if asked == nil {
			return
		}
		text, to := kind+" "+cmp.Or(is, was, "none"), " to "
		switch {
		case is == "" && was != "":
			text, to = text+" taken away", " from "
		case was != "" && was != is:
			text += " instead of " + was
		}
		if whom != "" {
			text += to + whom
		}
		parts = append(parts, text)
	}
	part(a.Policy, "policy", policyWas, policyIs)
	part(a.Schedule, "schedule", scheduleWas, scheduleIs)
	return strings.Join(parts, ", ")
}

// Groups lists the selectors that have assignments, weakest first.
func (r *Book) Groups(ctx context.Context) ([]policy.Group, error) {
	if err := r.RefreshRules(ctx); err != nil {
		return nil, err
	}
	return append([]policy.Group{}, r.Rules().Groups...), nil
}

// DeleteGroup removes all assignments of a selector. Errors: NotFound.
func (r *Book) DeleteGroup(ctx context.Context, by audit.Actor, id string) error {
	if err := failure.CheckName("group", id); err != nil {
		return err
	}
	key, nothing := groupPrefix+id, ""
	return r.changeRuleSaying(ctx, key, func(v store.Value) ([]byte, audit.Entry, error) {
		e := audit.Entry{Action: "policy_unapplied", By: by}
		if !v.Exists() {
			return nil, e, &failure.NotFound{Kind: "group", Name: id}
		}
		old, err := groupCodec.Decode(key, v.Data)
		if err != nil {
			return nil, e, err
		}
		lost := Application{Schedule: old.Schedule}
		if old.Policy != "" {
			lost.Policy = &nothing
		}
		e.Detail = "group " + id + ": " + lost.Describe(old.Selector.String(), old.Policy, "", text(old.Schedule), "")
		return nil, e, nil
	})
}

func gone(kind, name string) func(store.Value) ([]byte, error) {
	return func(old store.Value) ([]byte, error) {
		if !old.Exists() {
			return nil, &failure.NotFound{Kind: kind, Name: name}
		}
		return nil, nil
	}
}

// Budgets lists all budgets by name, including the default one.
func (r *Book) Budgets(ctx context.Context) ([]policy.Budget, error) {
	if err := r.RefreshRules(ctx); err != nil {
		return nil, err
	}
	return append([]policy.Budget{}, r.Rules().Budgets...), nil
}

// PutBudget creates or replaces a budget. Errors: Invalid, NotFound (its
// schedule).
func (r *Book) PutBudget(ctx context.Context, by audit.Actor, b policy.Budget) (policy.Budget, error) {
	if err := b.Validate(); err != nil {
		return b, err
	}
	if err := r.RefreshRules(ctx); err != nil {
		return b, err
	}
	if err := r.knows("", b.During); err != nil {
		return b, err
	}
	b.Stamp = stampOf(by)
	key := budgetPrefix + b.Name
	err := r.changeRule(ctx, key, audit.Entry{Action: "budget_put", By: by, Detail: "budget " + b.Name + ": " + b.Describe()},
		put(budgetCodec, "budget", b.Name, key, 0, func(*policy.Budget) (policy.Budget, error) { return b, nil }))
	return b, err
}

// DeleteBudget removes a budget. Errors: NotFound.
func (r *Book) DeleteBudget(ctx context.Context, by audit.Actor, name string) error {
	if err := failure.CheckName("budget", name); err != nil {
		return err
	}
	return r.changeRule(ctx, budgetPrefix+name, audit.Entry{Action: "budget_deleted", By: by, Detail: "budget " + name}, gone("budget", name))
}

// Overrides lists the overrides that have not ended; with ended, all that are still
// kept.
func (r *Book) Overrides(ctx context.Context, ended bool) ([]policy.Override, error) {
	if err := r.RefreshRules(ctx); err != nil {
		return nil, err
	}
	out := []policy.Override{}
	for _, o := range r.Rules().Overrides {
		if ended || time.Now().Before(o.Until) {
			out = append(out, o)
		}
	}
	return out, nil
}

// AddOverride creates an override. It sets ID, By and CreatedAt, and From to now if
// it is zero. Errors: Invalid, NotFound (its policy or a worker).
func (r *Book) AddOverride(ctx context.Context, by audit.Actor, o policy.Override) (policy.Override, error) {
	if err := r.RefreshRules(ctx); err != nil {
		return o, err
	}
	now := time.Now().UTC().Round(0)
	o.ID, o.By, o.CreatedAt = "o-"+strings.ToLower(rand.Text()[:10]), by.Name, now
	if o.From.IsZero() {
		o.From = now
	}
	o.From, o.Until = o.From.UTC().Round(0), o.Until.UTC().Round(0)
	if err := o.Validate(); err != nil {
		return o, err
	}
	if err := r.knows(o.Policy, ""); err != nil {
		return o, err
	}
	for _, id := range o.Selector.Workers {
		if _, err := r.workers.Worker(ctx, id); err != nil {
			return o, err
		}
	}
	if len(r.Rules().Overrides) >= maxOverrides {
		return o, &failure.Refused{Command: "override", Name: o.Selector.String(), Reason: "too_many", Detail: fmt.Sprintf("there are already %d, which is the limit", maxOverrides)}
	}
	key := overridePrefix + o.ID
	err := r.changeRule(ctx, key, r.overrideEntry(ctx, "override_added", by, &o), func(store.Value) ([]byte, error) { return overrideCodec.Encode(key, o) })
	return o, err
}

// overrideEntry returns an audit entry about an override, with the names of its
// workers. A worker that no longer exists is given by its ID.
func (r *Book) overrideEntry(ctx context.Context, action string, by audit.Actor, o *policy.Override) audit.Entry {
	e := audit.Entry{Action: action, By: by, Reason: o.Kind}
	whom := o.Selector.String()
	for _, id := range o.Selector.Workers {
		e.WorkerID = id
		if w, err := r.workers.Worker(ctx, id); err == nil {
			whom = strings.ReplaceAll(whom, id, w.Name)
			e.WorkerName, e.Region = w.Name, w.AWSRegion
		}
	}
	if len(o.Selector.Workers) > 1 {
		e.WorkerID, e.WorkerName, e.Region = "", "", ""
	}
	e.Detail = whom + ": " + o.Sentence()
	return e
}

// EndOverride ends an override now. Boundaries that it has already skipped stay
// skipped. Errors: NotFound; Refused if it has ended.
func (r *Book) EndOverride(ctx context.Context, by audit.Actor, id string) (policy.Override, error) {
	var o policy.Override
	if err := failure.CheckName("override", id); err != nil {
		return o, err
	}
	if err := r.RefreshRules(ctx); err != nil {
		return o, err
	}
	i := slices.IndexFunc(r.Rules().Overrides, func(o policy.Override) bool { return o.ID == id })
	if i < 0 {
		return o, &failure.NotFound{Kind: "override", Name: id}
	}
	o = r.Rules().Overrides[i]
	key := overridePrefix + id
	err := r.changeRule(ctx, key, r.overrideEntry(ctx, "override_ended", by, &o), func(v store.Value) ([]byte, error) {
		if !v.Exists() {
			return nil, &failure.NotFound{Kind: "override", Name: id}
		}
		rec, err := overrideCodec.Decode(key, v.Data)
		if err != nil {
			return nil, err
		}
		now := time.Now().UTC().Round(0)
		if !now.Before(rec.Until) {
			return nil, &failure.Refused{Command: "end override", Name: id, Reason: "ended", Detail: "it ended at " + rec.Until.Format(time.RFC3339)}
		}
		if rec.Until = now; !rec.From.Before(now) {
			return nil, nil // it had not begun, so it is deleted
		}
		o = rec
		return overrideCodec.Encode(key, rec)
	})
	return o, err
}

// TrimOverrides removes overrides that ended more than keepOverrides ago. It returns
// how many.
func (r *Book) TrimOverrides(ctx context.Context, now time.Time) (int, error) {
	n := 0
	for _, o := range r.Rules().Overrides {
		if now.Sub(o.Until) <= keepOverrides {
			continue
		}
		if _, err := r.store.Commit(ctx, store.Txn{If: r.guards, Then: []store.Op{store.Delete(overridePrefix + o.ID)}}); err != nil {
			return n, fmt.Errorf("cannot remove an old override: %w", err)
		}
		n++
	}
	return n, nil
}
