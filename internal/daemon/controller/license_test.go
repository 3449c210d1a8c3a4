package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/fleet"
	"lull/internal/power"
)

// refusal is CML's own word.
var refusal = fmt.Errorf("%w: status 400", ErrRefused)

// first fails the first n calls of a kind.
func first(n int, call string, err error) func(string) error {
	return func(c string) error {
		if c != call || n == 0 {
			return nil
		}
		n--
		return err
	}
}

// A license's operation ends with what CML says came of it, whatever is lost on
// the way.
func TestLicense(t *testing.T) {
	lost := errors.New("the connection was reset")
	for _, c := range []struct {
		name    string
		op      string
		at      func(m *machine) // before it is asked for
		refuse  error
		within  func(r *rig, id string) // 50 s later
		state   LicenseState            // from 2 min after the request on
		want    string
		because string // part of last_error
		calls   int    // of the operation's own call
		counts  [2]int64
	}{
		{name: "registered", op: fleet.OperationRegister, state: LicenseState{Done: true}, want: fleet.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "accepted, then failed", op: fleet.OperationRegister, state: LicenseState{Failed: true, Detail: "token expired"}, want: fleet.LicenseFailed, because: "token expired", calls: 1},
		{name: "refused", op: fleet.OperationRegister, refuse: refusal, want: fleet.LicenseFailed, because: "status 400", calls: 1},
		{name: "accepted is not done, for ever", op: fleet.OperationRegister, want: fleet.LicenseFailed, because: "not completed within 10m", calls: 1},
		{name: "accepted, and nothing came of it", op: fleet.OperationRegister, state: LicenseState{None: true, Detail: "no network"}, want: fleet.LicenseFailed, because: "no network", calls: 1},
		{name: "its answer is lost, and it was taken", op: fleet.OperationRegister, at: func(m *machine) { m.onLicense = first(1, "register", lost) },
			state: LicenseState{Done: true}, want: fleet.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "its answer is lost, and it was not taken", op: fleet.OperationRegister, at: func(m *machine) {
			m.lic, m.onLicense = LicenseState{None: true}, first(1, "register", lost)
		}, state: LicenseState{Done: true}, want: fleet.LicenseRegistered, calls: 2, counts: [2]int64{1, 0}},
		{name: "CML is away for a while", op: fleet.OperationRegister, at: func(m *machine) { m.onLicense = first(20, "state", lost) },
			state: LicenseState{Done: true}, want: fleet.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "CML is away and does not come back", op: fleet.OperationRegister, at: func(m *machine) { m.onLicense = first(1000, "state", lost) },
			state: LicenseState{Done: true}, want: fleet.LicenseFailed, because: "connection was reset", calls: 1},
		{name: "resumed by the next controller", op: fleet.OperationRegister, within: func(r *rig, _ string) {
			r.stop()
			r.run(r.db.Client(), options{server: "server-2"})
		}, state: LicenseState{Done: true}, want: fleet.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "the next controller finds that CML was never asked", op: fleet.OperationRegister, at: func(m *machine) {
			m.lic, m.onLicense = LicenseState{None: true}, first(1, "register", lost)
		}, within: func(r *rig, id string) {
			r.stop()
			r.run(r.db.Client(), options{server: "server-2"})
		}, state: LicenseState{Done: true}, want: fleet.LicenseRegistered, calls: 2, counts: [2]int64{1, 0}},
		{name: "stopped in between", op: fleet.OperationRegister, within: func(r *rig, id string) {
			_, _ = r.fleet.StopWorker(r.t.Context(), person, id)
			r.await(id, power.WorkerStopped, 5*time.Minute)
			time.Sleep(time.Hour)
			_, _ = r.fleet.StartWorker(r.t.Context(), person, id)
			r.await(id, power.WorkerRunning, 5*time.Minute)
		}, state: LicenseState{Done: true}, want: fleet.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "deregistered", op: fleet.OperationDeregister, want: fleet.LicenseDeregistered, calls: 1, counts: [2]int64{0, 1}},
		{name: "deregistration refused", op: fleet.OperationDeregister, refuse: refusal, want: fleet.LicenseFailed, because: "status 400", calls: 1},
		{name: "deregistration's answers are lost", op: fleet.OperationDeregister, at: func(m *machine) { m.onLicense = first(3, "deregister", lost) }, want: fleet.LicenseDeregistered, calls: 4, counts: [2]int64{0, 1}},
		{name: "deregistration is never answered", op: fleet.OperationDeregister, at: func(m *machine) { m.onLicense = first(1000, "deregister", lost) }, want: fleet.LicenseFailed, because: "connection was reset"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				defer func() { r.stop() }()
				id := r.create().ID
				r.await(id, power.WorkerRunning, 5*time.Minute)
				m := r.machine(id)
				set := func(f func()) { r.world.mu.Lock(); f(); r.world.mu.Unlock() }
				set(func() {
					m.regErr = c.refuse
					if c.at != nil {
						c.at(m)
					}
				})
				const token = "hush-hush"
				var err error
				if c.op == fleet.OperationRegister {
					_, err = r.fleet.RegisterLicense(t.Context(), person, id, "env:"+token, false)
				} else {
					_, err = r.fleet.DeregisterLicense(t.Context(), person, id)
				}
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(15 * time.Second)
				if c.op == fleet.OperationRegister && c.refuse == nil {
					if l := r.worker(id).License; l.Status != fleet.LicenseRegistering || l.OperationInProgress == nil {
						t.Errorf("accepted was taken for done: %+v", l)
					}
				}
				if c.within != nil {
					c.within(r, id)
				}
				time.Sleep(2 * time.Minute)
				set(func() { m.lic = c.state })
				time.Sleep(12 * time.Minute)
				l := r.worker(id).License
				if l.Status != c.want || l.PendingOperation != "" || l.OperationInProgress != nil || l.Token != "" || !strings.Contains(l.LastError, c.because) || (l.LastError != "") != (c.want == fleet.LicenseFailed) {
					t.Errorf("ended as %+v, want %s", l, c.want)
				}
				if n := m.licensed[c.op]; c.calls > 0 && n != c.calls {
					t.Errorf("CML was asked %d times, want %d", n, c.calls)
				}
				if s := r.c.Stats(); s.LicenseRegistered != c.counts[0] || s.LicenseDeregistered != c.counts[1] {
					t.Errorf("counted %d and %d", s.LicenseRegistered, s.LicenseDeregistered)
				}
				page, err := r.fleet.Audit(t.Context(), fleet.AuditQuery{WorkerID: id})
				if err != nil {
					t.Fatal(err)
				}
				if all := fmt.Sprintf("%+v %+v", page.Entries, l); strings.Contains(all, token) {
					t.Error("the token is told")
				}
			})
		})
	}
}

