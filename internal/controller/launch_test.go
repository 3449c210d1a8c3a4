package controller

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
)

// parts is a Cataloger that describes every image and type.
type parts struct {
	m   Machine
	err error
}

func (p *parts) Machine(context.Context, string, string) (Machine, error) { return p.m, p.err }

// TestLaunchCanHibernate checks that a worker whose policy may hibernate is
// launched so that it can, and that one whose machine cannot says why.
func TestLaunchCanHibernate(t *testing.T) {
	able := Machine{Hibernates: true, MemoryMiB: 16 << 10, RootDevice: "/dev/xvda", RootGB: 50}
	for name, c := range map[string]struct {
		tmpl   launch.Template
		action string
		parts  parts
		failed bool
		want   worker.Launch
	}{
		"policy stops":      {action: "stop", parts: parts{m: able}},
		"policy hibernates": {action: "hibernate", parts: parts{m: able}, want: worker.Launch{Hibernation: true, RootVolume: &worker.LaunchVolume{Device: "/dev/xvda", GB: 66, Encrypted: true}}},
		"policy may":        {action: "auto", parts: parts{m: able}, want: worker.Launch{Hibernation: true, RootVolume: &worker.LaunchVolume{Device: "/dev/xvda", GB: 66, Encrypted: true}}},
		"larger by the template": {tmpl: launch.Template{RootVolume: &launch.RootVolume{GB: 100, Type: "gp3"}}, action: "hibernate", parts: parts{m: able},
			want: worker.Launch{Hibernation: true, RootVolume: &worker.LaunchVolume{Device: "/dev/xvda", GB: 100, Type: "gp3", Encrypted: true}}},
		"off by the template": {tmpl: launch.Template{Hibernation: "off"}, action: "hibernate", parts: parts{m: able}},
		"storage alone":       {tmpl: launch.Template{Capacity: launch.Capacity{StorageGB: 70}}, action: "stop", parts: parts{m: able}, want: worker.Launch{RootVolume: &worker.LaunchVolume{Device: "/dev/xvda", GB: 70}}},
		"the type cannot":     {action: "hibernate", parts: parts{m: Machine{Why: "it cannot", RootDevice: "/dev/xvda", RootGB: 50}}, want: worker.Launch{HibernationOff: "it cannot"}},
		"on and cannot":       {tmpl: launch.Template{Hibernation: "on"}, action: "stop", parts: parts{m: Machine{Why: "it cannot"}}, failed: true},
		"may not be asked":    {action: "hibernate", parts: parts{err: callErr(Unauthorized)}, want: worker.Launch{HibernationOff: callErr(Unauthorized).Error()}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wd := newWorld(0)
				wd.parts = &c.parts
				r := newRig(t, options{world: wd})
				defer r.stop()
				tmpl := c.tmpl
				tmpl.Name, tmpl.InstanceType, tmpl.AMINameFilter, tmpl.Enabled = "fit", "m5.xlarge", "cml*", true
				if _, err := r.fleet.PutTemplate(t.Context(), operator, tmpl, 0); err != nil {
					t.Fatal(err)
				}
				w, err := r.fleet.CreateWorker(t.Context(), operator, fleet.NewWorker{Name: "one", AWSRegion: region0, TemplateName: "fit", Profile: worker.Profile{PauseAction: &c.action}})
				if err != nil {
					t.Fatal(err)
				}
				if c.failed {
					if w = r.await(w.ID, power.WorkerFailed, 10*time.Minute); w.StatusReason != "it cannot hibernate: it cannot" {
						t.Errorf("failed with %q", w.StatusReason)
					}
					return
				}
				l := r.await(w.ID, power.WorkerRunning, 10*time.Minute).Launch
				switch {
				case l == nil, l.Hibernation != c.want.Hibernation, l.HibernationOff != c.want.HibernationOff, (l.RootVolume == nil) != (c.want.RootVolume == nil),
					l.RootVolume != nil && *l.RootVolume != *c.want.RootVolume:
					t.Errorf("launched with %+v %+v, want %+v %+v", l, l.RootVolume, c.want, c.want.RootVolume)
				}
			})
		})
	}
}
