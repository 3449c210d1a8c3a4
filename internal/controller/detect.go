package controller

import (
	"cmp"
	"context"
	"errors"
	"hash/fnv"
	"math"
	"runtime/pprof"
	"slices"
	"time"

	"go.opentelemetry.io/otel/codes"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
)

// cpuActive is the load in percent from which cloudwatch, as an activity
// source, is active. The agent has the same threshold.
const cpuActive = 5

// rules returns the effective policy of the worker now, from cached data.
func (j *job) rules() *policy.Resolved {
	r := j.c.rulesOf(time.Now(), &j.w)
	return &r
}

func (c *Controller) rulesOf(now time.Time, w *worker.Worker) policy.Resolved {
	return c.fleet.PolicyWith(now, w, c.template(w))
}

func (c *Controller) template(w *worker.Worker) *launch.Template {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t, ok := c.tmpls[w.TemplateName]; ok {
		return &t
	}
	return nil
}

// shadow reports whether decisions about the worker are only recorded (dry
// run).
func (j *job) shadow() bool { return j.c.cfg.Shadow || !j.w.Armed || j.rules().Shadow }

// detects reports whether the worker is checked at all: for its idleness, or
// for a schedule that pauses it.
func (j *job) detects() bool { return j.w.IsIdleDetectionEnabled || j.rules().ScheduleState != nil }

// detectDue reports whether the worker's next check is due. If no check was ever
// planned, the worker is assigned its own point of the interval.
func (j *job) detectDue() bool {
	if len(j.ask) > 0 {
		return false // the check that a request causes is made by answer
	}
	if !j.detects() {
		return false
	}
	if j.live.nextCheck.IsZero() {
		at := j.now.Add(spread(j.w.ID, j.s.IdleDetectionInterval))
		if n := j.w.NextIdleCheckAt; n != nil && n.After(j.now) && n.Before(j.now.Add(j.s.WorkerActivityDetectionInterval)) {
			at = *n
		}
		j.live.nextCheck = at
	}
	if l := j.loadSeen(); l != nil && l.end().After(j.live.loadEnd) && j.wantsLoad() {
		return true
	}
	return !j.now.Before(j.live.nextCheck)
}

// spread maps a worker to a fixed point of an interval, so that workers do not act in
// step.
func spread(id string, d time.Duration) time.Duration {
	h := fnv.New32a()
	h.Write([]byte(id))
	return time.Duration(float64(d) * float64(h.Sum32()) / (math.MaxUint32 + 1.0))
}

// detect runs one idle check in four steps: read, update, judge, arbitrate. Each may
// fail without preventing the others. The error is the store's; all other failures
// are in the result.
func (j *job) detect(ctx context.Context, force bool) (worker.DetectResult, error) {
	j.c.count.detections.Add(1)
	ctx, span := j.span(ctx, "worker.detect")
	defer span.End()
	r := worker.DetectResult{WorkerID: j.w.ID, CheckedAt: time.Now().UTC(), Action: worker.ActNothing, Blocks: []idle.Block{}}
	if l := j.loadSeen(); l != nil {
		j.live.loadEnd = l.end()
	}
	j.fetch(ctx, force)
	if ctx.Err() != nil {
		r.Error = "the check was canceled"
		return r, nil
	}
	// An automatic pause needs a fresh reading, so repeat step 1 right before it.
	if d := j.judge(); d.Verdict.Eligible && j.wantsCML() && !j.live.fetchedAt.After(j.now) {
		j.fetch(ctx, true)
	}
	r.TelemetryFetched = j.live.cml.State == idle.Quiet || j.live.cml.State == idle.Active || !j.wantsCML()
	if a := j.agent().readings(time.Now())[0]; j.wantsAgent() && !j.wantsCML() {
		r.TelemetryFetched = a.State == idle.Quiet || a.State == idle.Active
	}
	if !r.TelemetryFetched {
		r.Error, r.TelemetryUnknownWhy = "telemetry is unknown: "+j.live.cml.Detail, j.live.cml.Detail
	}
	// Step 2: update activity.
	if err := j.update(ctx); err != nil {
		r.Error = "cannot update the activity: " + err.Error()
		return r, err
	}
	r.ActivityUpdated = r.TelemetryFetched
	// Step 3: judge.
	d := j.judge()
	must := d.Verdict.Eligible || d.Verdict.WarnDue || j.live.preflightErr != "" || len(j.live.preflight) > 0
	if must || j.near(d.Verdict) {
		j.preflight(ctx, must)
		d = j.judge()
	}
	r.Fill(d.Verdict)
	if d.Verdict.Has(idle.SignalUnknown) {
		j.c.count.unknown.Add(1)
	}
	// Step 4: pass the decision to the arbiter, if it can change anything.
	d, err := j.arbitrate(ctx, d, &r)
	j.plan(d.Verdict)
	j.record(d, j.live.nextCheck)
	j.say(&j.live.line, "decision", d, r.Guard, j.live.nextCheck)
	j.traceCheck(span, d, &r)
	j.notice(ctx)
	if err == nil {
		err = j.alarm(ctx, d)
	}
	return r, err
}

