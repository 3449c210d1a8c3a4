package controller

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
)

func asNotFound(err error) (*failure.NotFound, bool) { return errors.AsType[*failure.NotFound](err) }

// ours reports whether the instance carries this fleet's tag, which is required
// before lull acts on it. If the worker was armed by a user, the tag is added. An
// instance of another fleet is refused. If the result is false, the outcome is the
// job's.
func (j *job) ours(ctx context.Context, what string) (outcome, bool) {
	tag := j.s.TagPrefix + "managed-by"
	if j.inst == nil {
		return outcome{Result: Requeue}, false // the tags are part of the description
	}
	switch owner := j.inst.Tags[tag]; {
	case owner == j.c.fleet.ID():
		return outcome{}, true
	case owner != "":
		return j.note(ctx, "cannot "+what+" it: its tag "+tag+" says it belongs to "+owner), false
	case !j.w.Armed:
		return j.note(ctx, "cannot "+what+" it before it is armed: it does not carry this fleet's tag"), false
	}
	cloud, err := j.cloud()
	if err != nil || cloud.Tag == nil {
		return j.note(ctx, "cannot tag it as this fleet's"), false
	}
	call, cancel, err := j.sh.call(ctx)
	if err != nil {
		return outcome{Result: Requeue}, false
	}
	defer cancel()
	j.c.count.calls.add("tags")
	if err := cloud.Tag.CreateTags(call, []string{j.w.EC2InstanceID}, map[string]string{tag: j.c.fleet.ID()}); err != nil {
		return j.note(ctx, "cannot tag it as this fleet's: "+err.Error()), false
	}
	return outcome{}, true
}

// stopping sends the stop, and waits until EC2 reports stopped.
func (j *job) stopping(ctx context.Context) outcome {
	if j.w.EC2InstanceID == "" {
		return j.down(ctx)
	}
	if !j.fresh {
		return outcome{Result: Requeue}
	}
	switch j.seen {
	case "":
		return j.lost(ctx)
	case "stopped":
		if s := j.w.StartSentAt; s != nil && !j.shows(*s, time.Minute) {
			return outcome{Result: Requeue} // the withdrawn start may have preceded the stop
		}
		return j.down(ctx)
	case "stopping":
		if j.overdue(4 * j.s.ProvisioningTimeout) {
			return j.fail(ctx, "stop_failed", "EC2 still reports stopping after "+(4*j.s.ProvisioningTimeout).String())
		}
		return outcome{Result: Requeue}
	case "running":
		return j.stopRunning(ctx)
	case "pending":
		return outcome{Result: Retry}
	}
	if out, drifted := j.drift(ctx); drifted {
		return out
	}
	return outcome{Result: Retry}
}

// down confirms STOPPED.
func (j *job) down(ctx context.Context) outcome {
	err := j.writeBy(ctx, audit.ByController, false, func(w *worker.Worker, tx *worker.Tx) error {
		e := audit.Entry{Action: "stopped", Reason: string(w.PauseReason)}
		if w.Intent != nil && w.Intent.Drain {
			e.Action, e.Events = audit.Drained, []string{audit.EventDrained}
		}
		w.Status, w.StatusReason, w.EC2State = power.WorkerStopped, "", "stopped"
		w.Intent, w.Draining, w.MissingSince, w.CancelledStopAt = nil, false, nil, nil
		clearAddress(w)
		tx.Note(e)
		return nil
	})
	if err != nil {
		return j.failedWrite(err)
	}
	j.c.count.stopped.Add(1)
	j.endPause(ctx, "stopped", "")
	j.live = live{}
	j.concludeTag(ctx)
	return j.again()
}

