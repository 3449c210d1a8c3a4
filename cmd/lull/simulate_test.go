package main

import (
	"strings"
	"testing"

	"lull/internal/core/evidence"
	"lull/internal/core/savings"
	"lull/internal/protocol/control"
)

// TestThresholdsHaveOneUnit checks that a trial interprets thresholds as a
// policy does: in bytes per minute, unless a unit is given.
func TestThresholdsHaveOneUnit(t *testing.T) {
	got, err := thresholds(map[string]string{"cpu": "20", "network": "20KB", "disk": "30000"})
	if err != nil || got["cpu"] != 20 || got["network"] != 20_000 || got["disk"] != 30_000 {
		t.Errorf("read as %v: %v", got, err)
	}
	if got, err := thresholds(map[string]string{"network": "1.5mb/min"}); err != nil || got["network"] != 1.5e6 {
		t.Errorf("read as %v: %v", got, err)
	}
	for name, bad := range map[string]string{"cpu": "20KB", "network": "KB", "disk": "-1", "gpu": "Inf"} {
		if got, err := thresholds(map[string]string{name: bad}); err == nil {
			t.Errorf("%s=%s was read as %v", name, bad, got)
		}
	}
}

// TestNothingIsSaidOfNothing: a simulation of no records does not speak of
// policies, and a period without avoided hours saved nothing, which is known.
func TestNothingIsSaidOfNothing(t *testing.T) {
	var out strings.Builder
	r := control.Simulation{Policies: []control.SimulatedOutcome{{Name: "balanced"}}, Missing: []evidence.Missing{{Why: "no worker matches"}}}
	simulationText(&out, r)
	if text := out.String(); !strings.Contains(text, "no recorded data") || !strings.Contains(text, ": no worker matches\n") || strings.Contains(text, "no policy would") {
		t.Errorf("of no records it says\n%s", text)
	}
	out.Reset()
	savingsText(&out, control.Savings{By: "worker", Total: savings.Sum{Key: "total"}})
	if text := out.String(); strings.Contains(text, "unknown") || strings.Count(text, "$0.00") != 3 {
		t.Errorf("of an empty period it says\n%s", text)
	}
}

// TestLinesOfASchedule: how many boundaries are shown is held to its bounds by
// the name of its flag, before a server is asked.
func TestLinesOfASchedule(t *testing.T) {
	for _, n := range []string{"0", "260", "-1"} {
		cmd := (&cli{}).scheduleCommand()
		cmd.SetArgs([]string{"next", "office", "--lines=" + n})
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), "--lines "+n) {
			t.Errorf("--lines %s: %v", n, err)
		}
	}
}
