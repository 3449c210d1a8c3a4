package policy

import (
	"fmt"
	"slices"
	"time"
)

// Kinds of overrides.
const (
	// Keep protects from automatic pauses; when it ends, a schedule that has
	// closed meanwhile speaks. Until the end of today it is "not today".
	Keep = "keep"
	// Skip makes the boundaries of schedules void.
	Skip = "skip"
	// Freeze keeps everything automatic away, pauses and starts; a TTL it
	// does not hold.
	Freeze = "freeze"
	// Use puts another policy over all others.
	Use = "policy"
)

// MaxOverride is how far ahead an override may end.
const MaxOverride = 366 * 24 * time.Hour

// Override is an exception that a person made, with an end.
type Override struct {
	ID        string    `json:"id"`
	Kind      string    `json:"kind"`
	Selector  Scope     `json:"selector"`
	Policy    string    `json:"policy,omitempty"` // of kind policy
	From      time.Time `json:"from"`
	Until     time.Time `json:"until"`
	By        string    `json:"by"`
	Reason    string    `json:"reason,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// Validate returns every fault of o at its creation, as Faults.
func (o Override) Validate() error {
	var f faults
	kind := o.Kind
	f.oneOf("kind", &kind, Keep, Skip, Freeze, Use)
	o.Selector.validate(&f)
	if (o.Kind == Use) != (o.Policy != "") {
		f.add("policy", "an override of kind policy names one, and no other does")
	}
	f.text("reason", o.Reason, 256)
	if !o.From.Before(o.Until) {
		f.add("until", "%s is not after its beginning, %s", o.Until.Format(time.RFC3339), o.From.Format(time.RFC3339))
	} else if !o.CreatedAt.Before(o.Until) || o.Until.Sub(o.CreatedAt) > MaxOverride {
		f.add("until", "%s is not within the next %d days", o.Until.Format(time.RFC3339), int(MaxOverride.Hours()/24))
	}
	return f.err()
}

// In tells whether o holds at t.
func (o *Override) In(t time.Time) bool { return !t.Before(o.From) && t.Before(o.Until) }

// Sentence says o for people.
func (o *Override) Sentence() string {
	what := map[string]string{Keep: "Kept running", Skip: "Its schedule is skipped", Freeze: "Frozen, nothing automatic is done to it,",
		Use: "Policy " + o.Policy + " is used"}[o.Kind]
	text := fmt.Sprintf("%s until %s by %s", what, o.Until.UTC().Format(time.RFC3339), o.By)
	if o.Reason != "" {
		text += " (" + o.Reason + ")"
	}
	return text + "."
}

// overrides lists those of a kind that select w, in the order of their ends.
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
