package controller

import (
	"testing"

	"lull/internal/core/policy"
	"lull/internal/fleet/worker"
)

// TestUncheckedRisks checks that a preflight check that could not be made blocks a
// stop unless a user accepted its risk, and that a check with a finding always blocks
// the stop.
func TestUncheckedRisks(t *testing.T) {
	store, address := worker.RiskInstanceStore, worker.RiskNoElasticIP
	for name, tc := range map[string]struct {
		accepted []string
		l        live
		blocks   int
	}{
		"all known":               {nil, live{}, 0},
		"all unknown":             {[]string{store, address}, live{preflightErr: "down"}, 1},
		"one unknown":             {nil, live{preflightErr: "down", unchecked: []string{store}}, 1},
		"one unknown, accepted":   {[]string{store}, live{preflightErr: "down", unchecked: []string{store}}, 0},
		"two unknown, one of two": {[]string{store}, live{preflightErr: "down", unchecked: []string{store, address}}, 1},
		"unknown and found":       {[]string{store}, live{preflightErr: "down", unchecked: []string{store}, preflight: []string{address}}, 1},
		"both":                    {nil, live{preflightErr: "down", unchecked: []string{store}, preflight: []string{address}}, 2},
	} {
		r := policy.Resolved{}
		r.AcceptedRisks = tc.accepted
		if got := accepted(&r, tc.l); len(got) != tc.blocks {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
