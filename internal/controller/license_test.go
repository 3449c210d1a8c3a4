package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
)

// refusal is the error of a request that CML refused.
var refusal = fmt.Errorf("%w: status 400", ErrRefused)

// first returns a function that returns err for the first n calls named call.
func first(n int, call string, err error) func(string) error {
	return func(c string) error {
		if c != call || n == 0 {
			return nil
		}
		n--
		return err
	}
}

// TestLicense checks that a license operation ends in the state that CML reports,
// whichever answers are lost and whoever changes the state meanwhile.
func TestLicense(t *testing.T) {
	lost := errors.New("the connection was reset")
	for _, c := range []struct {
		name    string
		op      string
		at      func(m *machine) // before the request
		refuse  error
		within  func(r *rig, id string) // 50 s later
		state   LicenseState            // from 2 min after the request on; the zero value changes nothing
		want    string
		because string // part of last_error
		calls   int    // number of calls of the operation itself
		counts  [2]int64
	}{
		{name: "registered", op: worker.OperationRegister, state: registered, want: worker.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "accepted, then failed", op: worker.OperationRegister, state: LicenseState{Failed: true, Detail: "token expired"}, want: worker.LicenseFailed, because: "token expired", calls: 1},
		{name: "accepted, then failed with the token in the reason", op: worker.OperationRegister, state: LicenseState{Failed: true, Detail: "the token 'env:hush-hush' is not valid"},
			want: worker.LicenseFailed, because: "is not valid", calls: 1},
		{name: "tried again by CML with the token in the reason", op: worker.OperationRegister, state: LicenseState{Detail: "RETRY_IN_PROGRESS: the token 'env:hush-hush' is not valid"},
			want: worker.LicenseFailed, because: "is not valid", calls: 1},
		{name: "refused", op: worker.OperationRegister, refuse: refusal, want: worker.LicenseFailed, because: "status 400", calls: 1},
		{name: "accepted is not done, forever", op: worker.OperationRegister, want: worker.LicenseFailed, because: "not completed within 10m", calls: 1},
		{name: "accepted, and nothing came of it", op: worker.OperationRegister, state: LicenseState{None: true, Detail: "no network"}, want: worker.LicenseFailed, because: "no network", calls: 1},
		{name: "its answer is lost, and it was taken", op: worker.OperationRegister, at: func(m *machine) { m.onLicense = first(1, "registered", lost) },
			state: registered, want: worker.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "its answer is lost, and it was not taken", op: worker.OperationRegister, at: func(m *machine) { m.onLicense = first(1, "register", lost) }, state: registered, want: worker.LicenseRegistered, calls: 2, counts: [2]int64{1, 0}},
		{name: "CML is away for a while", op: worker.OperationRegister, at: func(m *machine) { m.onLicense = first(5, "state", lost) },
			state: registered, want: worker.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "CML is away and does not come back", op: worker.OperationRegister, at: func(m *machine) { m.onLicense = first(1000, "state", lost) },
			state: registered, want: worker.LicenseFailed, because: "connection was reset"},
		{name: "resumed by the next controller", op: worker.OperationRegister, within: func(r *rig, _ string) {
			r.stop()
			r.run(r.db.Client(), options{server: "server-2"})
		}, state: registered, want: worker.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "the next controller finds that CML was never asked", op: worker.OperationRegister, at: func(m *machine) { m.onLicense = first(1, "register", lost) }, within: func(r *rig, id string) {
			r.stop()
			r.run(r.db.Client(), options{server: "server-2"})
		}, state: registered, want: worker.LicenseRegistered, calls: 2, counts: [2]int64{1, 0}},
		{name: "stopped in between", op: worker.OperationRegister, within: func(r *rig, id string) {
			_, _ = r.fleet.StopWorker(r.t.Context(), operator, id)
			r.await(id, power.WorkerStopped, 5*time.Minute)
			time.Sleep(time.Hour)
			_, _ = r.fleet.StartWorker(r.t.Context(), operator, id)
			r.await(id, power.WorkerRunning, 5*time.Minute)
		}, state: registered, want: worker.LicenseRegistered, calls: 1, counts: [2]int64{1, 0}},
		{name: "registered already", op: worker.OperationRegister, at: func(m *machine) { m.lic = registered }, refuse: refusal, want: worker.LicenseRegistered, counts: [2]int64{1, 0}},
		{name: "deregistered", op: worker.OperationDeregister, want: worker.LicenseDeregistered, calls: 1, counts: [2]int64{0, 1}},
		{name: "deregistration refused", op: worker.OperationDeregister, refuse: refusal, want: worker.LicenseRegistered, because: "status 400", calls: 1},
		{name: "deregistration's answer is lost, and it was done", op: worker.OperationDeregister, at: func(m *machine) { m.onLicense = first(1, "deregistered", lost) }, want: worker.LicenseDeregistered, calls: 2, counts: [2]int64{0, 1}},
		{name: "deregistration's answers are lost", op: worker.OperationDeregister, at: func(m *machine) { m.onLicense = first(3, "deregister", lost) }, want: worker.LicenseDeregistered, calls: 4, counts: [2]int64{0, 1}},
		{name: "deregistration is never answered", op: worker.OperationDeregister, at: func(m *machine) { m.onLicense = first(1000, "deregister", lost) }, want: worker.LicenseRegistered, because: "connection was reset"},
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
					if c.op == worker.OperationDeregister {
						m.lic = registered
					}
					if c.at != nil {
						c.at(m)
					}
				})
				const token = "hush-hush"
				var err error
				if c.op == worker.OperationRegister {
					_, err = r.fleet.RegisterLicense(t.Context(), operator, id, "env:"+token, false)
				} else {
					_, err = r.fleet.DeregisterLicense(t.Context(), operator, id)
				}
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(15 * time.Second)
				if c.op == worker.OperationRegister && c.refuse == nil {
					if l := r.worker(id).License; l.Status != worker.LicenseRegistering || l.OperationInProgress == nil {
						t.Errorf("accepted was taken for done: %+v", l)
					}
				}
				if c.within != nil {
					c.within(r, id)
				}
				time.Sleep(2 * time.Minute)
				if c.state != (LicenseState{}) {
					set(func() { m.lic = c.state })
				}
				// An operation without an outcome fails after 10 min. CML's state is
				// read again every 5 min, at an arbitrary phase.
				time.Sleep(20 * time.Minute)
				l := r.worker(id).License
				if l.Status != c.want || l.PendingOperation != "" || l.OperationInProgress != nil || l.Token != "" || !strings.Contains(l.LastError, c.because) || (l.LastError != "") != (c.because != "") {
					t.Errorf("ended as %+v, want %s", l, c.want)
				}
				if n := m.licensed[c.op]; c.calls > 0 && n != c.calls {
					t.Errorf("CML was asked %d times, want %d", n, c.calls)
				}
				if s := r.c.Stats(); s.LicenseRegistered != c.counts[0] || s.LicenseDeregistered != c.counts[1] {
					t.Errorf("counted %d and %d", s.LicenseRegistered, s.LicenseDeregistered)
				}
				page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id})
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

