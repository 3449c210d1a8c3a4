package preview

import (
	"testing"

	"lull/internal/core/savings"
	"lull/internal/protocol/control"
)

// TestRecommended checks that the recommendation follows money, or hours if a cost is
// unknown, and is never a policy with a false stop.
func TestRecommended(t *testing.T) {
	usd := func(v float64) *float64 { return &v }
	o := func(name string, hours float64, saved *float64, falseStops int) control.SimulatedOutcome {
		return control.SimulatedOutcome{Name: name, FalseStops: falseStops, Sum: savings.Sum{AvoidedHours: hours, Saved: saved}}
	}
	for want, l := range map[string][]control.SimulatedOutcome{
		"dear": {o("many", 90, usd(1), 0), o("dear", 10, usd(9), 0), o("false", 99, usd(99), 1)},
		"many": {o("dear", 10, usd(9), 0), o("many", 90, nil, 0)},
		"":     {o("false", 99, usd(99), 1), o("none", 0, nil, 0)},
	} {
		if got := recommended(l); got != want {
			t.Errorf("recommended is %q, want %q", got, want)
		}
	}
}