// stopRunning decides how a stop continues while the instance still runs.
func (j *job) stopRunning(ctx context.Context) outcome {
	in := j.w.Intent
	sent := in != nil && in.SentAt != nil && !j.shows(*in.SentAt, 90*time.Second)
	switch {
	case in == nil:
		return j.startedOutside(ctx) // a stop outside lull was withdrawn
	case sent:
		return outcome{Result: Requeue} // wait until the call's effect is visible
	case in.By == worker.ByAgent.Name && j.w.DesiredStatus == power.WorkerStopped:
		if j.overdue(j.s.ProvisioningTimeout) {
			return j.refused(ctx, "its agent announced the stop and did not carry it out")
		}
		return outcome{Result: Requeue}
	case j.w.DesiredStatus == power.WorkerRunning:
		return j.callOff(ctx, nil, "resumed by "+j.w.StartBy)
	case in.Reason.Automatic() && j.c.fleet.Halted().On:
		return j.callOff(ctx, nil, "all automatic actions are halted")
	case in.Reason.Automatic() && j.shadow():
		return j.callOff(ctx, nil, "it is in dry-run mode")
	case in.Reason.Automatic() && in.Reason != power.ReasonTTL && j.rules().FrozenUntil != nil:
		return j.callOff(ctx, nil, "it is frozen")
	case j.overdue(2*j.s.ProvisioningTimeout) && in.SentAt != nil && in.Reason.Automatic():
		return j.refused(ctx, "not stopped within "+(2*j.s.ProvisioningTimeout).String())
	case j.overdue(2*j.s.ProvisioningTimeout) && in.SentAt != nil:
		return j.fail(ctx, "stop_failed", "not stopped within "+(2*j.s.ProvisioningTimeout).String()+": "+j.w.StatusReason)
	}
	if out, ok := j.ours(ctx, "stop"); !ok {
		return out
	}
	if out, wait := j.consult(ctx); wait {
		return out
	}
	if in.ByReadings() {
		if out, wait := j.freshLoad(); wait {
			return out
		}
	}
	var last evidence.Decision
	if in.ByReadings() || in.Reason == power.ReasonSchedule { // with force, a schedule's stop ignores readings but not decisions of users
		if last = j.finalCheck(ctx); !last.Verdict.Eligible {
			if out, again := j.repeats(last); again {
				return out
			}
			return j.callOff(ctx, &last, "the final check found it in use or could not read a signal")
		}
	}
	hibernate, why := j.hibernates(ctx)
	err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
		now := tx.Now
		w.Intent.SentAt, w.Intent.Hibernate = &now, hibernate
		if why != "" {
			action := worker.ActionStop
			if hibernate {
				action = worker.ActionHibernate
			}
			tx.Note(audit.Entry{Action: "pause_action_chosen", Reason: action, Detail: why})
		}
		w.Checked(j.activity().CheckedAt)
		if in.ByReadings() {
			j.activityInto(w) // what the final check saw is not late activity
		}
		return nil
	})
	if err != nil {
		return j.failedWrite(err)
	}
	if in.ByReadings() && (time.Since(last.Verdict.At) > FinalCheckAge || j.wantsAgent() && j.agent().age(time.Now()) > FinalCheckAge) {
		// The write took so long that the check is too old: cancel the stop.
		if err := j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error { w.Intent.SentAt = nil; return nil }); err != nil {
			return j.failedWrite(err)
		}
		return outcome{Result: Retry}
	}
	if in.ByReadings() {
		return j.sendStop(ctx, last.Verdict.At.Add(FinalCheckAge))
	}
	until, halted := j.unhalted(in.Reason)
	if halted {
		return outcome{Result: Retry} // the next turn calls the stop off
	}
	return j.sendStop(ctx, until)
}

// unhalted returns the time limit for sending a call that is not bounded by a
// reading, including retries; zero means no limit, for calls that a user requested.
// halted means that the call is automatic and must not be sent at all. The limit
// makes all automatic calls end within 5 s of a halt.
func (j *job) unhalted(r power.Reason) (until time.Time, halted bool) {
	if !r.Automatic() {
		return time.Time{}, false
	}
	return time.Now().Add(FinalCheckAge - time.Second), j.c.fleet.Halted().On
}

