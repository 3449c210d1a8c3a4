package main

import (
	"strings"
	"testing"

	"lull/internal/link/control"
	"lull/internal/savings"
)

// TestSavingsText: money of which a part is not known is money at least, and
// what is not known is named.
func TestSavingsText(t *testing.T) {
	usd := func(v float64) *float64 { return &v }
	var b strings.Builder
	savingsText(&b, control.Savings{By: "worker", Total: savings.Sum{Key: "total", AvoidedHours: 9, ComputeSaved: usd(0.9), StoragePaid: usd(0.1), Saved: usd(0.5), UnknownStorageHours: 4.5}})
	for _, want := range []string{"HOURS OF UNKNOWN STORAGE", "at least $0.50", "4.5", "ec2:DescribeVolumes"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("without %q:\n%s", want, b.String())
		}
	}
}