func (j *job) wantsAgent() bool {
	return slices.Contains(j.rules().ActivitySources, worker.SourceAgent)
}

func (j *job) wantsLoad() bool {
	return slices.Contains(j.rules().ActivitySources, worker.SourceCloudWatch)
}

func (j *job) wantsCML() bool { return slices.Contains(j.rules().ActivitySources, worker.SourceCML) }

// far reports whether the pause is so far away that telemetry may be fetched at
// the longer interval.
func (j *job) far() bool {
	v := j.live.verdict
	return v != nil && v.TargetPauseAt != nil && v.TargetPauseAt.Sub(j.now) > j.s.WorkerActivityDetectionInterval
}

// interval returns the minimum time between two fetches of the worker's
// telemetry.
func (j *job) interval() time.Duration {
	if j.far() {
		return j.s.WorkerActivityDetectionInterval
	}
	return time.Duration(j.rules().CheckInterval)
}

// near reports whether the pause of the worker is close enough for its preflight
// checks: those of a large fleet take minutes, so they begin before it is due.
func (j *job) near(v idle.Verdict) bool {
	t := v.TargetPauseAt
	return t != nil && t.Sub(v.At) <= j.s.WorkerActivityDetectionInterval
}

// Times of repeated reads of CML.
const (
	fetchRetry = 5 * time.Second // doubled with each failure
	// lookWait is for how long a stop's final check is repeated while only CML's
	// answer is missing; then the stop is called off.
	lookWait = 2 * time.Minute
)

// fetchAfter returns the minimum time from the last fetch to the next. After a
// failure the next fetch comes sooner than the interval; if the worker would
// otherwise be paused, several times within the interval.
func (j *job) fetchAfter() time.Duration {
	every := j.interval()
	if j.live.failed == 0 {
		return every
	}
	if v := j.live.verdict; v != nil && v.IsIdle { // only the reading is missing
		every = max(fetchRetry, time.Duration(j.rules().CheckInterval)/6)
	}
	return min(every, fetchRetry<<min(j.live.failed-1, 10))
}

// fetch reads telemetry unless the last reading is young enough.
func (j *job) fetch(ctx context.Context, force bool) {
	if !j.wantsCML() {
		return
	}
	now := time.Now()
	if !j.s.WorkerActivityDetectionEnabled {
		j.live.cml = idle.NotKnown(worker.SourceCML, now, "activity detection is switched off")
		return
	}
	every := j.interval()
	if !force && now.Sub(j.live.fetchedAt) < j.fetchAfter() {
		return
	}
	console, err := j.c.cfg.Consoles(j.w)
	if err != nil {
		j.live.cml = idle.NotKnown(worker.SourceCML, now, err.Error())
		j.live.fetchedAt = now
		return
	}
	var t worker.Telemetry
	ctx, span := j.span(ctx, "telemetry.fetch")
	defer span.End()
	pprof.Do(ctx, pprof.Labels("part", "telemetry"), func(ctx context.Context) { t = console.Telemetry(ctx, j.live.seen) })
	if ctx.Err() != nil {
		return
	}
	j.live.seen, j.live.telemetry, j.live.fetchedAt = t.Seen, t, time.Now()
	j.c.count.future.Add(t.Future)
	j.c.count.malformed.Add(t.Malformed)
	// CML reports events, not levels: the time of use is that of the newest event.
	r := idle.Reading{Signal: worker.SourceCML, State: idle.Quiet, At: t.CheckedAt, LastEvent: t.Newest, MaxAge: idle.Duration(2 * every)}
	if t.CheckedAt.IsZero() {
		r.At = time.Now()
	}
	j.live.failed++
	if t.Unknown != "" {
		r.State, r.Detail = idle.Unknown, t.Unknown
		span.SetStatus(codes.Error, t.Unknown)
	} else {
		j.live.failed = 0
	}
	j.live.cml = r
}

