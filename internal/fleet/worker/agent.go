package worker

import (
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
)

// ByAgent is the actor of decisions that an agent makes for its own machine.
var ByAgent = audit.Actor{Name: "agent", Kind: audit.KindAgent}

// MayIdleStop returns an error, made by refuse, unless the worker's agent may stop it
// for idleness. The conditions are those of the controller's own idle pauses.
func (w *Worker) MayIdleStop(tx *Tx, r *policy.Resolved, refuse func(reason, format string, args ...any) error) error {
	p := r.Idle(w.IsIdleDetectionEnabled)
	switch {
	case w.PauseHolder != HolderAgent:
		return refuse("pause_holder", "the %s is its pause holder", w.PauseHolder)
	case !p.Detection:
		return refuse(string(idle.DetectionDisabled), "idle detection is switched off for it")
	case !p.AutoPause:
		return refuse(string(idle.AutoPauseDisabled), "automatic pauses are switched off")
	case w.SnoozedUntil != nil && tx.Now.Before(*w.SnoozedUntil):
		return refuse(string(idle.InSnoozePeriod), "%s snoozed it until %s", w.SnoozedBy, w.SnoozedUntil.Format(time.RFC3339))
	case r.KeptUntil != nil:
		return refuse(string(idle.InSnoozePeriod), "a user keeps it running until %s", r.KeptUntil.Format(time.RFC3339))
	case len(r.Guards()) > 0:
		return refuse(string(idle.Schedule), "%s", r.Guards()[0].Sentence)
	case w.LastResumedAt != nil && tx.Now.Before(w.LastResumedAt.Add(time.Duration(p.Snooze))):
		return refuse(string(idle.InSnoozePeriod), "it was resumed less than %s ago", idle.Human(time.Duration(p.Snooze)))
	case tx.Pool.Up <= tx.Settings.MinWorkers:
		return refuse(string(idle.MinWorkers), "the fleet would have fewer running workers than its floor of %d", tx.Settings.MinWorkers)
	}
	return nil
}

// AgentConsulted reports whether the worker's agent should now prepare for a stop
// that is decided and not sent yet, by running the pre-stop hook and checking again.
// It is not consulted before a termination.
func (w *Worker) AgentConsulted() bool {
	in := w.Intent
	return in != nil && in.SentAt == nil && in.By != ByAgent.Name && w.DesiredStatus == power.WorkerStopped && w.Status != power.WorkerDraining
}