// hibernates reports whether the worker's stop should be a hibernation. If its past
// pauses decide that, it also returns the reason.
func (j *job) hibernates(ctx context.Context) (bool, string) {
	switch j.rules().PauseAction {
	case worker.ActionHibernate:
		return true, ""
	case worker.ActionAuto:
	default:
		return false, ""
	}
	pauses, err := j.f.PastPauses(ctx, j.w.ID)
	if err != nil {
		return false, "its history cannot be read: " + err.Error()
	}
	return worker.HibernatePays(pauses)
}

// shows reports whether the effect of an API call sent at sent should be visible by
// now: after d or, if a previous owner sent it, takeoverShows after that owner's
// calls must have ended.
func (j *job) shows(sent time.Time, d time.Duration) bool {
	return j.now.Sub(sent) >= d || sent.Before(j.sh.since) && j.now.Sub(j.sh.since) >= min(d, takeoverShows)
}

// sendStop calls StopInstances for a durable intent. The call and its retries end at
// until; zero means no limit.
func (j *job) sendStop(ctx context.Context, until time.Time) outcome {
	cloud, err := j.cloud()
	if err != nil {
		return j.note(ctx, err.Error())
	}
	call, cancel, err := j.sh.call(ctx)
	if err != nil {
		return outcome{Result: Requeue}
	}
	defer cancel()
	if !until.IsZero() {
		call, cancel = context.WithDeadline(call, until)
		defer cancel()
	}
	j.c.count.calls.add("stop")
	call, span := j.span(j.pausing(call), "ec2.stop")
	defer span.End()
	done, err := cloud.Move.Stop(call, j.w.EC2InstanceID, j.w.Intent.Hibernate)
	fault(span, err)
	switch k := KindOf(err); {
	case err == nil && done.Fallback != "" && done.Fallback != j.w.HibernateNote:
		if err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
			w.HibernateNote = done.Fallback
			tx.Note(audit.Entry{Action: "hibernate_fallback", Detail: done.Fallback})
			return nil
		}); err != nil {
			return j.failedWrite(err)
		}
		return outcome{Result: Requeue}
	case err == nil, k == IncorrectState, k == NotFound:
		return outcome{Result: Requeue} // the next observation shows the outcome
	case k == Protected || k == Unauthorized || k == Invalid:
		return j.refused(ctx, "EC2 refused the stop: "+err.Error())
	case k == Throttled:
		why := "cannot stop yet: " + err.Error()
		if err := j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error { w.Intent.SentAt, w.StatusReason = nil, why; return nil }); err != nil {
			return j.failedWrite(err)
		}
		return outcome{Result: Retry}
	}
	return outcome{Result: Retry} // it may have taken effect: the next listing shows that
}

// refused returns a worker to RUNNING after EC2 has refused its stop. The reason
// stays in the record until something else happens.
func (j *job) refused(ctx context.Context, why string) outcome {
	j.live.preflightAt = time.Time{} // the preflight may have missed the reason
	return j.calledOff(ctx, nil, why, func(w *worker.Worker) { w.Refused(why) })
}

// callOff returns a worker to RUNNING whose stop was withdrawn before it was carried
// out.
func (j *job) callOff(ctx context.Context, d *evidence.Decision, why string) outcome {
	return j.calledOff(ctx, d, why, func(*worker.Worker) {})
}

