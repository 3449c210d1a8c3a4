package policy

import (
	"fmt"
	"slices"
	"time"

	"lull/internal/core/idle"
)

// The actions a budget can limit.
const (
	Stops  = "stop"
	Starts = "start"
)

// The reasons for automatic stops and starts, as used in Budget.Reasons. Manual
// actions and expiries bypass budgets, but manual starts count against them.
const (
	ForIdle      = "idle_timeout"
	ForScaleDown = "scale_down"
	ForSchedule  = "schedule"
	ForWake      = "wake"   // a wake token was used, so a client is waiting
	ForRepair    = "repair" // restart of a worker that the cloud stopped
	ByUser       = "person"
)

// Parts is the number of slices into which a budget's period is divided for
// counting.
const Parts = 60

// Budget limits how many workers are automatically stopped, or started, per
// period.
type Budget struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	For         string `json:"for"` // stop or start
	// MaxActions is the limit per period. MaxPercent is the same as a share
	// of the selected workers, at least 1 unless it is 0. If both are set,
	// the lower one applies.
	MaxActions *int     `json:"max_actions,omitempty"`
	MaxPercent *float64 `json:"max_percent,omitempty"`
	PerMinutes int      `json:"per_minutes"`
	Reasons    []string `json:"reasons,omitempty"` // empty means all
	Selector   Scope    `json:"selector"`
	// During names a schedule. The budget applies only while it is open.
	During string `json:"during,omitempty"`

	Stamp
}

// DefaultStarts is the budget of automatic starts unless a stored budget has its
// name. It spreads the morning start of a thousand workers, so that it stays
// below EC2's request rate limits and does not delay manual starts.
var DefaultStarts = Budget{Name: "starts", Description: "Spreads out bursts of automatic starts", For: Starts, MaxActions: new(120), PerMinutes: 1}

// Validate returns every fault of b, each a *failure.Invalid.
func (b Budget) Validate() error {
	var f faults
	f.name("name", b.Name)
	f.text("description", b.Description, 1024)
	f.oneOf("for", &b.For, Stops, Starts)
	f.between("per_minutes", &b.PerMinutes, 1, 10080)
	f.between("max_actions", b.MaxActions, 0, 100_000)
	if b.MaxActions == nil && b.MaxPercent == nil {
		f.add("max_actions", "give max_actions, max_percent or both")
	}
	if p := b.MaxPercent; p != nil && !(*p >= 0 && *p <= 100) {
		f.add("max_percent", "%g is not between 0 and 100", *p)
	}
	allowed := []string{ForIdle, ForScaleDown, ForSchedule}
	if b.For == Starts {
		allowed = []string{ForSchedule, ForWake, ForRepair}
	}
	for _, r := range b.Reasons {
		f.oneOf("reasons", &r, allowed...)
	}
	if b.During != "" {
		f.name("during", b.During)
	}
	b.Selector.validate(&f)
	return f.err()
}

// Per returns the period of b.
func (b *Budget) Per() time.Duration { return time.Duration(b.PerMinutes) * time.Minute }

// unlimited is the limit of a budget that sets none.
const unlimited = 1 << 30

// Limit returns the maximum number of actions per period if b selects size
// workers.
func (b *Budget) Limit(size int) int {
	limit := unlimited
	if b.MaxActions != nil {
		limit = *b.MaxActions
	}
	if b.MaxPercent != nil {
		n := int(*b.MaxPercent * float64(size) / 100)
		if *b.MaxPercent > 0 {
			n = max(n, 1)
		}
		limit = min(limit, n)
	}
	return limit
}

// Describe returns b's limit as a phrase for display.
func (b *Budget) Describe() string {
	limit := ""
	switch {
	case b.MaxActions != nil && b.MaxPercent != nil:
		limit = fmt.Sprintf("%d and %g%%", *b.MaxActions, *b.MaxPercent)
	case b.MaxPercent != nil:
		limit = fmt.Sprintf("%g%%", *b.MaxPercent)
	default:
		limit = fmt.Sprint(*b.MaxActions)
	}
	return fmt.Sprintf("at most %s %ss in %s", limit, b.For, idle.Human(b.Per()))
}

// Holds reports whether b limits the given action on w.
func (b *Budget) Holds(w *Subject, what, reason string) bool {
	return b.For == what && b.Selector.Matches(w) && (len(b.Reasons) == 0 || slices.Contains(b.Reasons, reason) || reason == ByUser)
}

// Spent records the past actions counted against one budget. The zero value is
// empty. The count is conservative: an action counts until its whole slice has
// left the period, so that no interval as long as the period contains more
// actions than the limit.
type Spent []Part

// Part is the number of actions in one slice.
type Part struct {
	End int64 `json:"end"` // Unix milliseconds
	N   int   `json:"n"`
}

// Count returns how many actions count against the budget at now.
func (s Spent) Count(now time.Time, per time.Duration) int {
	n, from := 0, now.Add(-per).UnixMilli()
	for _, p := range s {
		if p.End > from {
			n += p.N
		}
	}
	return n
}

// Free returns the earliest time, from now on, at which fewer than limit actions
// count. It is zero if limit is 0, because that never happens then.
func (s Spent) Free(now time.Time, per time.Duration, limit int) time.Time {
	if limit <= 0 {
		return time.Time{}
	}
	n := s.Count(now, per)
	if n < limit {
		return now
	}
	for _, p := range s {
		if end := time.UnixMilli(p.End).Add(per); end.After(now) {
			if n -= p.N; n < limit {
				return end.UTC()
			}
		}
	}
	return time.Time{}
}

