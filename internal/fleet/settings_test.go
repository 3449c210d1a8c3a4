package fleet_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"lull/internal/core/failure"
	"lull/internal/fleet"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
)

func TestDefaultsAreTheSeeds(t *testing.T) {
	s, _, err := settings.Resolve()
	errtest.None(t, err)
	for _, c := range []struct {
		what      string
		got, want any
	}{
		{"timeout", s.WorkerIdleTimeout, time.Hour}, {"auto pause", s.WorkerAutoPauseEnabled, true}, {"snooze", s.WorkerAutoPauseSnooze, time.Hour},
		{"detection", s.WorkerActivityDetectionEnabled, true}, {"sweep", s.WorkerActivityDetectionInterval, 30 * time.Minute},
		{"stored", s.WorkerActivityEventsMaxStored, 10}, {"check", s.IdleDetectionInterval, 5 * time.Minute}, {"cycle", s.ReconcileInterval, 30 * time.Second},
		{"polling", s.ReconcilePollingEnabled, true}, {"user", s.CMLDefaultUsername, "admin"}, {"password", s.CMLDefaultPassword, sealed.Secret("")},
		{"scale down", s.ScaleDownEnabled, false}, {"floor", s.MinWorkers, 0}, {"cooldown", s.ScaleDownCooldown, 10 * time.Minute},
		{"drain", s.DrainTimeout, 10 * time.Minute}, {"provisioning", s.ProvisioningTimeout, 15 * time.Minute}, {"scan", s.DiscoveryScanInterval, 5 * time.Minute},
		{"region limit", s.MaxWorkersPerRegion, 10}, {"users", s.WorkerActivityExcludedUsers, "^00000000-0000-.*"}, {"categories", len(s.WorkerActivityCategories), 14},
	} {
		if c.got != c.want {
			t.Errorf("%s is %v, want %v", c.what, c.got, c.want)
		}
	}
}

func TestPrecedence(t *testing.T) {
	l := func(s settings.Source, v int) settings.Layer {
		return settings.Layer{Source: s, Values: map[string]any{"min_workers": v}}
	}
	layers := []settings.Layer{l(settings.FromFlag, 1), l(settings.FromEnv, 2), l(settings.FromStored, 3), l(settings.FromFile, 4)}
	for i := range layers {
		s, all, err := settings.Resolve(layers[i:]...)
		if err != nil || s.MinWorkers != i+1 {
			t.Errorf("from layer %d: %d, %v", i, s.MinWorkers, err)
		}
		for _, f := range all {
			if f.Key == "min_workers" && f.Source != layers[i].Source {
				t.Errorf("source %s, want %s", f.Source, layers[i].Source)
			}
		}
	}
}

func TestBadSettingsAreNamed(t *testing.T) {
	file := "worker_idle_timeout_minutes: 90\nmin_workers: many\nwat: 1\nreconcile_interval: 0\nmin_workers: 3\n" +
		"aws_region_configs:\n  us-east-1: {subnet_id: subnet-1, color: red}\n"
	_, err := settings.FileLayer("lull.yaml", []byte(file), nil)
	for _, want := range []string{"line 2", `"many"`, "line 3", "wat", "line 4", "between 1 and", "line 5", "set in line 2", "line 6", "color"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
	for _, c := range []struct {
		key string
		v   any
	}{
		{"aws_default_region", "moon"}, {"worker_activity_excluded_user_pattern", "("}, {"tag_prefix", "aws:"}, {"discovery_import", "maybe"},
		{"idle_detection_interval", 7200}, {"worker_warn_before_minutes", 61}, {"aws_region_configs", map[string]any{"us-east-1": map[string]any{"subnet_id": "net"}}},
		{"worker_idle_timeout_minutes", 1.5}, {"worker_auto_pause_enabled", "perhaps"},
	} {
		if _, _, err := settings.Resolve(settings.Layer{Source: settings.FromFile, Values: map[string]any{c.key: c.v}}); err == nil {
			t.Errorf("%s took %v", c.key, c.v)
		}
	}
}

func TestPinnedSettings(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		env := settings.Layer{Source: settings.FromEnv, Values: map[string]any{"min_workers": "4"}}
		pinned, err := fleet.New(fleet.Options{Store: fl.Store(), ID: "f1", Env: env})
		if err != nil || pinned.Settings().MinWorkers != 4 {
			t.Fatalf("env: %v", err)
		}
		if _, ok := errors.AsType[*failure.Conflict](second(pinned.PutSettings(t.Context(), ada, map[string]any{"min_workers": 1}))); !ok {
			t.Error("a pinned key was changed")
		}
		if _, ok := errors.AsType[*failure.Invalid](second(pinned.PutSettings(t.Context(), ada, map[string]any{"worker_idle_timeout_minutes": 0}))); !ok {
			t.Error("a bad value was stored")
		}
		errtest.Get(pinned.PutSettings(t.Context(), ada, map[string]any{"worker_idle_timeout_minutes": 30.0}))(t)
		if err := fl.Refresh(t.Context()); err != nil || fl.Settings().WorkerIdleTimeout != 30*time.Minute {
			t.Errorf("another process has %s: %v", fl.Settings().WorkerIdleTimeout, err)
		}
		if _, err := pinned.PutSettings(t.Context(), ada, map[string]any{"worker_idle_timeout_minutes": nil}); err != nil || pinned.Settings().WorkerIdleTimeout != time.Hour {
			t.Errorf("back to the default: %s, %v", pinned.Settings().WorkerIdleTimeout, err)
		}
	})
}

