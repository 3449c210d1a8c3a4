package main

import (
	"testing"
	"time"

	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/sim/world"
)

// TestPricesRefresh checks that a refresh reads the prices that the workers need from
// the Price List API, through the SDK, and that savings use them from then on. If the
// cloud does not answer, nothing may change.
func TestPricesRefresh(t *testing.T) {
	scenario := twoRegions()
	for i := range scenario.Workers {
		scenario.Workers[i].Type = "m5.large"
	}
	scenario.Workers = append(scenario.Workers, world.WorkerConfig{Name: "old", Region: home, Type: "m1.small", Image: "ami-0000000000000d012", Elastic: true})
	inCloud(t, scenario, map[string]any{"discovery_import": "off", "discovery_regions": home + "," + away}, func(r *cloudRig) {
		t := r.t
		r.pass(time.Minute)
		table := func() map[savings.Key]control.Price {
			p, err := control.Read[control.Prices](t.Context(), r.asks, "/savings/prices")
			errtest.None(t, err)
			out := map[savings.Key]control.Price{}
			for _, x := range p.Items {
				out[savings.Key{x.Kind, x.Region, x.Name}] = x
			}
			return out
		}
		refresh := func() (control.PriceRefresh, error) {
			return control.Write[control.PriceRefresh](t.Context(), r.asks, "POST", "/savings/prices/refresh", nil)
		}
		if _, err := refresh(); err == nil {
			t.Error("prices were refreshed for a fleet without workers")
		}
		for _, name := range []string{"plain", "far", "old"} {
			region := home
			if name == "far" {
				region = away
			}
			errtest.Get(r.imports(fleet.ImportedWorker{Name: name, AWSRegion: region, EC2InstanceID: r.id(name)}))(t)
		}
		r.pass(2 * time.Minute) // until their types and volumes have been read
		before := table()
		oldNorth := savings.Key{savings.Instance, away, "m5.large"}
		if p, ok := before[oldNorth]; ok {
			t.Fatalf("the price is there already: %+v", p)
		}
		r.with(func() { r.dead["api.pricing.us-east-1"] = true })
		if _, err := refresh(); err == nil || len(table()) != len(before) {
			t.Errorf("without an answer: %v, %d prices instead of %d", err, len(table()), len(before))
		}
		r.with(func() { delete(r.dead, "api.pricing.us-east-1") })
		out, err := refresh()
		errtest.None(t, err)
		after := table()
		for key, want := range map[savings.Key]float64{ // the simulator's prices
			{savings.Instance, home, "m5.large"}: 0.012*2 + 0.0000035*8192, oldNorth: 0.012*2 + 0.0000035*8192,
			{savings.Instance, home, "m1.small"}: 0.012 + 0.0000035*1740, {savings.Storage, away, "gp3"}: 0.08,
		} {
			if p := after[key]; p.Source != control.PriceRefreshed || p.USD < want-1e-6 || p.USD > want+1e-6 || p.AsOf != time.Now().UTC().Format(time.DateOnly) {
				t.Errorf("%v: %+v, want %g", key, p, want)
			}
		}
		if out.Refreshed < 5 || len(out.Missing) != 0 {
			t.Errorf("the refresh says %+v", out)
		}
		kept := 0
		for key, p := range before { // prices that were not requested are unchanged
			if q, ok := after[key]; !ok || q.Source == control.PriceBuiltIn && q != p {
				t.Errorf("%v was %+v and is %+v", key, p, q)
			}
			if after[key].Source == control.PriceBuiltIn {
				kept++
			}
		}
		if kept == 0 {
			t.Error("the built-in table is gone")
		}
		if es, err := control.Read[control.List[audit.Entry]](t.Context(), r.asks, "/audit?action=prices_refreshed"); err != nil || len(es.Items) != 1 {
			t.Errorf("%d audit entries, %v", len(es.Items), err)
		}
	})
}
