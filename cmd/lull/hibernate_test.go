package main

import (
	"testing"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/sim/world"
)

// TestLaunchedWorkerHibernates checks that a worker launched from a template with the
// policy balanced is hibernated when it is idle and resumes with its memory.
//
// The simulated EC2 refuses every launch or stop that Amazon's would refuse: a root
// volume that is not encrypted or too small for the memory, a type that cannot
// hibernate, and hibernation that was not enabled at the launch. The worker's CML has
// a self-signed certificate. Without the template's TLS identity, its telemetry is
// unknown, and it is never paused.
func TestLaunchedWorkerHibernates(t *testing.T) {
	for name, c := range map[string]struct {
		template   map[string]any
		hibernates bool
		runs       bool
	}{
		"as launched":                 {map[string]any{"tls_insecure": true}, true, false},
		"hibernation off":             {map[string]any{"tls_insecure": true, "hibernation": "off"}, false, false},
		"type that cannot":            {map[string]any{"tls_insecure": true, "instance_type": "c5.metal"}, false, false},
		"without the TLS certificate": {map[string]any{}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			scenario := world.Config{Regions: []world.RegionConfig{{Name: home}}, Timing: world.Timing{CMLBoot: world.Duration(3 * time.Minute), Background: -1}}
			settings := map[string]any{"discovery_import": "off", "aws_region_configs": map[string]any{home: map[string]any{
				"security_group_ids": []any{"sg-0000000a"}, "subnet_id": "subnet-000000a0"}}}
			inCloud(t, scenario, settings, func(r *cloudRig) {
				t := r.t
				body := map[string]any{"instance_type": "m5.2xlarge", "ami_name_filter": "cisco-cml*", "enabled": true, "accepted_risks": []string{worker.RiskNoElasticIP}}
				for k, v := range c.template {
					body[k] = v
				}
				if _, err := control.Write[launch.Template](t.Context(), r.asks, "PUT", "/templates/lab", body); err != nil {
					t.Fatal(err)
				}
				balanced := "balanced"
				w, err := control.Write[worker.Worker](t.Context(), r.asks, "POST", "/workers", fleet.NewWorker{Name: "one", AWSRegion: home, TemplateName: "lab", Profile: worker.Profile{Policy: &balanced}})
				if err != nil {
					t.Fatal(err)
				}
				await := func(s power.Worker, d time.Duration) bool {
					for end := time.Now().Add(d); time.Now().Before(end); r.pass(10 * time.Second) {
						if w = r.worker(w.ID); w.Status == s {
							return true
						}
					}
					return false
				}
				if !await(power.WorkerRunning, 20*time.Minute) {
					t.Fatalf("it is %s: %s", w.Status, w.StatusReason)
				}
				machine := func() (i world.Instance) {
					r.sim.World.Locate(w.EC2InstanceID, func(in *world.Instance, _ world.Moment) { i = *in })
					return i
				}
				boots := machine().Boots
				if stopped := await(power.WorkerStopped, 3*time.Hour); stopped == c.runs {
					t.Fatalf("it is %s after three unused hours: %s", w.Status, w.StatusReason)
				}
				if c.runs {
					return
				}
				if i := machine(); i.State != world.Stopped || i.Hibernated != c.hibernates {
					t.Errorf("EC2 has it as %s, hibernated: %t", i.State, i.Hibernated)
				}
				if w.PauseReason != power.ReasonIdleTimeout || (w.HibernateNote == "") != c.hibernates {
					t.Errorf("paused for %s, note %q", w.PauseReason, w.HibernateNote)
				}
				if _, _, err := r.asks.Do(t.Context(), w.ID, "start", nil); err != nil {
					t.Fatal(err)
				}
				if !await(power.WorkerRunning, 20*time.Minute) {
					t.Fatalf("it is %s after its resume: %s", w.Status, w.StatusReason)
				}
				want := boots + 1
				if c.hibernates {
					want = boots // a resume from hibernation is no boot
				}
				if i := machine(); i.Boots != want {
					t.Errorf("it has booted %d times, want %d", i.Boots, want)
				}
			})
		})
	}
}
