package agent

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/protocol/control"
)

// TestIdentityThatComesLater checks that an agent that starts before the metadata
// service reports an unknown instance at first, and the right one later.
func TestIdentityThatComesLater(t *testing.T) {
	w, to := newWorld(), &ear{}
	w.tags["lull:idle-timeout"] = "30m"
	var up atomic.Bool
	w.tune = func(o *Options) {
		o.InstanceID, o.Reporter = "", to
		o.Identify = func(context.Context) (string, string, error) {
			if !up.Load() {
				return "", "", errors.New("connection refused")
			}
			return "i-7", "eu-north-1", nil
		}
	}
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if s := mustStatus(t, a); s.Cloud != "ec2" || s.InstanceID != "" || s.CloudError == "" || !hasAlarm(s, "instance_unknown", "refused") {
			t.Errorf("cloud %q, instance %q, error %q, alarms %v", s.Cloud, s.InstanceID, s.CloudError, s.Alarms)
		}
		up.Store(true)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		s := mustStatus(t, a)
		if s.InstanceID != "i-7" || s.Region != "eu-north-1" || s.CloudError != "" || hasAlarm(s, "instance_unknown", "") {
			t.Errorf("instance %q in %q, error %q, alarms %v", s.InstanceID, s.Region, s.CloudError, s.Alarms)
		}
		to.mu.Lock()
		defer to.mu.Unlock()
		if last := to.heard[len(to.heard)-1].(control.AgentReport); last.InstanceID != "i-7" || last.Region != "eu-north-1" {
			t.Errorf("reported as %q in %q", last.InstanceID, last.Region)
		}
	})
}

// TestNoWorkerIsSaid checks that an agent without access to its cloud shows that the
// server knows no worker for its instance.
func TestNoWorkerIsSaid(t *testing.T) {
	for _, id := range []string{"", "i-7"} {
		w := newWorld()
		w.tune = func(o *Options) { o.Cloud, o.Tags, o.InstanceID, o.Reporter = nil, nil, id, stranger{} }
		bubble(t, w, func(t *testing.T, a *Agent) {
			time.Sleep(3 * time.Minute)
			synctest.Wait()
			if s := mustStatus(t, a); hasAlarm(s, "no_worker", id) != (id != "") {
				t.Errorf("%q: alarms %v", id, s.Alarms)
			}
		})
	}
}

// stranger is a Reporter whose server knows no worker.
type stranger struct{}

func (stranger) Report(context.Context, control.AgentReport) (control.AgentAnswer, error) {
	return control.AgentAnswer{}, nil
}