// readings returns the readings of the worker's sources.
func (j *job) readings() []idle.Reading {
	now := time.Now()
	var out []idle.Reading
	rules := j.rules()
	for _, s := range rules.ActivitySources {
		r := idle.NotKnown(s, now, "it was not read yet")
		switch s {
		case worker.SourceCML:
			if j.live.cml.Signal != "" {
				r = j.live.cml
			}
		case worker.SourceAgent:
			out = append(out, j.agent().readings(now)...)
			continue
		case worker.SourceCloudWatch:
			r = j.load(rules)
		}
		out = append(out, r)
	}
	return out
}

// load returns CloudWatch's reading of the worker's CPU usage.
func (j *job) load(rules *policy.Resolved) idle.Reading {
	r := idle.NotKnown(worker.SourceCloudWatch, time.Now(), "it was not read yet")
	switch l := j.loadSeen(); {
	case l == nil:
	case len(l.Windows) > 0:
		return l.reading(cmp.Or(rules.Thresholds["cpu"], cpuActive))
	case l.Err != nil:
		r.Detail = l.Err.Error()
	default:
		r.Detail = "CloudWatch has no data"
	}
	return r
}

// guards returns the blocks that come neither from the record nor from the
// pool.
func (j *job) guards() []idle.Block {
	var out []idle.Block
	if j.c.cfg.Guards != nil {
		out = j.c.cfg.Guards(&j.w, time.Now())
	}
	rules := j.rules()
	out = append(out, accepted(rules, j.live)...)
	out = append(out, j.agent().holds()...)
	return append(out, worker.Standstill(&j.w, rules, j.c.fleet.Halted(), j.c.cfg.Shadow)...)
}

// judge asks the engine for a decision on the present data.
func (j *job) judge() evidence.Decision {
	j.live.readings = j.readings()
	return j.engineCase().Judge().Decision
}

// engineCase returns the engine's input for the worker, with the present readings.
func (j *job) engineCase() worker.Case {
	now := time.Now()
	return worker.Case{Now: now, Worker: &j.w, Rules: j.rules(), Readings: j.live.readings, Guards: j.guards(),
		Budget: j.c.fleet.StopBudget(now, &j.w), ScaleDown: j.s.ScaleDownEnabled}
}

// activity returns the newest activity of all sources, including CML's events.
func (j *job) activity() worker.Telemetry {
	t := j.live.telemetry
	if j.live.fetchedAt.IsZero() {
		t = worker.Telemetry{}
	}
	if a := j.agent(); a != nil && j.wantsAgent() {
		if t.CheckedAt.IsZero() || a.at.After(t.CheckedAt) {
			t.CheckedAt = a.at
		}
		if use := a.when(a.r.LastUse); use.After(t.Newest) {
			t.Newest = use
		}
	}
	if r := j.load(j.rules()); j.wantsLoad() && r.State != idle.Unknown {
		if r.At.After(t.CheckedAt) {
			t.CheckedAt = r.At
		}
		if at := r.ActivityAt(); at.After(t.Newest) {
			t.Newest = at
		}
	}
	return t
}

// update writes new activity into the record.
func (j *job) update(ctx context.Context) error {
	t := j.activity()
	if t.CheckedAt.IsZero() {
		return nil
	}
	late := j.late(t)
	j.wouldBeFalse(t.Newest)
	ctx, span := j.span(ctx, "activity.update")
	defer span.End()
	u := worker.ActivityUpdate{Telemetry: t, Late: late}
	if v := j.live.verdict; v != nil {
		u.Check, u.Target = &j.live.nextCheck, v.TargetPauseAt
	}
	w, err := j.f.UpdateWorkerActivity(ctx, j.w.ID, j.w.Revision(), u, WriteChecks)
	if err != nil {
		return err
	}
	if late > 0 {
		j.c.count.lateActivity.Add(1)
		j.c.measure.lateness.Observe(late.Seconds())
		j.c.log.Warn("activity that would have prevented a pause was reported only after it", "worker", j.w.ID, "activity", t.Newest, "paused", *j.w.LastPausedAt, "delay", late)
	}
	j.took(w)
	return nil
}

