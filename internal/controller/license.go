package controller

import (
	"context"
	"errors"
	"strings"
	"time"

	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/worker"
)

// Time limits of license operations.
const (
	// licenseWait bounds how long CML may take over an operation.
	licenseWait = 10 * time.Minute
	// licenseAgain is the delay before a request whose answer was lost is repeated.
	licenseAgain = 30 * time.Second
	// licenseEnd bounds how long a termination waits for the seat to be released.
	licenseEnd = 2 * time.Minute
)

// readLicense reads the registration state from CML. A state that cannot be
// read leaves the record as it is.
func (j *job) readLicense(ctx context.Context, console Console) {
	lic, ok := console.(Licenser)
	if !ok {
		return
	}
	call, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if st, err := lic.State(call); err == nil {
		j.read = &st
	}
}

// learnLicense writes the state that this job read from CML, if it is new. While
// an operation is pending, license reads the state itself.
func (j *job) learnLicense(ctx context.Context) (outcome, bool) {
	st := j.read
	if st == nil || j.w.License.PendingOperation != "" || observed(j.w.License, *st) == j.w.License {
		return outcome{}, false
	}
	err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
		was := w.License.Status
		w.License = observed(w.License, *st)
		if now := w.License.Status; now != was {
			tx.Note(audit.Entry{Action: "license_observed", Events: []string{audit.EventLicense}, Detail: was + " -> " + now})
		}
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	return outcome{}, false
}

// observed returns l updated to the state that CML reports. The error of a failed
// operation is kept until CML reaches the state that the operation was meant to
// reach.
func observed(l worker.License, st LicenseState) worker.License {
	same := l.Registration == st.Registration && l.Authorization == st.Authorization
	l.Registration, l.Authorization, l.Seat = st.Registration, st.Authorization, st.Seat
	switch {
	case st.Done:
		l.Status, l.LocalOnly = worker.LicenseRegistered, false
		if l.FailedOperation != worker.OperationDeregister {
			l.LastError, l.FailedOperation = "", ""
		}
	case st.Failed && same && l.Status == worker.LicenseFailed && l.FailedOperation == worker.OperationRegister:
		// The cause of the failure is already recorded, and CML's text may contain
		// the token.
	case st.Failed:
		l.Status, l.LastError, l.FailedOperation = worker.LicenseFailed, st.Detail, ""
	case l.Status == worker.LicenseFailed && l.FailedOperation == worker.OperationRegister:
	case !st.None:
		l.Status = worker.LicenseRegistering
	case l.Status == worker.LicenseDeregistered:
	default:
		l.Status, l.LastError, l.FailedOperation = worker.LicenseUnregistered, "", ""
	}
	return l
}

// license carries out the pending operation. The in-progress marker is durable before
// CML is asked, so that a restarted controller resumes the operation. An answer may
// be lost, so the outcome is read from CML's state: the request is repeated until the
// state shows the outcome, or until licenseWait has passed.
func (j *job) license(ctx context.Context) (outcome, bool) {
	l := j.w.License
	if l.PendingOperation == "" || j.now.Sub(j.live.licensed) < 5*time.Second {
		return outcome{}, false
	}
	j.live.licensed = j.now
	if l.OperationInProgress == nil {
		if out, failed := j.beginLicense(ctx); failed {
			return out, true
		}
	}
	console, err := j.c.cfg.Consoles(j.w)
	if err != nil {
		return j.licensePending(ctx, err.Error())
	}
	lic, ok := console.(Licenser)
	if !ok {
		return j.licensed(ctx, worker.LicenseFailed, "this CML cannot be licensed by lull", false)
	}
	call, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if l.PendingOperation == worker.OperationDeregister {
		return j.deregister(ctx, call, lic)
	}
	return j.register(ctx, call, lic)
}

