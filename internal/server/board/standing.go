package board

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
)

// A worker used within Lately is active, and one to be paused within Soon is pausing
// soon. Both limits are at most a third of the worker's timeout, so that with a short
// timeout not every worker is about to be paused.
const (
	Lately = idle.Lately
	Soon   = 15 * time.Minute
)

// Row returns the overview row of one worker. st is nil if the worker is not
// observed.
func Row(w *worker.Worker, st *worker.IdleStatus, now time.Time) control.WorkerRow {
	r := control.WorkerRow{ID: w.ID, Name: w.Name, AWSRegion: w.AWSRegion, InstanceType: w.InstanceType, TemplateName: w.TemplateName, Owner: w.Owner,
		Status: string(w.Status), DesiredStatus: string(w.DesiredStatus), LastActivityAt: w.LastActivityAt, LastPausedAt: w.LastPausedAt,
		PauseReason: string(w.PauseReason), Armed: w.Armed, EC2InstanceID: w.EC2InstanceID, HTTPSEndpoint: w.HTTPSEndpoint, Revision: w.Revision()}
	if st != nil {
		r.CPU = st.CPU
	}
	switch w.Status {
	case power.WorkerStopped:
		r.Standing, r.Sentence = control.StandingPaused, "Paused."
		if w.LastPausedAt != nil {
			r.Sentence = fmt.Sprintf("Paused by %s (%s).", w.LastPausedBy, w.PauseReason)
		}
		if w.DesiredStatus == power.WorkerRunning {
			r.Standing, r.Sentence = control.StandingStarting, "About to start."
		}
	case power.WorkerPending, power.WorkerProvisioning, power.WorkerStarting:
		r.Standing, r.Sentence = control.StandingStarting, "Starting."
	case power.WorkerStopping, power.WorkerDraining:
		r.Standing, r.Sentence = control.StandingPausingSoon, "Stopping."
		if w.Status == power.WorkerDraining {
			r.Sentence = "Draining: it takes nothing new, and stops when nothing runs."
		}
	case power.WorkerFailed:
		r.Standing, r.Sentence, r.Attention = control.StandingFailed, "Failed.", true
	case power.WorkerTerminating, power.WorkerTerminated:
		r.Standing, r.Sentence = control.StandingEnded, "Ended."
	case power.WorkerRunning:
		judge(&r, w, st, now)
		ends(&r, expiry(w, st, now), st, now)
		if w.StopRefused() && w.Intent == nil {
			r.Sentence, r.Attention = "The stop was canceled: "+strings.TrimSuffix(w.StopCalledOff.Why, ".")+".", true
		}
	default:
		r.Standing, r.Sentence, r.Attention = control.StandingUnknown, "EC2 reports a state that lull does not know.", true
		if w.StatusReason == "" && now.Sub(w.StatusSince) < CheckingFor {
			r.Standing, r.Sentence, r.Attention = control.StandingChecking, "Its state is being read from EC2.", false
		}
	}
	if why := w.StatusReason; why != "" && (r.Standing == control.StandingFailed || r.Standing == control.StandingStarting || w.Status == power.WorkerUnknown) {
		r.Sentence = why
	}
	if st != nil && w.Status != power.WorkerTerminated {
		unread(&r, st.CloudUnread, now)
	}
	if l := &w.License; r.Standing != control.StandingEnded && (l.Status == worker.LicenseFailed || l.FailedOperation != "") {
		r.Attention = true
		r.Sentence = "License error: " + l.LastError
	}
	return r
}

// CheckingFor is how long after an import or a start a worker without a result is
// shown as being checked, before it is unknown.
const CheckingFor = 2 * time.Minute

// UnreadAfter is how long a region's EC2 API must be unreadable before the overview
// shows that.
const UnreadAfter = 2 * time.Minute

// unread sets in r that EC2 cannot be read in the worker's region, so that it is
// unknown whether the worker still exists.
func unread(r *control.WorkerRow, u *worker.Unread, now time.Time) {
	if u == nil || now.Sub(u.Since) < UnreadAfter {
		return
	}
	r.Sentence, r.Attention = u.Sentence()+".", true
	if r.Standing == control.StandingEnded {
		r.Standing = control.StandingUnknown
	}
}