// late returns how late the newest activity was reported, if it came too late: the
// last pause was based on readings, was carried out, and would not have happened had
// that activity been known. Otherwise it returns 0.
func (j *job) late(t worker.Telemetry) time.Duration {
	w := &j.w
	paused, resumed := w.LastPausedAt, w.LastResumedAt
	switch {
	case t.Newest.IsZero() || paused == nil || resumed == nil || !resumed.After(*paused) || !w.PauseReason.ByIdleness():
		return 0
	case !t.Newest.Before(*resumed) || paused.Sub(t.Newest) >= time.Duration(j.rules().Timeout):
		return 0
	case w.LastActivityAt != nil && t.Newest.Sub(*w.LastActivityAt) <= worker.Jitter:
		return 0 // already known at that time
	}
	return max(t.CheckedAt.Sub(t.Newest), time.Nanosecond)
}

// activityInto does what update does, as part of another change of the record.
func (j *job) activityInto(w *worker.Worker) {
	t := j.activity()
	w.Checked(t.CheckedAt)
	if at := t.Newest.UTC().Round(0); !t.Newest.IsZero() && (w.LastActivityAt == nil || at.Sub(*w.LastActivityAt) > worker.Jitter) {
		w.LastActivityAt = &at
		if t.Recent != nil {
			w.RecentActivityEvents = t.Recent[:min(len(t.Recent), j.s.WorkerActivityEventsMaxStored)]
		}
	}
}

// preflight runs the preflight checks of a stop and keeps their result for an hour.
// If the pause is due, a check that could not be made blocks it and is retried in the
// worker's next check.
func (j *job) preflight(ctx context.Context, due bool) {
	cloud, err := j.cloud()
	if err != nil || cloud.Check == nil || j.now.Sub(j.live.preflightAt) < time.Hour {
		return
	}
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	j.c.count.calls.add("preflight")
	found, err := cloud.Check.Preflight(call, j.w.EC2InstanceID)
	if err != nil && !due {
		return
	}
	j.live.preflight, j.live.preflightErr, j.live.unchecked = found, "", nil
	if part, ok := errors.AsType[*UncheckedRisks](err); ok {
		j.live.unchecked = part.Codes
	}
	if err != nil {
		j.live.preflightErr = err.Error()
		return
	}
	j.live.preflightAt = j.now
}

// arbitrate passes a verdict to the arbiter if the arbiter could change something:
// the worker is eligible, a warning is due, or the guard has changed. If the pool
// keeps the worker running, the returned decision includes the pool's guard.
func (j *job) arbitrate(ctx context.Context, d evidence.Decision, r *worker.DetectResult) (evidence.Decision, error) {
	limits := worker.Limits{ScaleDown: j.s.ScaleDownEnabled, Up: math.MaxInt, Intended: j.w.Intent != nil}
	_, guard := worker.Arbitrate(d.Verdict.At, d.Verdict, limits)
	shadowed := len(d.Verdict.Blocks) == 1 && d.Verdict.Blocks[0].Code == idle.Shadow
	expected := guard
	if shadowed {
		expected = "shadow"
		j.c.count.wouldPause.Add(1)
		if j.live.wouldAt.IsZero() {
			j.live.wouldAt = d.Verdict.At
		}
		r.WouldHavePaused = true
	}
	if !d.Verdict.Eligible && !(d.Verdict.WarnDue && !d.Verdict.Has(idle.Shadow)) && expected == j.w.LastGuard {
		if guard != "" {
			j.c.count.skipped.add(guard)
		}
		r.Guard = guard
		return d, nil
	}
	ctx, span := j.span(ctx, "settle")
	defer span.End()
	guards := slices.DeleteFunc(j.guards(), func(b idle.Block) bool { return b.Code == idle.Shadow || b.Code == idle.Halted })
	end := j.writes()
	out, err := j.f.Decide(ctx, j.w.ID, worker.Judgement{
		At: j.w.Revision(), Now: time.Now(), Readings: j.live.readings, Guards: guards, Shadow: j.c.cfg.Shadow,
		Rules: func(w *worker.Worker) policy.Resolved { return j.c.rulesOf(time.Now(), w) },
	})
	if err == nil {
		j.took(out.Worker)
	}
	end()
	if err != nil {
		r.Error = "cannot record the decision: " + err.Error()
		return d, err
	}
	r.Action, r.Guard = out.Action, out.Guard
	r.Fill(out.Decision.Verdict)
	if out.Guard != "" {
		j.c.count.skipped.add(out.Guard)
	}
	switch out.Action {
	case worker.ActPause, worker.ActDrain:
		r.AutoPauseTriggered = true
		j.c.count.autoPause.Add(1)
		if out.Action == worker.ActDrain {
			j.c.count.drains.Add(1)
		}
	}
	return out.Decision, nil
}