// TestPolicyOfWorker checks the order of the layers of a worker's policy: its own
// field, the named policy, the template, the global value.
func TestPolicyOfWorker(t *testing.T) {
	fl, err := fleet.New(fleet.Options{ID: "f1"})
	if err != nil {
		t.Fatal(err)
	}
	n := func(i int) *int { return &i }
	tmpl := &launch.Template{Name: "t", IdleDetection: &launch.IdleDetection{Enabled: true, IdleThresholdMinutes: 20, HibernateThresholdMinutes: 30, CheckIntervalMinutes: 2}}
	for _, c := range []struct {
		name    string
		w       worker.Worker
		t       *launch.Template
		timeout time.Duration
		warn    time.Duration
		action  string
		detect  bool
		from    string
	}{
		{"global", worker.Worker{IsIdleDetectionEnabled: true}, nil, time.Hour, 5 * time.Minute, "stop", true, "settings"},
		{"template", worker.Worker{IsIdleDetectionEnabled: true}, tmpl, 30 * time.Minute, 10 * time.Minute, "stop", true, "template t"},
		{"policy", worker.Worker{IsIdleDetectionEnabled: true, Policy: "aggressive"}, tmpl, 15 * time.Minute, 10 * time.Minute, "hibernate", true, "policy aggressive"},
		{"own", worker.Worker{ID: "w", IsIdleDetectionEnabled: true, IdleTimeoutMinutes: n(4), PauseAction: "stop", Policy: "aggressive"}, tmpl, 4 * time.Minute, 4 * time.Minute, "stop", true, "worker w"},
		{"switched off", worker.Worker{}, nil, time.Hour, 5 * time.Minute, "stop", false, "settings"},
		{"template off", worker.Worker{IsIdleDetectionEnabled: true}, &launch.Template{IdleDetection: &launch.IdleDetection{}, Name: "o"}, time.Hour, 5 * time.Minute, "stop", false, "settings"},
	} {
		r := fl.PolicyWith(time.Now(), &c.w, c.t)
		p := r.Idle(c.w.IsIdleDetectionEnabled)
		if time.Duration(p.Timeout) != c.timeout || time.Duration(p.WarnBefore) != c.warn || p.Action != c.action || p.Detection != c.detect ||
			r.From["idle_timeout"].String() != c.from {
			t.Errorf("%s: %+v from %s", c.name, p, r.From["idle_timeout"])
		}
	}
}

func FuzzFileLayer(f *testing.F) {
	f.Add("min_workers: 3\n")
	f.Add("aws_region_configs: {us-east-1: {security_group_ids: [sg-1], default_tags: {a: b}}}\n")
	f.Add("worker_activity_relevant_categories: [a, b]\nx: [")
	f.Add("- 1\n- 2\n")
	f.Fuzz(func(t *testing.T, in string) {
		l, err := settings.FileLayer("f", []byte(in), nil)
		if err != nil {
			return
		}
		l.Source = settings.FromFile
		if s, _, err := settings.Resolve(l); err == nil {
			if err := s.Validate(); err != nil {
				t.Errorf("resolved to invalid settings: %v", err)
			}
		}
	})
}