// judge sets the standing of a running worker.
func judge(r *control.WorkerRow, w *worker.Worker, st *worker.IdleStatus, now time.Time) {
	if st == nil && now.Sub(w.LastStart()) < CheckingFor {
		r.Standing, r.Sentence = control.StandingChecking, "Its first check is in progress."
		return
	}
	if st == nil {
		r.Standing, r.Sentence, r.Attention = control.StandingUnknown, "The server that observes it does not answer.", true
		return
	}
	r.IdleMinutes, r.TimeoutMinutes = st.IdleMinutes, st.TimeoutMinutes
	r.TargetPauseAt, r.SnoozeUntil = st.TargetPauseAt, st.SnoozeUntil
	if st.LastActivityAt != nil {
		r.LastActivityAt = st.LastActivityAt
	}
	third := time.Duration(st.TimeoutMinutes / 3 * float64(time.Minute))
	lasting := lasting(st.Blocks)
	switch unknown := find(st.Blocks, idle.SignalUnknown, idle.ClockInFuture); {
	case w.Intent != nil:
		r.Standing, r.Sentence = control.StandingPausingSoon, fmt.Sprintf("%s requested a pause (%s).", w.Intent.By, w.Intent.Reason)
	case unknown != nil && st.Checking && unknown.Code == idle.SignalUnknown:
		r.Standing, r.Sentence, r.Block = control.StandingChecking, "Its activity is being read. Until then it is not paused.", string(unknown.Code)
		if at := st.NextIdleCheckAt; at.After(now) {
			r.Sentence = "Its activity is read at " + at.UTC().Format(time.RFC3339) + ". Until then it is not paused."
		}
		return
	case unknown != nil:
		r.Standing, r.Sentence, r.Block, r.Attention = control.StandingUnknown, unknown.Sentence, string(unknown.Code), true
	case st.IsIdle && lasting != nil:
		r.Standing, r.Sentence, r.Block = control.StandingBlocked, lasting.Sentence, string(lasting.Code)
	case len(st.Blocks) == 0:
		r.Standing, r.Sentence = control.StandingPausingSoon, "It is paused at the next check."
	case st.TargetPauseAt != nil && st.TargetPauseAt.Sub(now) <= min(Soon, third):
		r.Standing, r.Sentence = control.StandingPausingSoon, "It is paused if nothing happens."
	case st.Has(idle.SignalActive) || time.Duration(st.IdleMinutes*float64(time.Minute)) <= min(Lately, third):
		r.Standing, r.Sentence = control.StandingActive, "In use."
	default:
		r.Standing, r.Sentence = control.StandingIdle, "Not used lately."
	}
	if lasting != nil && r.Block == "" && w.Intent == nil && lasting.Code != idle.Halted { // blocks shared by all workers are shown once, above the rows
		r.Sentence, r.Block = lasting.Sentence, string(lasting.Code)
	}
	if lasting != nil && st.IsIdle {
		r.Attention = r.Attention || actionable(lasting.Code)
	}
}

// ends shows the worker's expiry in place of the pause if the expiry comes first.
func ends(r *control.WorkerRow, x *why.Expiry, st *worker.IdleStatus, now time.Time) {
	r.Expiry = x
	if x == nil || st != nil && (len(st.Blocks) == 0 || !x.Before(st.TargetPauseAt)) {
		return
	}
	r.TargetPauseAt = &x.At
	if x.At.Sub(now) > Soon {
		r.Sentence = x.Sentence(now) + " " + r.Sentence
		return
	}
	r.Standing, r.Sentence, r.Block, r.Attention = control.StandingPausingSoon, x.Sentence(now), "", true
}

// expiry returns the worker's expiry, computed from its record if it is not observed;
// nil for none.
func expiry(w *worker.Worker, st *worker.IdleStatus, now time.Time) *why.Expiry {
	if st == nil {
		return w.Ends(now, &policy.Resolved{}, halt.Halt{})
	}
	return st.Expiry
}

// lasting returns the first block that remains when the idle timeout has passed; nil
// if there is none.
func lasting(blocks []idle.Block) *idle.Block {
	for i := range blocks {
		switch blocks[i].Code {
		case idle.RecentActivity, idle.SignalActive, idle.SignalIncomplete, idle.NotIdleYet, idle.WarningPending:
		case idle.Budget:
			if !(idle.Verdict{Blocks: blocks}).Used() { // a worker in use is not shown as held by a budget
				return &blocks[i]
			}
		default:
			return &blocks[i]
		}
	}
	return nil
}

func find(blocks []idle.Block, codes ...idle.Code) *idle.Block {
	for i := range blocks {
		for _, c := range codes {
			if blocks[i].Code == c {
				return &blocks[i]
			}
		}
	}
	return nil
}

// actionable reports whether a block of an idle worker needs attention: no user
// requested it, and it does not end by itself.
func actionable(c idle.Code) bool {
	switch c {
	case idle.InSnoozePeriod, idle.LeaseHeld, idle.AutoPauseDisabled, idle.DetectionDisabled, idle.Schedule, idle.MinWorkers,
		idle.Cooldown, idle.Budget, idle.ConnectionOpen, idle.StatusNotRunning, idle.StopIntended, idle.Halted:
		return false
	}
	return true
}

// urgency returns how urgently a worker needs a user; higher comes first.
func urgency(r control.WorkerRow) int {
	switch {
	case r.Standing == control.StandingFailed:
		return 4
	case r.Status == string(power.WorkerUnknown):
		return 3
	case r.Standing == control.StandingUnknown:
		return 2
	case r.Attention:
		return 1
	}
	return 0
}
