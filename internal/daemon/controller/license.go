package controller

import (
	"context"
	"errors"
	"strings"
	"time"

	"lull/internal/fleet"
)

// Times of work on licenses.
const (
	// licenseWait bounds how long CML may take over an operation.
	licenseWait = 10 * time.Minute
	// licenseAgain is how long after a request of which nothing is known CML is
	// asked again.
	licenseAgain = 30 * time.Second
	// licenseEnd bounds how long a termination waits for a license to be given
	// back.
	licenseEnd = 2 * time.Minute
)

// license carries out what is pending (seeds/003, section 9): the marker that
// CML is at work is durable before it is asked, and the outcome is the true
// one, however often the controller is restarted in between. An answer that is
// lost is no outcome: CML's state is, and until that says so, or licenseWait is
// over, it is asked again.
func (j *job) license(ctx context.Context) (outcome, bool) {
	l := j.w.License
	if l.PendingOperation == "" || j.now.Sub(j.live.licensed) < 5*time.Second {
		return outcome{}, false
	}
	j.live.licensed = j.now
	begins := l.OperationInProgress == nil
	if begins {
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
		return j.licensed(ctx, fleet.LicenseFailed, "this CML cannot be licensed by lull", false)
	}
	call, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if l.PendingOperation == fleet.OperationDeregister {
		return j.deregister(ctx, call, lic)
	}
	return j.register(ctx, call, lic, begins)
}

// beginLicense writes down that CML is about to be asked.
func (j *job) beginLicense(ctx context.Context) (outcome, bool) {
	status := fleet.LicenseRegistering
	if j.w.License.PendingOperation == fleet.OperationDeregister {
		status = fleet.LicenseDeregistering
	}
	err := j.write(ctx, func(w *fleet.Worker, tx *fleet.Tx) error {
		now := tx.Now
		w.License.OperationInProgress, w.License.Status = &now, status
		tx.Note(fleet.Entry{Action: "license_started", Events: []string{fleet.EventLicense}, Detail: w.License.PendingOperation})
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	j.live.licenseAsked, j.live.licenseTaken = time.Time{}, false
	return outcome{}, false
}

// deregister gives the license back. To ask twice is harmless.
func (j *job) deregister(ctx, call context.Context, lic Licenser) (outcome, bool) {
	local, err := lic.Deregister(call)
	switch {
	case err == nil:
		return j.licensed(ctx, fleet.LicenseDeregistered, "", local)
	case errors.Is(err, ErrRefused):
		return j.licensed(ctx, fleet.LicenseFailed, err.Error(), false)
	}
	return j.licensePending(ctx, err.Error())
}

// register looks what came of a registration that was asked for, perhaps by a
// controller that is gone, and asks where nothing shows that CML was.
func (j *job) register(ctx, call context.Context, lic Licenser, begins bool) (outcome, bool) {
	st := LicenseState{None: true}
	if !begins {
		var err error
		if st, err = lic.State(call); err != nil {
			return j.licensePending(ctx, err.Error())
		}
	}
	taken := j.live.licenseTaken // what the state says is of this registration, not of an earlier one
	switch {
	case st.Done && (taken || !j.w.License.Reregister):
		return j.licensed(ctx, fleet.LicenseRegistered, "", false)
	case st.Failed && taken:
		return j.licensed(ctx, fleet.LicenseFailed, st.Detail, false)
	case taken || !st.None && !st.Failed && !st.Done || j.now.Sub(j.live.licenseAsked) < licenseAgain:
		return j.licensePending(ctx, st.Detail)
	}
	token, err := j.c.cfg.Secret(j.w.License.Token)
	if err != nil {
		return j.licensed(ctx, fleet.LicenseFailed, err.Error(), false)
	}
	j.live.licenseAsked = j.now
	err = lic.Register(call, token, j.w.License.Reregister)
	switch {
	case err == nil:
		j.live.licenseTaken = true
		return outcome{}, false // accepted is not done
	case errors.Is(err, ErrRefused):
		return j.licensed(ctx, fleet.LicenseFailed, without(err, token), false)
	}
	return j.licensePending(ctx, without(err, token))
}

// without is an error's text without a secret, which the other side may have
// repeated.
func without(err error, secret string) string {
	if secret == "" {
		return err.Error()
	}
	return strings.ReplaceAll(err.Error(), secret, "[token]")
}

// licensePending leaves an operation under way, and says once why it does not
// get on; after licenseWait it has failed.
func (j *job) licensePending(ctx context.Context, why string) (outcome, bool) {
	if j.now.Sub(*j.w.License.OperationInProgress) > licenseWait {
		if why != "" {
			why = ": " + why
		}
		return j.licensed(ctx, fleet.LicenseFailed, "not completed within "+licenseWait.String()+why, false)
	}
	why = why[:min(len(why), 300)]
	if why == j.w.License.LastError || ctx.Err() != nil {
		return outcome{}, false
	}
	if err := j.write(ctx, func(w *fleet.Worker, _ *fleet.Tx) error { w.License.LastError = why; return nil }); err != nil {
		return j.failedWrite(err), true
	}
	return outcome{}, false
}

// licensed records the outcome and clears the operation. It is CML's answer,
// so that it is written though the worker was changed, or somebody asked for
// something else, while CML was asked.
func (j *job) licensed(ctx context.Context, status, why string, local bool) (outcome, bool) {
	asked := j.w.License.OperationInProgress
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	w, err := j.f.Change(bound, j.w.ID, fleet.Changing{By: fleet.ByController}, func(w *fleet.Worker, tx *fleet.Tx) error {
		if now := w.License.OperationInProgress; (now == nil) != (asked == nil) || now != nil && !now.Equal(*asked) {
			return fleet.ErrStale
		}
		w.License = fleet.License{Status: status, LastError: why, LocalOnly: local}
		tx.Note(fleet.Entry{Action: "license_" + status, Events: []string{fleet.EventLicense}, Detail: why})
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	j.took(w)
	switch status {
	case fleet.LicenseRegistered:
		j.c.count.registered.Add(1)
	case fleet.LicenseDeregistered:
		j.c.count.deregistered.Add(1)
	}
	return outcome{Requeue, time.Now().Add(debounce)}, true
}

// giveBack gives the license of a worker back before it is terminated, so that
// its seat is free; true tells to wait for that. It is tried for licenseEnd, and
// what came of it is recorded either way.
func (j *job) giveBack(ctx context.Context) (outcome, bool) {
	switch j.w.License.Status {
	case fleet.LicenseRegistered, fleet.LicenseRegistering, fleet.LicenseDeregistering:
	default:
		return outcome{}, false
	}
	why := "its machine does not run"
	if j.seen == "running" {
		local, err := j.askBack(ctx)
		switch {
		case ctx.Err() != nil:
			return outcome{Requeue, time.Now().Add(debounce)}, true
		case err == nil:
			return j.licensed(ctx, fleet.LicenseDeregistered, "", local)
		case !errors.Is(err, ErrRefused) && !j.overdue(licenseEnd):
			return outcome{Requeue, time.Now().Add(10 * time.Second)}, true
		}
		why = err.Error()
	}
	return j.licensed(ctx, fleet.LicenseFailed, "not given back before the termination: "+why, false)
}

func (j *job) askBack(ctx context.Context) (local bool, err error) {
	console, err := j.c.cfg.Consoles(j.w)
	if err != nil {
		return false, err
	}
	lic, ok := console.(Licenser)
	if !ok {
		return false, ErrRefused
	}
	call, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return lic.Deregister(call)
}