// TestLicenseGivenBack checks that a termination releases CML's seat, even one not
// registered through lull. If CML cannot be asked, the audit log says so and the
// termination continues.
func TestLicenseGivenBack(t *testing.T) {
	away := errors.New("away")
	for _, c := range []struct {
		name    string
		lic     LicenseState // when the termination is requested; registered 6 min earlier
		at      func(r *rig, id string, m *machine)
		after   func(r *rig, id string) // after the termination is requested
		want    string
		because string
		asked   bool
		leave   bool
	}{
		{name: "given back", lic: registered, want: worker.LicenseDeregistered, asked: true},
		{name: "out of compliance", lic: overused, want: worker.LicenseDeregistered, asked: true},
		{name: "released in CML meanwhile", lic: unregistered, want: worker.LicenseUnregistered},
		{name: "after a while", lic: registered, at: func(_ *rig, _ string, m *machine) { m.onLicense = first(3, "deregister", away) }, want: worker.LicenseDeregistered, asked: true},
		{name: "its answer is lost", lic: registered, at: func(_ *rig, _ string, m *machine) { m.onLicense = first(1, "deregistered", away) }, want: worker.LicenseDeregistered, asked: true},
		{name: "resumed by the next controller", lic: registered, at: func(_ *rig, _ string, m *machine) { m.onLicense = first(1, "deregistered", away) }, after: func(r *rig, id string) {
			r.till(id, func(w worker.Worker) bool { return w.License.OperationInProgress != nil })
			r.stop()
			r.run(r.db.Client(), options{server: "server-2"})
		}, want: worker.LicenseDeregistered, asked: true},
		{name: "a failed attempt before", lic: registered, at: func(r *rig, id string, m *machine) {
			m.onLicense = first(1, "deregister", refusal)
			r.world.mu.Unlock()
			defer r.world.mu.Lock()
			_, _ = r.fleet.DeregisterLicense(r.t.Context(), operator, id)
			r.till(id, func(w worker.Worker) bool { return w.License.FailedOperation != "" })
		}, want: worker.LicenseDeregistered, asked: true},
		{name: "refused", lic: registered, at: func(_ *rig, _ string, m *machine) { m.regErr = refusal }, want: worker.LicenseFailed, because: "status 400", asked: true},
		{name: "away", lic: registered, at: func(_ *rig, _ string, m *machine) { m.down = true }, want: worker.LicenseFailed, because: "cannot reach it"},
		{name: "ended from outside", lic: registered, at: func(r *rig, id string, m *machine) {
			m.down, m.State, m.then, m.until = true, "shutting-down", "terminated", time.Now().Add(time.Minute)
		}, want: worker.LicenseFailed, because: "before the instance ended"},
		{name: "stopped, and the seat is left", lic: registered, leave: true, at: func(r *rig, id string, _ *machine) {
			r.world.mu.Unlock()
			defer r.world.mu.Lock()
			_, _ = r.fleet.StopWorker(r.t.Context(), operator, id)
			r.await(id, power.WorkerStopped, 5*time.Minute)
		}, want: worker.LicenseFailed, because: "is not running"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				defer func() { r.stop() }()
				id := r.create().ID
				r.await(id, power.WorkerRunning, 5*time.Minute)
				m := r.machine(id)
				r.world.mu.Lock()
				m.lic = registered // registered in CML itself, outside lull
				r.world.mu.Unlock()
				time.Sleep(6 * time.Minute)
				if l := r.worker(id).License; l.Status != worker.LicenseRegistered || !l.Seat {
					t.Fatalf("not registered: %+v", l)
				}
				r.world.mu.Lock()
				m.lic = c.lic
				if c.at != nil {
					c.at(r, id, m)
				}
				r.world.mu.Unlock()
				errtest.Get(r.fleet.Terminate(t.Context(), operator, id, fleet.Termination{LeaveLicense: c.leave}))(t)
				if c.after != nil {
					c.after(r, id)
				}
				w := r.await(id, power.WorkerTerminated, 10*time.Minute)
				l := w.License
				if l.Status != c.want || !strings.Contains(l.LastError, c.because) || (l.LastError != "") != (c.because != "") || (m.licensed["deregister"] > 0) != c.asked {
					t.Errorf("its license ended as %+v, asked %d times", l, m.licensed["deregister"])
				}
				if l.PendingOperation != "" || l.OperationInProgress != nil || l.Seat != m.lic.Seat {
					t.Errorf("the record has %+v, and CML %+v", l, m.lic)
				}
				if _, err := r.fleet.RegisterLicense(t.Context(), operator, id, "env:TOKEN", false); err == nil {
					t.Error("the license of a terminated worker was requested")
				}
			})
		})
	}
}

