package policy

import (
	"testing"
)

// TestThresholdsHaveOneUnit checks that a simulation interprets thresholds as a
// policy does: a number without a unit is in bytes per minute.
func TestThresholdsHaveOneUnit(t *testing.T) {
	got, err := Thresholds(map[string]string{"cpu": "20", "network": "20KB", "disk": "30000"})
	if err != nil || got["cpu"] != 20 || got["network"] != 20_000 || got["disk"] != 30_000 {
		t.Errorf("read as %v: %v", got, err)
	}
	if got, err := Thresholds(map[string]string{"network": "1.5mb/min"}); err != nil || got["network"] != 1.5e6 {
		t.Errorf("read as %v: %v", got, err)
	}
	for name, bad := range map[string]string{"cpu": "20KB", "network": "KB", "disk": "-1", "gpu": "Inf"} {
		if got, err := Thresholds(map[string]string{name: bad}); err == nil {
			t.Errorf("%s=%s was read as %v", name, bad, got)
		}
	}
}
