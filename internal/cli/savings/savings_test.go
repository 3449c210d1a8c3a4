package savings

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"lull/internal/core/savings"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
)

// TestSavingsText checks that an amount with an unknown part is shown as a
// minimum, and that the unknown part is named.
func TestSavingsText(t *testing.T) {
	usd := func(v float64) *float64 { return &v }
	var b strings.Builder
	savingsText(&b, control.Savings{By: "worker", Total: savings.Sum{Key: "total", AvoidedHours: 9, ComputeSaved: usd(0.9), StoragePaid: usd(0.1), Saved: usd(0.5), UnknownStorageHours: 4.5},
		MissingPrices: []savings.MissingPrice{{Kind: "instance", Region: "mars-1", Name: "z9.huge", Workers: 2, Hours: 3}}})
	for _, want := range []string{"HOURS OF UNKNOWN STORAGE", "at least $0.50", "4.5", "ec2:DescribeVolumes", "mars-1", "z9.huge", "--prices"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("without %q:\n%s", want, b.String())
		}
	}
}

// TestRegionWithoutPrices checks that an amount without a price is unknown in
// every listing, never zero.
func TestRegionWithoutPrices(t *testing.T) {
	prices, err := savings.Published()
	errtest.None(t, err)
	use := savings.Use{Worker: "w", Name: "far", Region: "ap-south-1", InstanceType: "m5.large", Volumes: []savings.Volume{{Type: "gp3", GB: 100}}, Running: time.Hour, Avoided: 5 * time.Hour}
	groups, total := prices.Group([]savings.Use{use}, func(u savings.Use) (string, string) { return u.Worker, u.Name })
	r := control.Savings{By: "worker", Groups: groups, Total: total, Periods: []control.SavingsPeriod{{Groups: groups, Total: total}}}
	var text, table, trial strings.Builder
	savingsText(&text, r)
	errtest.None(t, savingsCSV(&table, r))
	simulationText(&trial, control.Simulation{Policies: []control.SimulatedOutcome{{Name: "x", Sum: total}}})
	for what, shown := range map[string]string{"savings": text.String(), "simulate": trial.String()} {
		if strings.Contains(shown, "$") || !strings.Contains(shown, "unknown") {
			t.Errorf("%s makes money up:\n%s", what, shown)
		}
	}
	if !strings.Contains(table.String(), ",5.0000,0.0000,,5.0000,,5.0000,\n") {
		t.Errorf("the table has money:\n%s", table.String())
	}
	data, err := json.Marshal(r)
	if err != nil || strings.Contains(string(data), `_usd":0`) || !strings.Contains(string(data), `"saved_usd":null`) {
		t.Errorf("the API has money: %s %v", data, err)
	}
}