// A license is given back before its worker is terminated, where its CML can be
// asked; where it cannot, that is said, and the termination goes on.
func TestLicenseGivenBack(t *testing.T) {
	for _, c := range []struct {
		name    string
		at      func(r *rig, id string, m *machine)
		want    string
		because string
		asked   bool
	}{
		{"given back", nil, fleet.LicenseDeregistered, "", true},
		{"after a while", func(_ *rig, _ string, m *machine) { m.onLicense = first(3, "deregister", errors.New("away")) }, fleet.LicenseDeregistered, "", true},
		{"refused", func(_ *rig, _ string, m *machine) { m.regErr = refusal }, fleet.LicenseFailed, "status 400", true},
		{"away", func(_ *rig, _ string, m *machine) { m.down = true }, fleet.LicenseFailed, "cannot reach it", true},
		{"stopped", func(r *rig, id string, _ *machine) {
			r.world.mu.Unlock()
			defer r.world.mu.Lock()
			_, _ = r.fleet.StopWorker(r.t.Context(), person, id)
			r.await(id, power.WorkerStopped, 5*time.Minute)
		}, fleet.LicenseFailed, "does not run", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				defer func() { r.stop() }()
				id := r.create().ID
				r.await(id, power.WorkerRunning, 5*time.Minute)
				m := r.machine(id)
				r.world.mu.Lock()
				m.lic = LicenseState{Done: true}
				r.world.mu.Unlock()
				if _, err := r.fleet.RegisterLicense(t.Context(), person, id, "env:TOKEN", false); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute)
				if l := r.worker(id).License; l.Status != fleet.LicenseRegistered {
					t.Fatalf("not registered: %+v", l)
				}
				r.world.mu.Lock()
				if c.at != nil {
					c.at(r, id, m)
				}
				r.world.mu.Unlock()
				if _, err := r.fleet.TerminateWorker(t.Context(), person, id); err != nil {
					t.Fatal(err)
				}
				w := r.await(id, power.WorkerTerminated, 10*time.Minute)
				if w.License.Status != c.want || !strings.Contains(w.License.LastError, c.because) || (m.licensed["deregister"] > 0) != c.asked {
					t.Errorf("its license ended as %+v, asked %d times", w.License, m.licensed["deregister"])
				}
				if _, err := r.fleet.RegisterLicense(t.Context(), person, id, "env:TOKEN", false); err == nil {
					t.Error("a terminated worker's license is asked for")
				}
			})
		})
	}
}
