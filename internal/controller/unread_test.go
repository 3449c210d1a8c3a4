package controller

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
)

// unread returns the value of lull_region_unread for a region; -1 if missing.
func (r *rig) unread(region string) float64 {
	r.t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(r.c.Collector())
	families, err := reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == "lull_region_unread" && m.Label[1].GetValue() == region {
				return m.Gauge.GetValue()
			}
		}
	}
	return -1
}

// TestRegionThatIsNotThere checks that a region for which EC2 does not answer is
// shown on its workers and in the metrics, and that a worker imported into it by
// mistake can be terminated.
func TestRegionThatIsNotThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		healthy := r.create().ID
		r.await(healthy, power.WorkerRunning, 5*time.Minute)
		if v := r.unread(region0); v != 0 {
			t.Errorf("lull_region_unread is %v of a region that is read", v)
		}
		broken := true
		r.world.mu.Lock()
		r.world.fault = func(call string) (time.Duration, error, bool) {
			if call == "states" && broken {
				return 0, &CallError{Unauthorized, errors.New(`AuthFailure: it has no region "eu-west-9"`)}, false
			}
			return 0, nil, false
		}
		r.world.mu.Unlock()
		in := fleet.ImportedWorker{Name: "lost", AWSRegion: region0, EC2InstanceID: "i-0123456789abcdef0"}
		w, err := r.fleet.ImportWorker(t.Context(), operator, in)
		errtest.None(t, err)
		time.Sleep(2 * time.Minute)
		const said = "EC2 has not answered about " + region0 + " since "
		if w = r.worker(w.ID); w.Status != power.WorkerUnknown || !strings.HasPrefix(w.StatusReason, said) || !strings.Contains(w.StatusReason, "AuthFailure") {
			t.Errorf("it is %s: %s", w.Status, w.StatusReason)
		}
		for _, id := range []string{w.ID, healthy} {
			if u := r.c.Verdicts()[id].CloudUnread; u == nil || !strings.Contains(u.Error, "AuthFailure") || time.Since(u.Since) > 3*time.Minute {
				t.Errorf("%s is told %+v", id, u)
			}
		}
		if v := r.unread(region0); v != 1 {
			t.Errorf("lull_region_unread is %v of a region that cannot be read", v)
		}
		revision := w.Revision()
		time.Sleep(time.Hour)
		if w = r.worker(w.ID); w.Revision() != revision {
			t.Error("its record is written although nothing happens")
		}
		refused := func(id string, force bool, reason string) {
			t.Helper()
			err := r.fleet.ForgetWorker(t.Context(), operator, id, force)
			if no, ok := errors.AsType[*failure.Refused](err); !ok || no.Reason != reason {
				t.Errorf("forgotten: %v", err)
			}
		}
		refused(healthy, true, "status")
		refused(w.ID, false, "force")
		errtest.Get(r.fleet.TerminateWorker(t.Context(), operator, w.ID))(t)
		time.Sleep(10 * time.Minute)
		if w = r.worker(w.ID); w.Status != power.WorkerTerminating || !strings.HasPrefix(w.StatusReason, said) {
			t.Errorf("it is %s: %s", w.Status, w.StatusReason)
		}
		refused(w.ID, false, "force")
		errtest.None(t, r.fleet.ForgetWorker(t.Context(), operator, w.ID, true))
		page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: w.ID, Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		if e := page.Entries[len(page.Entries)-1]; e.Action != "forgotten" || e.Reason != "force" || !strings.Contains(e.Detail, "EC2") {
			t.Errorf("the audit has %+v", e)
		}
		if w, err = r.fleet.ImportWorker(t.Context(), operator, in); err != nil {
			t.Fatal(err)
		}
		r.world.mu.Lock()
		broken = false
		r.world.mu.Unlock()
		r.await(w.ID, power.WorkerTerminated, 10*time.Minute)
		if v, u := r.unread(region0), r.c.Verdicts()[healthy].CloudUnread; v != 0 || u != nil {
			t.Errorf("the region is read again, and %v, %+v", v, u)
		}
	})
}