// beginLicense records that CML is about to be asked.
func (j *job) beginLicense(ctx context.Context) (outcome, bool) {
	err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
		w.License.Ask(w.License.PendingOperation, tx.Now)
		tx.Note(audit.Entry{Action: "license_started", Events: []string{audit.EventLicense}, Detail: w.License.PendingOperation})
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	j.live.licenseAsked, j.live.licenseTaken = time.Time{}, false
	return outcome{}, false
}

// deregister releases the license. Asking twice is harmless.
func (j *job) deregister(ctx, call context.Context, lic Licenser) (outcome, bool) {
	local, err := lic.Deregister(call)
	switch {
	case err == nil:
		return j.licensed(ctx, worker.LicenseDeregistered, "", local)
	case errors.Is(err, ErrRefused):
		return j.licensed(ctx, worker.LicenseFailed, err.Error(), false)
	}
	return j.licensePending(ctx, err.Error())
}

// register reads CML's state and requests the registration only if the state does not
// show one. An earlier controller may have requested it already, and CML refuses to
// be registered twice.
func (j *job) register(ctx, call context.Context, lic Licenser) (outcome, bool) {
	st, err := lic.State(call)
	if err != nil {
		return j.licensePending(ctx, err.Error())
	}
	if token, err := j.c.cfg.Secret(j.w.License.Token); err == nil {
		st.Detail = without(st.Detail, token) // CML's text may repeat an invalid token
	}
	j.read = &st
	taken := j.live.licenseTaken // st reflects this registration, not an earlier one
	switch {
	case st.Done && (taken || !j.w.License.Reregister):
		return j.licensed(ctx, worker.LicenseRegistered, "", false)
	case st.Failed && taken:
		return j.licensed(ctx, worker.LicenseFailed, st.Detail, false)
	case taken || !st.None && !st.Failed && !st.Done || j.now.Sub(j.live.licenseAsked) < licenseAgain:
		return j.licensePending(ctx, st.Detail)
	}
	token, err := j.c.cfg.Secret(j.w.License.Token)
	if err != nil {
		return j.licensed(ctx, worker.LicenseFailed, err.Error(), false)
	}
	j.live.licenseAsked = j.now
	err = lic.Register(call, token, j.w.License.Reregister)
	switch {
	case err == nil:
		j.live.licenseTaken = true
		return outcome{}, false // the request is accepted, not done
	case errors.Is(err, ErrRefused):
		return j.licensed(ctx, worker.LicenseFailed, without(err.Error(), token), false)
	}
	return j.licensePending(ctx, without(err.Error(), token))
}

// without returns text without secret, which CML may have repeated.
func without(text string, secret sealed.Plain) string {
	if secret == "" {
		return text
	}
	return strings.ReplaceAll(text, string(secret), "[token]")
}

// licensePending leaves an operation pending and records the reason once. After
// licenseWait the operation has failed.
func (j *job) licensePending(ctx context.Context, why string) (outcome, bool) {
	if j.now.Sub(*j.w.License.OperationInProgress) > licenseWait {
		if why != "" {
			why = ": " + why
		}
		return j.licensed(ctx, worker.LicenseFailed, "not completed within "+licenseWait.String()+why, false)
	}
	why = why[:min(len(why), 300)]
	if why == j.w.License.LastError || ctx.Err() != nil {
		return outcome{}, false
	}
	if err := j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error { w.License.LastError = why; return nil }); err != nil {
		return j.failedWrite(err), true
	}
	return outcome{}, false
}

