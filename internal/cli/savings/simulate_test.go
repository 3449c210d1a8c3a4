package savings

import (
	"strings"
	"testing"

	"lull/internal/core/evidence"
	"lull/internal/core/savings"
	"lull/internal/protocol/control"
)

// TestNothingIsSaidOfNothing checks that a simulation without records shows no
// policies, and that a period without avoided hours saved a known zero.
func TestNothingIsSaidOfNothing(t *testing.T) {
	var out strings.Builder
	r := control.Simulation{Policies: []control.SimulatedOutcome{{Name: "balanced"}}, Missing: []evidence.Missing{{Why: "no worker matches"}}}
	simulationText(&out, r)
	if text := out.String(); !strings.Contains(text, r.Missing[0].Why) || strings.Contains(text, "no policy") {
		t.Errorf("of no records it says\n%s", text)
	}
	out.Reset()
	savingsText(&out, control.Savings{By: "worker", Total: savings.Sum{Key: "total"}})
	if text := out.String(); strings.Contains(text, "unknown") || strings.Count(text, "$0.00") != 3 {
		t.Errorf("of an empty period it says\n%s", text)
	}
}