func (j *job) calledOff(ctx context.Context, d *evidence.Decision, why string, and func(*worker.Worker)) outcome {
	if d != nil && len(d.Verdict.Blocks) > 0 {
		codes := make([]string, len(d.Verdict.Blocks))
		for i, b := range d.Verdict.Blocks {
			codes[i] = string(b.Code)
		}
		why += " (" + strings.Join(codes, ", ") + ")"
	}
	err := j.writeBy(ctx, audit.ByController, false, func(w *worker.Worker, tx *worker.Tx) error {
		w.EC2State = j.state(w)
		if d != nil {
			j.activityInto(w)
		}
		if err := w.CallOff(tx, d, why); err != nil {
			return err
		}
		and(w)
		return nil
	})
	if err != nil {
		return j.failedWrite(err)
	}
	j.c.count.cancelled.Add(1)
	j.endPause(ctx, "called_off", why)
	return j.again()
}

// draining waits for running work to end.
func (j *job) draining(ctx context.Context) outcome {
	if out, drifted := j.drift(ctx); drifted {
		return out
	}
	in := j.w.Intent
	if in == nil {
		return j.callOff(ctx, nil, "the drain has no intent")
	}
	auto := in.Reason.Automatic()
	switch {
	case !in.Drain:
		return j.step(ctx, power.WorkerStopping, "", nil) // a user requested a stop during the drain: do not wait any longer
	case auto && j.c.fleet.Halted().On:
		return j.callOff(ctx, nil, "all automatic actions are halted")
	case auto && j.shadow():
		return j.callOff(ctx, nil, "it is in dry-run mode")
	}
	j.tellPlacers(ctx, true)
	j.countLabs(ctx)
	over := j.overdue(j.s.DrainTimeout)
	none := j.live.labs != nil && *j.live.labs == 0
	if auto && (over || none || j.now.Sub(j.live.fetchedAt) >= j.s.IdleDetectionInterval) {
		if out, wait := j.freshLoad(); wait {
			return out
		}
		if last := j.finalCheck(ctx); !last.Verdict.Eligible {
			j.tellPlacers(ctx, false)
			return j.callOff(ctx, &last, "a reading is active or unknown")
		}
	}
	if none || over {
		why := "nothing is running"
		if !none {
			why = "the drain timed out"
		}
		return j.step(ctx, power.WorkerStopping, why, func(w *worker.Worker, tx *worker.Tx) {
			tx.Note(audit.Entry{Action: "drain_ended", Detail: why})
		})
	}
	return outcome{Result: Requeue}
}

// tellPlacers sets or clears the tag that keeps new work away. The tag is advisory,
// so a failure does not delay the drain.
func (j *job) tellPlacers(ctx context.Context, on bool) {
	if j.live.tagged == on {
		return
	}
	cloud, err := j.cloud()
	if err != nil || cloud.Tag == nil {
		return
	}
	call, cancel, err := j.sh.call(ctx)
	if err != nil {
		return
	}
	defer cancel()
	value := "false"
	if on {
		value = "true"
	}
	j.c.count.calls.add("tags")
	if err := cloud.Tag.CreateTags(call, []string{j.w.EC2InstanceID}, map[string]string{j.s.TagPrefix + "draining": value}); err != nil {
		j.c.log.Warn("cannot tag a draining worker", "worker", j.w.ID, "err", err)
		return
	}
	j.live.tagged = on
}

// countLabs counts the running labs, at most once a minute. A count that cannot be
// read is unknown, not zero.
func (j *job) countLabs(ctx context.Context) {
	if j.now.Sub(j.live.labsAt) < time.Minute {
		return
	}
	j.live.labs, j.live.labsAt = nil, j.now
	console, err := j.c.cfg.Consoles(j.w)
	if err != nil {
		return
	}
	call, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if n, err := console.RunningLabs(call); err == nil {
		j.live.labs = &n
	}
}