// plan schedules the next check of the worker: at the longer interval while the
// pause is far away, and never later than the warning or the pause.
func (j *job) plan(v idle.Verdict) {
	j.idled(v)
	j.live.verdict, j.live.checkedAt = &v, v.At
	every := j.interval()
	next := v.At.Add(time.Duration(j.rules().CheckInterval))
	if j.far() {
		next = v.At.Add(every)
		if near := v.TargetPauseAt.Add(-j.s.WorkerActivityDetectionInterval); near.Before(next) && near.After(v.At.Add(j.s.IdleDetectionInterval)) {
			next = near
		}
	}
	for _, t := range []*time.Time{v.WarnAt, v.TargetPauseAt} {
		if t != nil && t.After(v.At) && t.Before(next) {
			next = *t
		}
	}
	if j.w.WarningSentAt != nil {
		if t := j.w.WarningSentAt.Add(time.Duration(j.rules().WarnBefore)); t.After(v.At) && t.Before(next) {
			next = t
		}
	}
	if due := j.live.fetchedAt.Add(j.fetchAfter()); j.wantsCML() && j.s.WorkerActivityDetectionEnabled && due.Before(next) {
		next = due
		if soon := v.At.Add(time.Second); next.Before(soon) {
			next = soon
		}
	}
	if soon := v.At.Add(j.s.ReconcileInterval); j.live.preflightErr != "" && soon.Before(next) {
		next = soon
	}
	j.live.nextCheck = next
	if j.live.cml.MaxAge > 0 {
		// The reading is valid until the next check reads CML again, and for as long
		// after that as the check may be late.
		j.live.cml.MaxAge = idle.Duration(max(2*every, next.Sub(j.live.cml.At)+every))
		j.live.readings = j.readings()
	}
}

// record writes the evidence. next is when the worker is checked again.
func (j *job) record(d evidence.Decision, next time.Time) {
	if j.c.cfg.Journal == nil {
		return
	}
	r := evidence.Record{At: d.Verdict.At, Object: j.w.ID, Region: j.w.AWSRegion, Next: next.UTC().Round(0), Decision: d}
	for _, e := range slices.Backward(j.live.telemetry.Recent) { // oldest first
		if at := e.Timestamp.UTC().Round(0); at.Sub(j.live.told) > worker.Jitter && !at.After(r.At) {
			r.Activity, j.live.told = append(r.Activity, at), at
		}
	}
	j.c.cfg.Journal(r)
}

// alarm raises an alert when a signal becomes unknown, because an unknown must never
// be silent. A worker that has just started is exempt until its CML has had time to
// boot.
func (j *job) alarm(ctx context.Context, d evidence.Decision) error {
	i := slices.IndexFunc(d.Verdict.Blocks, func(b idle.Block) bool { return b.Code == idle.SignalUnknown })
	booting := j.w.RunningSince != nil && j.now.Sub(*j.w.RunningSince) < j.s.ProvisioningTimeout
	raised := j.live.unknown
	j.live.unknown = i >= 0 && (raised || !booting)
	if raised || !j.live.unknown {
		return nil
	}
	why := d.Verdict.Blocks[i].Sentence
	j.c.log.Warn("a signal is not known; the worker is not paused", "worker", j.w.ID, "why", why)
	return j.write(ctx, func(_ *worker.Worker, tx *worker.Tx) error {
		tx.Note(audit.Entry{Action: "signal_unknown", Events: []string{audit.EventUnknownSignal}, Detail: why, Decision: &d})
		return nil
	})
}

