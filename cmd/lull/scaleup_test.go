package main

import (
	"encoding/hex"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/platform/cml"
	"lull/internal/protocol/control"
	"lull/internal/sim/world"
)

// TestScaledUpWorkerIsPaused checks that a worker of a scale-up inherits the TLS
// identity, the CML account, the sources and the accepted risks of its template.
//
// Its CML has a self-signed certificate, whose key is part of the image, and a
// separate account for lull. With all of that, the worker must be paused when it is
// idle. With any of it wrong or missing, it must keep running, and why must name the
// cause.
func TestScaledUpWorkerIsPaused(t *testing.T) {
	scenario := func() world.Config {
		return world.Config{Regions: []world.RegionConfig{{Name: home}}, Timing: world.Timing{CMLBoot: world.Duration(3 * time.Minute), Background: -1},
			Profiles: map[string]world.Profile{"lab": {Password: "labs", TLSKey: "image"}, "other": {TLSKey: "another image"}}, LaunchedProfile: "lab",
			Workers: []world.WorkerConfig{{Name: "sample", Region: home, Profile: "lab"}, {Name: "stranger", Region: home, Profile: "other"}}}
	}
	settings := map[string]any{"discovery_import": "off", "aws_region_configs": map[string]any{home: map[string]any{
		"security_group_ids": []any{"sg-0000000a"}, "subnet_id": "subnet-000000a0"}}}
	const absent = "absent"
	for name, c := range map[string]struct {
		change map[string]string // changes of the template
		block  string            // code of the block that keeps the worker running; empty if it is paused
		cause  string            // expected in the block's sentence
	}{
		"as it should be":   {},
		"wrong pin":         {map[string]string{"tls_pin": "stranger"}, "signal_unknown", "pin"},
		"no pin":            {map[string]string{"tls_pin": absent}, "signal_unknown", "unknown authority"},
		"wrong password":    {map[string]string{"cml_password": "env:OLD_PW"}, "signal_unknown", "credentials"},
		"no password":       {map[string]string{"cml_password": absent}, "signal_unknown", "credentials"},
		"no accepted risks": {map[string]string{"accepted_risks": absent}, worker.RiskNoElasticIP, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inCloud(t, scenario(), settings, func(r *cloudRig) {
				t := r.t
				pin := func(machine string) string {
					c, err := r.sim.CML.Certificate(machine)
					errtest.None(t, err)
					p := cml.PinOf(c.Leaf)
					return hex.EncodeToString(p[:])
				}
				template := map[string]any{"instance_type": "m5.large", "ami_name_filter": "cisco-cml*", "cml_username": "lull", "cml_password": "env:LAB_PW", "tls_pin": pin("sample"),
					"activity_sources": []string{worker.SourceCML, worker.SourceCloudWatch}, "accepted_risks": []string{worker.RiskNoElasticIP}}
				for field, v := range c.change {
					switch {
					case v == absent:
						delete(template, field)
					case field == "tls_pin":
						template[field] = pin(v)
					default:
						template[field] = v
					}
				}
				errtest.Get(control.Write[launch.Template](t.Context(), r.asks, "PUT", "/templates/lab", template))(t)
				w, err := control.Write[worker.Worker](t.Context(), r.asks, "POST", "/workers/scale-up", control.ScaleUp{Template: "lab", AWSRegion: home, Reason: "more labs"})
				if err != nil {
					t.Fatal(err)
				}
				var up, down time.Time
				for begun := time.Now(); time.Since(begun) < 3*time.Hour && down.IsZero(); r.pass(30 * time.Second) {
					switch w = r.worker(w.ID); {
					case w.Status == power.WorkerRunning && up.IsZero():
						up = time.Now()
					case w.Status == power.WorkerStopped:
						down = time.Now()
					}
				}
				if up.IsZero() {
					t.Fatalf("it is %s: %s", w.Status, w.StatusReason)
				}
				if !slices.Equal(w.ActivitySources, []string{worker.SourceCML, worker.SourceCloudWatch}) || w.CMLUsername != "lull" {
					t.Errorf("it is judged by %v as CML user %q", w.ActivitySources, w.CMLUsername)
				}
				if c.block == "" {
					if down.IsZero() {
						t.Fatalf("it is %s three hours after the request", w.Status)
					}
					if idle := down.Sub(up); idle < time.Hour || idle > 90*time.Minute {
						t.Errorf("it was paused %s after it came up, with a timeout of an hour", idle)
					}
					if w.PauseReason != power.ReasonIdleTimeout {
						t.Errorf("it was paused for %q", w.PauseReason)
					}
					return
				}
				why, err := control.Read[control.Why](t.Context(), r.asks, "/workers/"+w.ID+"/why")
				errtest.None(t, err)
				said := map[string]string{}
				for _, b := range why.IdleStatus.Blocks {
					said[string(b.Code)] += b.Sentence
				}
				if s, is := said[c.block]; !down.IsZero() || w.Status != power.WorkerRunning || !is || !strings.Contains(s, c.cause) {
					t.Errorf("it is %s, and %v keeps it; want %s with %q", w.Status, slices.Collect(maps.Values(said)), c.block, c.cause)
				}
			})
		})
	}
}