// stopped handles starts, both requested ones and those outside lull, and the
// worker's expiry.
func (j *job) stopped(ctx context.Context) outcome {
	if !j.fresh {
		return outcome{Result: Requeue}
	}
	if out, done := j.adoptDeadline(ctx); done {
		return out
	}
	if j.seen == "stopped" && j.w.DesiredStatus == power.WorkerRunning {
		if st := j.rules().ScheduleState; j.w.ForSchedule() && st != nil && !st.Open {
			return j.withdraw(ctx)
		}
		if wait := restartBackoff(j.w.Restarts) - j.now.Sub(j.w.StatusSince); j.w.StartOrigin == worker.OriginAuto && wait > 0 {
			return outcome{Requeue, j.now.Add(wait)}
		}
		if code, why := j.noStart(); code != "" {
			return j.held(ctx, code, why, j.now.Add(j.s.ReconcileInterval))
		}
		return j.takeStart(ctx)
	}
	if out, drifted := j.drift(ctx); drifted {
		return out
	}
	out, ended, end := j.ends(ctx)
	if ended {
		return out
	}
	out, started, next := j.opens(ctx)
	if started {
		return out
	}
	if next.IsZero() || !end.IsZero() && end.Before(next) {
		next = end
	}
	return outcome{Success, next}
}

// withdraw cancels a start requested by a schedule that has closed since.
func (j *job) withdraw(ctx context.Context) outcome {
	w, err := j.f.ScheduleWithdraws(ctx, j.w.ID, j.w.Revision())
	if err != nil {
		return j.failedWrite(err)
	}
	j.took(w)
	return outcome{Requeue, time.Now().Add(debounce)}
}

// noStart returns what prevents an automatic start from being sent, or "". Nothing
// prevents a user's start.
func (j *job) noStart() (code, why string) {
	switch {
	case j.w.StartOrigin != worker.OriginAuto:
		return "", ""
	case j.c.fleet.Halted().On:
		return "halted", "all automatic actions are halted"
	case j.shadow():
		return string(idle.Shadow), "it is in dry-run mode"
	}
	return "", ""
}

// restartBackoff returns how long a worker stays down after the cloud stopped it.
func restartBackoff(restarts int) time.Duration {
	if restarts <= 0 {
		return 0
	}
	return min(10*time.Second<<min(restarts, 10), 30*time.Minute)
}

// terminating sends the termination and waits for it. If a launch may have been sent,
// it looks for the resulting instance first.
func (j *job) terminating(ctx context.Context) outcome {
	if j.w.EC2InstanceID == "" {
		return j.terminatePending(ctx)
	}
	if !j.fresh {
		return j.unobserved(ctx)
	}
	switch j.seen {
	case "":
		return j.lost(ctx)
	case "terminated":
		return j.endGone(ctx, "")
	case "shutting-down":
		return outcome{Result: Requeue}
	}
	switch auto := j.w.TerminateFor.Automatic(); {
	case auto && j.c.fleet.Halted().On:
		return j.note(ctx, "not terminated: all automatic actions are halted")
	case auto && j.shadow():
		return j.note(ctx, "not terminated: it is in dry-run mode")
	}
	if out, ok := j.ours(ctx, "terminate"); !ok {
		return out
	}
	if out, wait := j.giveBack(ctx); wait {
		return out
	}
	cloud, err := j.cloud()
	if err != nil {
		return j.note(ctx, err.Error())
	}
	until, halted := j.unhalted(j.w.TerminateFor)
	if halted {
		return outcome{Result: Retry}
	}
	call, cancel, err := j.sh.call(ctx)
	if err != nil {
		return outcome{Result: Requeue}
	}
	defer cancel()
	if !until.IsZero() {
		call, cancel = context.WithDeadline(call, until)
		defer cancel()
	}
	j.c.count.calls.add("terminate")
	err = cloud.Move.Terminate(call, j.w.EC2InstanceID)
	switch k := KindOf(err); {
	case err == nil, k == IncorrectState, k == NotFound:
		return outcome{Result: Requeue}
	case k == Protected || hopeless(k):
		return j.fail(ctx, "terminate_failed", "EC2 refused the termination: "+err.Error())
	}
	return j.note(ctx, "cannot terminate yet: "+err.Error())
}

