package host

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// unstartable is a runtime whose programs fail to start.
type unstartable struct{ Runtime }

func (unstartable) Start(context.Context, instance.Launch) (instance.Workload, error) {
	return nil, errors.New("no such program")
}

// TestReplace replaces an instance in each state with one that starts, one that
// does not, and one that is refused. It checks that after a failure the existing
// instance is as before.
func TestReplace(t *testing.T) {
	states := map[string]struct {
		bring       func(r *rig, id string) error
		after, fail power.Instance // states of the existing instance at the end, if the new one is refused or does not start
	}{
		"running": {func(*rig, string) error { return nil }, power.Running, power.Running},
		"paused":  {func(r *rig, id string) error { return r.Pause(r.ctx, id, ByManual, true) }, power.Paused, power.Running},
		"stopped": {func(r *rig, id string) error { return r.Stop(r.ctx, id, ByManual, true) }, power.Stopped, power.Stopped},
	}
	for name, c := range states {
		for _, relayed := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				inTuned(t, func(c *Config) { c.Runtimes["broken"] = unstartable{c.Runtimes["process"]} }, func(r *rig) {
					never := new(idle.Duration)
					spec := func(change func(*instance.Spec)) instance.Spec {
						return hosttest.Spec("a", func(s *instance.Spec) {
							s.PauseAfter, s.StopAfter, s.Restart = never, never, instance.RestartNo
							if relayed {
								s.Expose[0] = instance.Endpoint{Listen: "127.0.0.1:82", Target: "127.0.0.1:80", Path: instance.PathRelay}
							}
							change(s)
						})
					}
					id := r.run("a", func(s *instance.Spec) { *s = spec(func(*instance.Spec) {}) })
					if err := c.bring(r, id); err != nil {
						t.Fatal(err)
					}
					enabled := r.is("a", c.after).Enabled
					if _, err := r.Replace(r.ctx, spec(func(s *instance.Spec) { s.DependsOn = []string{"nobody"} })); !invalid(err) {
						t.Errorf("refused with %v", err)
					}
					if o := r.is("a", c.after); o.ID != id {
						t.Errorf("a refused request replaced it: %+v", o)
					}
					if _, err := r.Replace(r.ctx, spec(func(s *instance.Spec) { s.Runtime = "broken" })); err == nil {
						t.Error("it started")
					}
					time.Sleep(time.Minute) // long enough for any automatic start
					synctest.Wait()
					if o := r.is("a", c.fail); o.ID != id || o.Enabled != enabled || o.Runtime != "process" {
						t.Errorf("a failed start left %+v", o)
					}
					if n := len(r.List(false)); n != 1 {
						t.Errorf("%d instances", n)
					}
					next, err := r.Replace(r.ctx, spec(func(s *instance.Spec) { s.Labels = map[string]string{"new": "yes"} }))
					if o := r.is("a", power.Running); err != nil || o.ID == id || o.ID != next || o.Labels["new"] != "yes" {
						t.Errorf("replaced by %+v, %v", o, err)
					}
					if n := len(r.List(false)); n != 1 || len(r.disk.All()) != 1 {
						t.Errorf("%d instances, %d records", n, len(r.disk.All()))
					}
					r.crash()
					r.boot()
					r.is("a", power.Running)
				})
			})
		}
	}
}
