package controller

import (
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
)

// TestNotice checks that CML shows a warning while it is pending and not afterwards,
// whatever ended it, even if CML does not answer at once or another server owns the
// worker by then.
func TestNotice(t *testing.T) {
	ends := map[string]func(r *rig, id string) error{
		"snoozed": func(r *rig, id string) error {
			_, err := r.fleet.SnoozeWorker(r.t.Context(), operator, id, time.Now().Add(24*time.Hour))
			return err
		},
		"used": func(r *rig, id string) error { r.use(id); return nil },
		"detection off": func(r *rig, id string) error {
			_, err := r.fleet.SetIdleDetection(r.t.Context(), operator, id, false)
			return err
		},
		"halted": func(r *rig, _ string) error {
			_, err := r.fleet.SetHalt(r.t.Context(), operator, halt.Request{On: true})
			return err
		},
		"disarmed": func(r *rig, id string) error {
			_, err := r.fleet.ArmWorker(r.t.Context(), operator, id, false)
			return err
		},
		"stopped": func(r *rig, id string) error {
			_, err := r.fleet.StopWorker(r.t.Context(), operator, id)
			return err
		},
	}
	for name, end := range ends {
		for _, how := range []string{"", "CML is away", "another server", "the answer is lost"} {
			t.Run(name+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { noticeEnds(t, how, end) })
			})
		}
	}
}

func noticeEnds(t *testing.T, how string, end func(r *rig, id string) error) {
	r := newRig(t, options{})
	defer func() { r.stop() }()
	id := r.create().ID
	r.await(id, power.WorkerRunning, 5*time.Minute)
	m := r.machine(id)
	set := func(f func()) { r.world.mu.Lock(); f(); r.world.mu.Unlock() }
	shown := func() (n int) { set(func() { n = len(m.notices) }); return n }
	set(func() { m.deaf = how == "the answer is lost" })
	for stop := time.Now().Add(3 * time.Hour); shown() == 0 && time.Now().Before(stop); {
		time.Sleep(time.Second)
	}
	time.Sleep(time.Second)
	if w := r.worker(id); shown() != 1 || w.CMLNotice == nil || w.CMLNotice.Warning.Reason != power.ReasonIdleTimeout || w.WarningSentAt == nil {
		t.Fatalf("%d notices are shown, the record has %+v", shown(), w.CMLNotice)
	}
	switch how {
	case "CML is away":
		set(func() { m.down = true })
	case "another server":
		r.stop()
	}
	errtest.None(t, end(r, id))
	switch how {
	case "CML is away":
		time.Sleep(20 * time.Minute)
		set(func() { m.down = false })
	case "another server":
		r.run(r.db.Client(), options{server: "server-2"})
	}
	time.Sleep(15 * time.Minute)
	w := r.worker(id)
	if w.Status == power.WorkerStopped { // the notice is removed when CML runs again
		errtest.Get(r.fleet.ResumeWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerRunning, 10*time.Minute)
		time.Sleep(5 * time.Minute)
		w = r.worker(id)
	}
	if shown() != 0 || w.CMLNotice != nil {
		t.Errorf("%d notices are still shown, the record has %+v", shown(), w.CMLNotice)
	}
}

// TestNoticeOfTTL checks that CML's notice names the expiry as the reason.
func TestNoticeOfTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		at := time.Now().Add(20 * time.Minute)
		terminate := "terminate"
		errtest.Get(r.fleet.UpdateWorker(t.Context(), operator, id, 0, worker.Profile{TTLDeadline: &at, TTLAction: &terminate}))(t)
		time.Sleep(16 * time.Minute)
		r.world.mu.Lock()
		defer r.world.mu.Unlock()
		m := r.world.insts[r.worker(id).EC2InstanceID]
		if len(m.notices) != 1 {
			t.Fatalf("%d notices are shown", len(m.notices))
		}
		for _, x := range m.notices {
			if x.Action != "terminate" || !x.Forced || !x.PauseAt.Equal(at.UTC().Round(0)) {
				t.Errorf("it shows %+v", x)
			}
		}
	})
}