// finalCheck judges a pause based on readings for the last time before it is sent. It
// reads CML again; freshLoad and consult have already refreshed CloudWatch and the
// agent. Blocks that apply only before a pause starts, such as a pending warning, are
// ignored.
func (j *job) finalCheck(ctx context.Context) evidence.Decision {
	ctx, span := j.span(j.pausing(ctx), "final_look")
	defer span.End()
	j.fetch(ctx, true)
	j.live.readings = j.readings()
	if l := j.loadSeen(); j.wantsLoad() && !l.freshAt(time.Now()) {
		for i := range j.live.readings {
			if r := &j.live.readings[i]; r.Signal == worker.SourceCloudWatch {
				*r = idle.NotKnown(r.Signal, time.Now(), "CloudWatch could not be read for the final check")
			}
		}
	}
	d := j.engineCase().FinalCheck(j.w.Intent.Reason)
	traceVerdict(span, d)
	next := d.Verdict.At.Add(j.s.ReconcileInterval)
	j.say(&j.live.looked, "final check", d, "", next)
	j.record(d, next)
	return d
}

// repeats reports whether the final check of a stop should be repeated shortly: only
// CML's answer is missing, and the worker has been STOPPING for less than lookWait.
func (j *job) repeats(d evidence.Decision) (outcome, bool) {
	now, blocks := time.Now(), d.Verdict.Blocks
	if len(blocks) == 0 || now.Sub(j.w.StatusSince) > lookWait || slices.ContainsFunc(blocks, func(b idle.Block) bool {
		return b.Code != idle.SignalUnknown || b.Signal != worker.SourceCML
	}) {
		return outcome{}, false
	}
	return outcome{Requeue, now.Add(jitter(fetchRetry))}, true
}

// overtaken answers a request that was made while another check was in progress. If
// that check decided on a pause, its result is the answer.
func (j *job) overtaken(r *fleet.Request) bool {
	in, v := j.w.Intent, j.live.verdict
	if in == nil || v == nil || !in.ByReadings() || in.At.Before(r.At) {
		return false
	}
	r.Detect = &worker.DetectResult{WorkerID: j.w.ID, CheckedAt: v.At, TelemetryFetched: true, ActivityUpdated: true, AutoPauseTriggered: true, Action: worker.ActPause}
	if in.Drain {
		r.Detect.Action = worker.ActDrain
	}
	r.Detect.Fill(*v)
	return true
}

// answerWithin is the time limit for writing an answer.
const answerWithin = 10 * time.Second

// answer carries out the requests that wait for the worker's owner. It reads the
// record again first: a request may follow changes by the same author that the watch
// has not delivered yet.
func (j *job) answer(ctx context.Context) {
	if len(j.ask) == 0 {
		return
	}
	if w, err := j.f.Worker(ctx, j.w.ID); err == nil && w.Revision() > j.w.Revision() {
		j.took(w)
	}
	for _, r := range j.ask {
		switch {
		case ctx.Err() != nil:
			j.c.mu.Lock()
			j.c.waiting[r.WorkerID] = append(j.c.waiting[r.WorkerID], r)
			j.c.kick(j.e, time.Now().Add(debounce))
			j.c.mu.Unlock()
			continue
		case r.Kind == fleet.RequestDetect && j.overtaken(&r):
		case r.Kind == fleet.RequestDetect && j.w.Status != power.WorkerRunning:
			r.Error = "it is " + string(j.w.Status) + ", not RUNNING"
		case r.Kind == fleet.RequestDetect:
			d, err := j.detect(ctx, r.Force)
			for try := 0; errors.Is(err, fleet.ErrStale) && try < 3; try++ {
				// The record was changed elsewhere: answer from the newer one.
				if w, reread := j.f.Worker(ctx, j.w.ID); reread == nil {
					j.took(w)
				}
				d, err = j.detect(ctx, false)
			}
			r.Detect = &d
			if err != nil {
				r.Error = err.Error()
			}
		}
		// What was done must be answered even if the job has been canceled meanwhile.
		bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerWithin)
		if err := j.f.Answer(bound, r); err != nil {
			j.c.log.Warn("cannot answer a request", "request", r.ID, "err", err)
		}
		cancel()
	}
}
