package fleet

import (
	"context"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
)

// UpdateWorkerActivity records new activity; the time of the last activity never
// moves back. If u has nothing new, only the times of the last check are written, and
// only if the stored ones are older than stale.
func (f *Fleet) UpdateWorkerActivity(ctx context.Context, id string, at int64, u worker.ActivityUpdate, stale time.Duration) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: audit.ByController, At: at}, func(w *worker.Worker, tx *worker.Tx) error {
		news := u.Changes(w)
		if !news && w.LastActivityCheckAt != nil && u.CheckedAt.Sub(*w.LastActivityCheckAt) < stale {
			return nil
		}
		checked := u.CheckedAt.UTC().Round(0)
		w.LastActivityCheckAt, w.NextIdleCheckAt, w.TargetPauseAt = &checked, u.Check, u.Target
		if !news {
			return nil
		}
		moved := u.Moves(w)
		if moved {
			t := u.Newest.UTC().Round(0)
			w.LastActivityAt = &t
			if w.WarningFor == "" {
				w.WarningSentAt = nil
			}
		}
		if u.Complete() {
			w.RecentActivityEvents = u.Recent[:min(len(u.Recent), tx.Settings.WorkerActivityEventsMaxStored)]
		}
		if u.Late > 0 && w.LastPausedAt != nil {
			tx.Note(audit.Entry{Action: "late_activity", Events: []string{audit.EventLateActivity}, Reason: string(w.PauseReason),
				Detail: fmt.Sprintf("activity of %s was reported %s later; the pause of %s was decided without it",
					u.Newest.UTC().Format(time.RFC3339), idle.Human(u.Late), w.LastPausedAt.Format(time.RFC3339))})
		}
		if moved {
			tx.Note(audit.Entry{Action: "activity_updated", Events: []string{audit.EventActivity}})
		}
		return nil
	})
}

// Decide judges a worker and carries out the arbiter's choice, in one transaction
// with the pool. The intent to pause or drain is durable when it returns. It also
// records a warning that is due, and the outcome of a guard if that has changed.
func (f *Fleet) Decide(ctx context.Context, id string, j worker.Judgement) (worker.Outcome, error) {
	var out worker.Outcome
	w, err := f.Change(ctx, id, Changing{By: audit.ByController, At: j.At, Limits: true, Rules: true}, func(w *worker.Worker, tx *worker.Tx) error {
		out = worker.Outcome{}
		guards, rules := slices.Clone(j.Guards), j.Rules(w)
		halted := f.Halted()
		if halted.On != tx.Halted {
			halted = halt.Halt{On: tx.Halted} // as read in this transaction
		}
		guards = append(guards, worker.Standstill(w, &rules, halted, j.Shadow)...)
		d := worker.Case{Now: j.Now, Worker: w, Rules: &rules, Readings: j.Readings, Guards: guards,
			Budget: f.stopBudget(j.Now, w, tx.Pool.Spent), ScaleDown: tx.Settings.ScaleDownEnabled}.Judge()
		out.Reason, out.Force = d.Reason, d.Force
		l := worker.LimitsOf(w, d.Reason, &tx.Pool, &tx.Settings)
		out.Action, out.Guard = worker.Arbitrate(j.Now, d.Verdict, l)
		out.Decision = l.Hold(d.Decision, out.Action, out.Guard)
		out.Shadowed = len(d.Verdict.Blocks) == 1 && d.Verdict.Blocks[0].Code == idle.Shadow
		if err := w.WriteOutcome(tx, &out, rules.Name, d.Use); err != nil {
			return err
		}
		if out.Action != worker.ActNothing {
			f.spend(tx, w, policy.Stops, string(w.PauseReason))
		}
		return nil
	})
	out.Worker = w
	return out, err
}
