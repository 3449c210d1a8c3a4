package main

import (
	"strings"
	"testing"

	"lull/internal/fleet"
	"lull/internal/power"
)

// TestReachSaysWhyNot: who waits for a stop that was called off is told why.
func TestReachSaysWhyNot(t *testing.T) {
	w := fleet.Worker{Name: "cml-3", Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning,
		StopCalledOff: &fleet.CalledOff{Why: "EC2 refused the stop: UnauthorizedOperation"}}
	_, err := reach(power.WorkerStopped).met(w)
	if err == nil || !strings.Contains(err.Error(), "the stop was called off: EC2 refused the stop: UnauthorizedOperation") {
		t.Error(err)
	}
}
