package controller

import (
	"context"
	"runtime/pprof"
	"time"

	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
)

// runningSteps executes the steps for a RUNNING worker in their order.
func (j *job) runningSteps(ctx context.Context) outcome {
	// Step 1: the desired status.
	if j.w.DesiredStatus == power.WorkerStopped {
		j.notice(ctx) // while CML can still be asked
		if in := j.w.Intent; in != nil && in.Reason.Automatic() && j.c.fleet.Halted().On {
			return j.callOff(ctx, nil, "all automatic actions are halted")
		}
		return j.step(ctx, power.WorkerStopping, "", nil)
	}
	// Step 2: EC2's state.
	if out, drifted := j.drift(ctx); drifted {
		return out
	}
	if !j.fresh {
		return outcome{Result: Requeue}
	}
	if out, done := j.addresses(ctx); done {
		return out
	}
	// Step 3: metrics.
	j.collect(ctx)
	if out, done := j.learnSystem(ctx); done {
		return out
	}
	// Step 4: the license.
	if out, done := j.learnLicense(ctx); done {
		return out
	}
	if out, done := j.license(ctx); done {
		return out
	}
	// The expiry does not depend on idleness or any reading.
	if out, done := j.adoptDeadline(ctx); done {
		return out
	}
	if out, done := j.ttl(ctx); done {
		return out
	}
	if out, done := j.detectSources(ctx); done {
		return out
	}
	// Steps 5 and 6: detect activity and pass the verdict to the arbiter.
	if j.detectDue() {
		if _, err := j.detect(ctx, false); err != nil {
			return j.failedWrite(err)
		}
	}
	j.notice(ctx)
	if ctx.Err() != nil {
		return outcome{Result: Requeue, Next: time.Now().Add(debounce)}
	}
	if j.w.DesiredStatus != power.WorkerRunning || j.w.Status != power.WorkerRunning {
		return j.again()
	}
	return outcome{Success, j.next()}
}

// next returns when a RUNNING worker is next due because of a timer.
func (j *job) next() time.Time {
	at := j.live.nextLoad
	if j.detects() && !j.live.nextCheck.IsZero() && (at.IsZero() || j.live.nextCheck.Before(at)) {
		at = j.live.nextCheck
	}
	if t := j.nextTTL(); !t.IsZero() && t.Before(at) {
		at = t
	}
	if j.w.License.PendingOperation != "" {
		at = j.now.Add(10 * time.Second)
	}
	if t := j.live.noticeAt; j.w.CMLNotice != nil && t.After(j.now) && t.Before(at) {
		at = t
	}
	if t := j.live.nextProbe; j.w.DetectSources && !t.IsZero() && t.Before(at) {
		at = t
	}
	if t := j.live.readyAt; !j.live.resumeAsked.IsZero() && t.Before(at) {
		at = t
	}
	if least := time.Now().Add(100 * time.Millisecond); at.Before(least) {
		at = least
	}
	return at
}