// terminatePending ends a worker that has no instance on record.
func (j *job) terminatePending(ctx context.Context) outcome {
	if j.w.Launch == nil || j.w.Launch.SentAt == nil {
		return j.endGone(ctx, "")
	}
	cloud, err := j.cloud()
	if err != nil {
		return j.note(ctx, err.Error())
	}
	in, ok, err := j.findLaunch(ctx, cloud)
	switch {
	case err != nil:
		return j.note(ctx, "cannot look for an earlier launch: "+err.Error())
	case ok:
		err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
			w.EC2InstanceID, w.EC2State, w.MissingSince = in.ID, in.State, nil
			tx.Note(audit.Entry{Action: "adopted", Detail: in.ID})
			return nil
		})
		if err != nil {
			return j.failedWrite(err)
		}
		return outcome{Result: Requeue}
	}
	j.gone, j.seenAt = true, j.now
	return j.lost(ctx) // lost asks twice, because a launch may still take effect
}

// failed waits for a user or the worker's expiry, and records what happens to its
// instance meanwhile.
func (j *job) failed(ctx context.Context) outcome {
	if j.w.EC2InstanceID == "" {
		return outcome{Result: Skip}
	}
	if out, drifted := j.drift(ctx); drifted {
		return out
	}
	if out, done := j.adoptDeadline(ctx); done {
		return out
	}
	if j.expiry() == nil {
		return outcome{Result: Success}
	}
	if !j.fresh {
		return outcome{Result: Requeue}
	}
	if out, ended := j.ttl(ctx); ended {
		return out
	}
	next := j.nextTTL()
	if next.IsZero() {
		next = j.now.Add(j.s.ReconcileInterval)
	}
	return outcome{Success, next}
}

// unknown waits until EC2 reports a state that lull knows.
func (j *job) unknown(ctx context.Context) outcome {
	if !j.fresh {
		return j.unobserved(ctx)
	}
	if j.w.Imported && j.w.EC2State == "" && j.seen == "stopped" {
		return j.step(ctx, power.WorkerStopped, "", func(w *worker.Worker, tx *worker.Tx) {
			if w.StartAskedAt == nil { // otherwise another start was requested before the first check
				w.DesiredStatus = power.WorkerStopped
			}
			if j.inst != nil {
				w.TakeTags(j.inst.Tags, j.s.TagPrefix)
			}
		})
	}
	if out, drifted := j.drift(ctx); drifted {
		return out
	}
	if j.overdue(j.s.ProvisioningTimeout) {
		return j.fail(ctx, "state_unknown", "EC2 reports state "+j.seen)
	}
	return outcome{Result: Requeue}
}

// accepted returns a block for each finding of the preflight checks that the policy
// does not accept as a risk.
func accepted(r *policy.Resolved, l live) []idle.Block {
	var blocks []idle.Block
	unaccepted := func(code string) bool { return !slices.Contains(r.AcceptedRisks, code) }
	if l.preflightErr != "" && (len(l.unchecked) == 0 || slices.ContainsFunc(l.unchecked, unaccepted)) {
		blocks = append(blocks, idle.Block{Code: idle.SignalUnknown, Signal: "preflight",
			Sentence: "The preflight checks for a stop cannot be read: " + l.preflightErr + "."})
	}
	for _, code := range l.preflight {
		if unaccepted(code) {
			blocks = append(blocks, idle.Block{Code: idle.Code(code), Sentence: riskSentence[code]})
		}
	}
	return blocks
}

var riskSentence = map[string]string{
	worker.RiskInstanceStore: "It has instance-store volumes, which lose their content in a stop.",
	worker.RiskNoElasticIP:   "Its public address is not an Elastic IP and would change.",
	worker.RiskASGMember:     "It belongs to an Auto Scaling group, which would replace it.",
	worker.RiskSpot:          "It is a Spot instance.",
	worker.RiskStopProtected: "It is protected against being stopped.",
}
