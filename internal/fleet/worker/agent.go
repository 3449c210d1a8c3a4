package worker

import (
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
)

// ByAgent is the actor of decisions that an agent makes on its machine.
var ByAgent = audit.Actor{Name: "agent", Kind: audit.KindAgent}

// MayIdleStop applies to an agent the conditions that apply to the controller's
// own idle pauses.
func (w *Worker) MayIdleStop(tx *Tx, r *policy.Resolved, refuse func(reason, format string, args ...any) error) error {
	p := r.Idle(w.IsIdleDetectionEnabled)
	switch {
	case w.PauseHolder != HolderAgent:
		return refuse("pause_holder", "the %s decides about it", w.PauseHolder)
	case !p.Detection:
		return refuse(string(idle.DetectionDisabled), "idle detection is switched off for it")
	case !p.AutoPause:
		return refuse(string(idle.AutoPauseDisabled), "automatic pauses are switched off")
	case w.SnoozedUntil != nil && tx.Now.Before(*w.SnoozedUntil):
		return refuse(string(idle.InSnoozePeriod), "%s snoozed it until %s", w.SnoozedBy, w.SnoozedUntil.Format(time.RFC3339))
	case r.KeptUntil != nil:
		return refuse(string(idle.InSnoozePeriod), "a user keeps it until %s", r.KeptUntil.Format(time.RFC3339))
	case len(r.Guards()) > 0:
		return refuse(string(idle.Schedule), "%s", r.Guards()[0].Sentence)
	case w.LastResumedAt != nil && tx.Now.Before(w.LastResumedAt.Add(time.Duration(p.Snooze))):
		return refuse(string(idle.InSnoozePeriod), "it was resumed less than %s ago", idle.Human(time.Duration(p.Snooze)))
	case tx.Pool.Up <= tx.Settings.MinWorkers:
		return refuse(string(idle.MinWorkers), "the fleet would have fewer running workers than its floor of %d", tx.Settings.MinWorkers)
	}
	return nil
}

// AgentConsulted reports whether the worker's agent is to prepare for a stop
// that the controller has decided and not sent: run the pre-stop hook and check
// again. It is not consulted about the end of a worker.
func (w *Worker) AgentConsulted() bool {
	in := w.Intent
	return in != nil && in.SentAt == nil && in.By != ByAgent.Name && w.DesiredStatus == power.WorkerStopped && w.Status != power.WorkerDraining
}