// addresses records addresses that changed while the worker ran.
func (j *job) addresses(ctx context.Context) (outcome, bool) {
	in := j.inst
	if in == nil || in.PrivateIP == "" || in.PrivateIP == j.w.PrivateIP && in.PublicIP == j.w.PublicIP && j.w.EC2State == "running" {
		return outcome{}, false
	}
	err := j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error {
		w.PublicIP, w.PrivateIP, w.HTTPSEndpoint, w.EC2State = in.PublicIP, in.PrivateIP, endpoint(in), "running"
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	return outcome{}, false
}

// probeWithin bounds one probe for a CML.
const probeWithin = 10 * time.Second

// detectSources chooses the activity sources of a worker that could not be probed at
// its import. Until then the worker's CML is unknown, and the worker is not paused.
func (j *job) detectSources(ctx context.Context) (outcome, bool) {
	if !j.w.DetectSources || j.c.cfg.CML == nil || j.now.Before(j.live.nextProbe) {
		return outcome{}, false
	}
	o := worker.Observable{Agent: !j.agent().silent(j.now), Patience: j.s.ProvisioningTimeout}
	if t := j.w.RunningSince; t != nil {
		o.Up = max(0, j.now.Sub(*t))
	}
	call, cancel := context.WithTimeout(ctx, probeWithin)
	defer cancel()
	o.CML, o.CMLDetail = j.c.cfg.CML(call, j.w)
	if ctx.Err() != nil {
		return outcome{Result: Requeue}, true
	}
	j.live.nextProbe = j.now.Add(j.s.IdleDetectionInterval)
	sources, reason := o.Choose()
	if len(sources) == 0 && reason == j.w.ActivitySourcesReason {
		return outcome{}, false
	}
	err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
		if !w.DetectSources {
			return nil // a user has chosen sources meanwhile
		}
		if w.SetSources(sources, reason); len(sources) > 0 {
			tx.Note(audit.Entry{Action: "sources_detected", Detail: reason})
		}
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	signal(j.c.loads)
	return outcome{}, false
}

// collect reads CML's own status into memory. readLoads reads CloudWatch, for many
// workers at once.
func (j *job) collect(ctx context.Context) {
	j.awaitReady(ctx)
	if j.now.Before(j.live.nextLoad) {
		return
	}
	every := j.s.WorkerMetricsInterval
	if j.live.nextLoad.IsZero() {
		// The first collection is at the worker's own point of the interval, so that
		// a fleet's requests are spread out. The worker's idle checks use the same
		// point, so that both share one connection.
		j.live.nextLoad = j.now.Add(spread(j.w.ID, every))
		return
	}
	j.live.nextLoad = j.now.Add(every)
	j.live.metricsAt = j.now
	console, err := j.c.cfg.Consoles(j.w)
	if err == nil {
		call, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		var s System
		pprof.Do(call, pprof.Labels("part", "telemetry"), func(ctx context.Context) { s, err = console.System(ctx) })
		if err == nil {
			j.live.system, j.live.systemAt, j.live.systemErr = s, time.Now(), ""
			j.readLicense(ctx, console)
		}
	}
	if err != nil {
		j.live.systemErr = err.Error()
	}
	j.c.count.metrics.Add(1)
}

// learnSystem records CML's version and readiness if they changed.
func (j *job) learnSystem(ctx context.Context) (outcome, bool) {
	s := j.live.system
	if j.live.systemAt.IsZero() || j.live.systemErr != "" || s.Version == j.w.CMLVersion && s.Ready == j.w.CMLReady {
		return outcome{}, false
	}
	err := j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error {
		w.CMLVersion, w.CMLReady = s.Version, s.Ready
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	return outcome{}, false
}

// ttl acts on a worker whose deadline has passed, after a warning. It is the last
// safeguard: it acts even on a worker in use, and records what was in use.
func (j *job) ttl(ctx context.Context) (outcome, bool) {
	x := j.expiry()
	if x == nil || j.now.Before(x.WarnAt) || j.shadow() || j.c.fleet.Halted().On {
		return outcome{}, false
	}
	use := "the worker is stopped"
	switch j.w.Status {
	case power.WorkerRunning:
		use = j.engineCase().Use()
	case power.WorkerFailed:
		use = "the worker has failed, so its use is unknown"
	}
	if !x.Warned {
		err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
			w.WarnOfTTL(tx, x.At, use)
			return nil
		})
		if err != nil {
			return j.failedWrite(err), true
		}
		return outcome{}, false
	}
	if j.now.Before(x.At) {
		return outcome{}, false
	}
	if out, moved := j.rereadDeadline(ctx); moved {
		return out, true
	}
	if x = j.expiry(); x == nil || j.now.Before(x.At) {
		return outcome{}, false
	}
	defer j.writes()()
	w, err := j.f.ExpireTTL(ctx, j.w.ID, j.w.Revision(), use)
	if err != nil {
		return j.failedWrite(err), true
	}
	j.took(w)
	if j.w.Status != power.WorkerTerminating {
		j.c.count.autoPause.Add(1)
	}
	return j.again(), true
}

// expiry returns when the worker expires; nil for never.
func (j *job) expiry() *why.Expiry {
	return j.w.Ends(j.now, j.rules(), j.c.fleet.Halted())
}

// nextTTL returns when the worker's expiry next requires something, such as the
// warning; zero for never.
func (j *job) nextTTL() time.Time {
	x := j.expiry()
	if x == nil {
		return time.Time{}
	}
	for _, t := range []time.Time{x.WarnAt, x.At} {
		if t.After(j.now) {
			return t
		}
	}
	return time.Time{}
}

// ends terminates a stopped worker at its expiry if ttl_action is terminate. A halt
// or dry run delays that. next is when to check again; zero for never.
func (j *job) ends(ctx context.Context) (out outcome, ended bool, next time.Time) {
	if j.w.TTLDeadline == nil || j.w.TTLAction != "terminate" {
		return outcome{}, false, time.Time{}
	}
	if out, ended := j.ttl(ctx); ended {
		return out, true, time.Time{}
	}
	if next = j.nextTTL(); next.IsZero() {
		next = j.now.Add(j.s.ReconcileInterval)
	}
	return outcome{}, false, next
}