// licensed records the outcome and clears the operation. The outcome is what CML
// answered, so it is written even if the worker's record has changed meanwhile.
func (j *job) licensed(ctx context.Context, status, why string, local bool) (outcome, bool) {
	asked, op := j.w.License.OperationInProgress, j.w.License.PendingOperation
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	w, err := j.f.Change(bound, j.w.ID, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, tx *worker.Tx) error {
		if now := w.License.OperationInProgress; (now == nil) != (asked == nil) || now != nil && !now.Equal(*asked) {
			return fleet.ErrStale
		}
		w.License.Finish(op, status, why, local)
		if j.read != nil && status != worker.LicenseDeregistered {
			w.License.Registration, w.License.Authorization, w.License.Seat = j.read.Registration, j.read.Authorization, j.read.Seat
		}
		tx.Note(audit.Entry{Action: "license_" + status, Events: []string{audit.EventLicense}, Detail: why})
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	j.took(w)
	switch status {
	case worker.LicenseRegistered:
		j.c.count.registered.Add(1)
	case worker.LicenseDeregistered:
		j.c.count.deregistered.Add(1)
	}
	return outcome{Requeue, time.Now().Add(debounce)}, true
}

// giveBack releases the license seat of a worker that is about to be terminated. It
// returns true while the termination must wait. CML's state decides whether there is
// a seat, because a license may have been registered outside lull. Attempts end after
// licenseEnd; a seat that was not released is recorded.
func (j *job) giveBack(ctx context.Context) (outcome, bool) {
	l := &j.w.License
	gaveUp := l.Status == worker.LicenseFailed && l.FailedOperation == worker.OperationDeregister && l.PendingOperation == "" && j.overdue(licenseEnd)
	switch {
	case !j.hasCML() || gaveUp:
		return outcome{}, false
	case j.seen != "running" && j.seen != "pending":
		if !l.MayHoldSeat() || l.Status == worker.LicenseFailed && l.FailedOperation == worker.OperationDeregister {
			return outcome{}, false
		}
		return j.notGivenBack(ctx, "its machine is not running")
	}
	held, local, marking, err := j.askBack(ctx)
	switch {
	case ctx.Err() != nil:
		return outcome{Requeue, time.Now().Add(debounce)}, true
	case err == nil && !held && l.PendingOperation == worker.OperationDeregister && l.OperationInProgress != nil:
		return j.licensed(ctx, worker.LicenseDeregistered, "", false) // an earlier request released it, and its answer was lost
	case err == nil && !held:
		return j.learnLicense(ctx)
	case err == nil:
		return j.licensed(ctx, worker.LicenseDeregistered, "", local)
	case marking != nil:
		return j.failedWrite(marking), true
	case !errors.Is(err, ErrRefused) && !j.overdue(licenseEnd):
		return outcome{Requeue, time.Now().Add(10 * time.Second)}, true
	}
	return j.notGivenBack(ctx, err.Error())
}

// hasCML reports whether the worker has a CML, as far as is known.
func (j *job) hasCML() bool {
	return j.wantsCML() || j.w.CMLVersion != "" || j.w.License.MayHoldSeat()
}

// notGivenBack records once that the termination continues although the seat was not
// released.
func (j *job) notGivenBack(ctx context.Context, why string) (outcome, bool) {
	l := &j.w.License
	if l.Status == worker.LicenseFailed && l.FailedOperation == worker.OperationDeregister {
		return outcome{}, false
	}
	j.w.License.PendingOperation = worker.OperationDeregister
	return j.licensed(ctx, worker.LicenseFailed, "not released before the termination: "+why, false)
}

// askBack releases the seat if CML holds one. held is whether it did. marking is the
// error of writing the in-progress marker; CML is not asked without the marker.
func (j *job) askBack(ctx context.Context) (held, local bool, marking, err error) {
	console, err := j.c.cfg.Consoles(j.w)
	if err != nil {
		return false, false, nil, err
	}
	lic, ok := console.(Licenser)
	if !ok {
		return false, false, nil, ErrRefused
	}
	call, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	st, err := lic.State(call)
	if err != nil {
		return false, false, nil, err
	}
	j.read = &st
	if !st.Seat {
		return false, false, nil, nil
	}
	if l := &j.w.License; l.PendingOperation != worker.OperationDeregister || l.OperationInProgress == nil {
		marking = j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
			w.License.Ask(worker.OperationDeregister, tx.Now)
			tx.Note(audit.Entry{Action: "license_started", Events: []string{audit.EventLicense}, Detail: worker.OperationDeregister})
			return nil
		})
		if marking != nil {
			return true, false, marking, marking
		}
	}
	local, err = lic.Deregister(call)
	return true, local, nil, err
}