// TestLicenseHeldByStopped checks that the termination of a stopped worker is refused
// while its CML holds a seat, unless the user accepts leaving it, and that it works
// once the worker runs.
func TestLicenseHeldByStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		m := r.machine(id)
		r.world.mu.Lock()
		m.lic = registered
		r.world.mu.Unlock()
		r.till(id, func(w worker.Worker) bool { return w.License.Seat })
		errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerStopped, 5*time.Minute)
		_, err := r.fleet.TerminateWorker(t.Context(), operator, id)
		if refused, ok := errors.AsType[*failure.Refused](err); !ok || refused.Reason != "license_held" {
			t.Errorf("terminated with %v", err)
		}
		errtest.Get(r.fleet.StartWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerRunning, 5*time.Minute)
		errtest.Get(r.fleet.TerminateWorker(t.Context(), operator, id))(t)
		if l := r.await(id, power.WorkerTerminated, 5*time.Minute).License; l.Status != worker.LicenseDeregistered || m.lic != unregistered {
			t.Errorf("its license ended as %+v", l)
		}
	})
}

// TestLicenseRead checks that an imported worker's record shows the license that its
// CML reports, and follows changes of it.
func TestLicenseRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		r.world.mu.Lock()
		m := r.world.add("running")
		m.PrivateIP, m.lic = "10.0.0.9", registered
		r.world.mu.Unlock()
		w, err := r.fleet.ImportWorker(t.Context(), operator, fleet.ImportedWorker{EC2InstanceID: m.ID, AWSRegion: region0})
		if err != nil {
			t.Fatal(err)
		}
		if s := w.License.Status; s != worker.LicenseUnknown {
			t.Errorf("not read yet, and shown as %s", s)
		}
		r.await(w.ID, power.WorkerRunning, 5*time.Minute)
		for _, c := range []struct {
			state LicenseState
			down  bool
			want  worker.License
		}{
			{state: registered, want: worker.License{Status: worker.LicenseRegistered, Registration: "COMPLETED", Authorization: "IN_COMPLIANCE", Seat: true}},
			{state: unregistered, down: true, want: worker.License{Status: worker.LicenseRegistered, Registration: "COMPLETED", Authorization: "IN_COMPLIANCE", Seat: true}},
			{state: overused, want: worker.License{Status: worker.LicenseFailed, Registration: "COMPLETED", Authorization: "OUT_OF_COMPLIANCE", Seat: true, LastError: overused.Detail}},
			{state: registered, want: worker.License{Status: worker.LicenseRegistered, Registration: "COMPLETED", Authorization: "IN_COMPLIANCE", Seat: true}},
			{state: unregistered, want: worker.License{Status: worker.LicenseUnregistered, Registration: "NOT_REGISTERED", Authorization: "EVAL"}},
			{state: inProgress, want: worker.License{Status: worker.LicenseRegistering, Registration: "IN_PROGRESS", Authorization: "EVAL", Seat: true}},
		} {
			r.world.mu.Lock()
			m.lic, m.down = c.state, c.down
			r.world.mu.Unlock()
			time.Sleep(11 * time.Minute)
			if got := r.worker(w.ID).License; got != c.want {
				t.Errorf("CML reports %+v (down %t): the record has %+v, want %+v", c.state, c.down, got, c.want)
			}
		}
		if n := m.licensed["register"] + m.licensed["deregister"]; n > 0 {
			t.Errorf("a reading changed the license %d times", n)
		}
	})
}

// till polls the record of a worker until ok accepts it, for at most 15 min.
func (r *rig) till(id string, ok func(worker.Worker) bool) {
	r.t.Helper()
	for range 15 * 60 {
		if ok(r.worker(id)) {
			return
		}
		time.Sleep(time.Second)
	}
	r.t.Fatalf("the record stayed %+v", r.worker(id))
}
