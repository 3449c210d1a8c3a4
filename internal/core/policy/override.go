package policy

import (
	"fmt"
	"slices"
	"time"
)

// The kinds of overrides.
const (
	// Keep prevents automatic pauses. When it ends, a schedule that has closed in
	// the meantime takes effect.
	Keep = "keep"
	// Skip suppresses the boundaries of schedules.
	Skip = "skip"
	// Freeze prevents all automatic actions, pauses and starts alike, except the
	// action of an expired TTL.
	Freeze = "freeze"
	// Use replaces every other policy.
	Use = "policy"
)

// MaxOverride is the longest time an override may last.
const MaxOverride = 366 * 24 * time.Hour

// Override is an exception set by a user, with an end.
type Override struct {
	ID        string    `json:"id"`
	Kind      string    `json:"kind"`
	Selector  Scope     `json:"selector"`
	Policy    string    `json:"policy,omitempty"` // only for kind Use
	From      time.Time `json:"from"`
	Until     time.Time `json:"until"`
	By        string    `json:"by"`
	Reason    string    `json:"reason,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// Validate returns every fault of a new o, each a *failure.Invalid.
func (o Override) Validate() error {
	var f faults
	kind := o.Kind
	f.oneOf("kind", &kind, Keep, Skip, Freeze, Use)
	o.Selector.validate(&f)
	if (o.Kind == Use) != (o.Policy != "") {
		f.add("policy", "want a policy for an override of kind policy, and none for any other")
	}
	f.text("reason", o.Reason, 256)
	if !o.From.Before(o.Until) {
		f.add("until", "%s is not after its beginning, %s", o.Until.Format(time.RFC3339), o.From.Format(time.RFC3339))
	} else if !o.CreatedAt.Before(o.Until) || o.Until.Sub(o.CreatedAt) > MaxOverride {
		f.add("until", "%s is not within the next %d days", o.Until.Format(time.RFC3339), int(MaxOverride.Hours()/24))
	}
	return f.err()
}

// In reports whether o is in force at t.
func (o *Override) In(t time.Time) bool { return !t.Before(o.From) && t.Before(o.Until) }

// Sentence describes o for display.
func (o *Override) Sentence() string {
	what := map[string]string{Keep: "Kept running", Skip: "Its schedule is skipped", Freeze: "Frozen, nothing automatic is done to it,",
		Use: "Policy " + o.Policy + " is used"}[o.Kind]
	text := fmt.Sprintf("%s until %s by %s", what, o.Until.UTC().Format(time.RFC3339), o.By)
	if o.Reason != "" {
		text += " (" + o.Reason + ")"
	}
	return text + "."
}

// overrides returns the overrides of a kind that select w, ordered by their end.
func (s *Set) overrides(w *Subject, kind string) []Override {
	var out []Override
	for _, o := range s.Overrides {
		if o.Kind == kind && o.Selector.Matches(w) {
			out = append(out, o)
		}
	}
	slices.SortStableFunc(out, func(a, b Override) int { return a.Until.Compare(b.Until) })
	return out
}