// Add returns s with one more action, and without actions that no longer count.
func (s Spent) Add(now time.Time, per time.Duration) Spent {
	part := max(per/Parts, time.Second).Milliseconds()
	from := now.Add(-per).UnixMilli()
	out := make(Spent, 0, len(s)+1)
	for _, p := range s {
		if p.End > from {
			out = append(out, p)
		}
	}
	end := (now.UnixMilli()/part + 1) * part
	if last := len(out) - 1; last >= 0 && out[last].End >= end {
		out[last].N++
		return out
	}
	return append(out, Part{end, 1})
}

// Ledger maps the name of a budget to its past actions.
type Ledger map[string]Spent

// Used is the state of one budget for one worker.
type Used struct {
	Budget   string     `json:"budget"`
	For      string     `json:"for"`
	Rule     string     `json:"rule"`
	Limit    int        `json:"limit"`
	Count    int        `json:"count"`
	Left     int        `json:"room"` // actions still allowed now
	Free     bool       `json:"free"`
	FreeAt   *time.Time `json:"free_at,omitempty"` // when an action is next allowed; null if Free is true or the time is unknown
	Sentence string     `json:"sentence"`
}

// BudgetsFor returns the state of every budget that limits an action on w. size
// returns the number of workers in a scope. If size is nil, a percentage allows
// one action.
func (s *Set) BudgetsFor(now time.Time, w *Subject, what, reason string, spent Ledger, size func(Scope) int) []Used {
	var out []Used
	for i := range s.Budgets {
		b := &s.Budgets[i]
		if !b.Holds(w, what, reason) {
			continue
		}
		ends, holds := s.during(now, b)
		if !holds {
			continue
		}
		n := 0
		if b.MaxPercent != nil && size != nil {
			n = size(b.Selector)
		}
		u := b.State(now, spent[b.Name], n)
		if !u.Free && !ends.IsZero() && (u.FreeAt == nil || ends.Before(*u.FreeAt)) {
			u.FreeAt = &ends
		}
		out = append(out, u)
	}
	return out
}

// during reports whether b applies at now according to its schedule, and when
// that schedule closes. ends is zero if it never closes.
func (s *Set) during(now time.Time, b *Budget) (ends time.Time, holds bool) {
	if b.During == "" {
		return ends, true
	}
	sched, ok := s.Schedules[b.During]
	if !ok {
		return ends, false
	}
	st, err := sched.State(now, time.Time{}, nil)
	if err != nil || !st.Open {
		return ends, false
	}
	if st.NextClose != nil {
		ends = *st.NextClose
	}
	return ends, true
}

// StateOf returns the state of b if it selects size workers. A budget whose
// schedule is closed limits nothing.
func (s *Set) StateOf(now time.Time, b *Budget, spent Spent, size int) Used {
	u := b.State(now, spent, size)
	if _, holds := s.during(now, b); !holds {
		u.Free, u.FreeAt, u.Left = true, nil, unlimited
		u.Sentence = fmt.Sprintf("Budget %s does not limit anything now, because its schedule %s is not active: %s.", b.Name, b.During, u.Rule)
	}
	return u
}

// Blocks returns the idle engine's blocks for the exhausted budgets.
func Blocks(used []Used) []idle.Block {
	var out []idle.Block
	for _, u := range used {
		if !u.Free {
			out = append(out, idle.Block{Code: idle.Budget, Sentence: u.Sentence, Until: u.FreeAt})
		}
	}
	return out
}

// Spend counts an action against every budget that limits it, and returns the new
// ledger. It does not modify spent.
func (s *Set) Spend(now time.Time, w *Subject, what, reason string, spent Ledger) Ledger {
	out := Ledger{}
	for i := range s.Budgets {
		b := &s.Budgets[i]
		if old, ok := spent[b.Name]; ok {
			out[b.Name] = old
		}
		if b.Holds(w, what, reason) {
			out[b.Name] = out[b.Name].Add(now, b.Per())
		}
	}
	return out
}

// smooth is the number of parts into which the period is divided for starts, so
// that a surge of starts is spread out instead of using the whole period's limit
// at once.
const smooth = 6

// shares returns the limits of b: its own and, for starts, that of each part of
// the period.
func (b *Budget) shares(size int) []share {
	out := []share{{b.Per(), b.Limit(size)}}
	if n := b.Limit(size); b.For == Starts && n > smooth && n < unlimited {
		out = append(out, share{b.Per() / smooth, (n + smooth - 1) / smooth})
	}
	return out
}

type share struct {
	per   time.Duration
	limit int
}

// State returns the state of b if it selects size workers.
func (b *Budget) State(now time.Time, spent Spent, size int) Used {
	u := Used{Budget: b.Name, For: b.For, Rule: b.Describe(), Limit: b.Limit(size), Count: spent.Count(now, b.Per()), Left: unlimited}
	var free time.Time
	never := false
	for _, s := range b.shares(size) {
		u.Left = min(u.Left, max(s.limit-spent.Count(now, s.per), 0))
		at := spent.Free(now, s.per, s.limit)
		never = never || at.IsZero()
		if at.After(free) {
			free = at
		}
	}
	state := "is used up"
	if u.Free = u.Left > 0; u.Free {
		state = "has room"
	} else if !never {
		free = free.UTC()
		u.FreeAt = &free
	}
	of := ""
	if b.MaxPercent != nil {
		of = fmt.Sprintf(", which is %d now", u.Limit)
	}
	verb := "count"
	if u.Count == 1 {
		verb = "counts"
	}
	u.Sentence = fmt.Sprintf("Budget %s %s: %s%s, and %d %s now.", b.Name, state, u.Rule, of, u.Count, verb)
	return u
}
