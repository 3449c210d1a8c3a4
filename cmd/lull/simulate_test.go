package main

import "testing"

// TestThresholdsHaveOneUnit: what a policy is given is what a trial of it is:
// bytes a minute, unless a unit says more.
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
