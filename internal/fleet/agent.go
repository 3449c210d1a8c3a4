package fleet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/store"
)

// ByAgent is the actor of decisions that an agent makes on its machine.
var ByAgent = audit.Actor{Name: "agent", Kind: audit.KindAgent}

// WorkerOfMachine returns the worker that a machine is, found by the worker's
// ID or by its instance ID in a region. If region is empty, the default region
// and every configured one are searched. Errors: NotFound.
func (f *Fleet) WorkerOfMachine(ctx context.Context, machine, region string) (Worker, error) {
	if failure.CheckName("machine", machine) != nil || region != "" && failure.CheckName("region", region) != nil {
		return Worker{}, &failure.NotFound{Kind: "worker", Name: machine}
	}
	regions := []string{region}
	if s := f.Settings(); region == "" && strings.HasPrefix(machine, "i-") {
		regions = append(slices.Sorted(maps.Keys(s.AWSRegionConfigs)), s.AWSDefaultRegion)
	}
	read := []string{workerKey(machine)}
	for _, r := range regions {
		read = append(read, instanceKey(r, machine))
	}
	res, err := f.store.Commit(ctx, store.Txn{Read: read})
	if err != nil {
		return Worker{}, fmt.Errorf("cannot find the worker of machine %q: %w", machine, err)
	}
	if res.Read[0].Exists() {
		return DecodeWorker(res.Read[0])
	}
	i := slices.IndexFunc(res.Read[1:], store.Value.Exists)
	if i < 0 {
		return Worker{}, &failure.NotFound{Kind: "worker", Name: machine}
	}
	ref, err := instanceCodec.Decode(res.Read[1+i].Key, res.Read[1+i].Data)
	if err != nil {
		return Worker{}, err
	}
	w, err := f.Worker(ctx, ref.Worker)
	if err == nil && w.EC2InstanceID != machine {
		return Worker{}, &failure.NotFound{Kind: "worker", Name: machine} // it has another instance now
	}
	return w, err
}

// AgentStop is the intent of an agent to stop its own machine.
type AgentStop struct {
	Generation uint64       // the agent's own
	Reason     power.Reason // idle_timeout or ttl
	Detail     string
	Shadow     bool // the whole server is in dry run
}

// AgentIntends records that an agent is about to stop its machine. It is
// durable before the agent acts, and counted here, once. A repetition for the
// same generation gets the same answer. The agent may act on idleness only
// while it holds the power and nothing in the fleet forbids it. Errors:
// NotFound, Refused.
func (f *Fleet) AgentIntends(ctx context.Context, id string, a AgentStop) (Worker, error) {
	return f.Change(ctx, id, Changing{By: ByAgent, Limits: true, Rules: true}, func(w *Worker, tx *Tx) error {
		refuse := func(reason, format string, args ...any) error {
			return &failure.Refused{Command: "let the agent stop", Name: w.Name, Reason: reason, Detail: fmt.Sprintf(format, args...)}
		}
		if in := w.Intent; in != nil && in.By == ByAgent.Name && in.AgentGeneration == a.Generation && w.DesiredStatus == power.WorkerStopped {
			return nil
		}
		rules := f.PolicyWith(tx.Now, w, nil)
		switch {
		case a.Generation == w.AgentCalledOff:
			return refuse("called_off", "it was called off")
		case tx.Halted:
			return refuse("halted", "automatic actions are halted")
		case a.Shadow || !w.Armed || rules.Shadow:
			return refuse("shadow", "it is in dry-run mode")
		case w.Status != power.WorkerRunning || w.DesiredStatus != power.WorkerRunning:
			return refuse("status", "it is %s and wanted %s", w.Status, w.DesiredStatus)
		}
		if a.Reason == power.ReasonIdleTimeout {
			if err := w.mayIdleStop(tx, &rules, refuse); err != nil {
				return err
			}
			if b := f.stopBudget(tx.Now, w, tx.Pool.Spent)(policy.ForIdle); len(b) > 0 {
				return refuse(string(idle.Budget), "%s", b[0].Sentence)
			}
			f.spend(tx, w, policy.Stops, policy.ForIdle)
		}
		if err := w.intendStop(tx, Pause{Reason: a.Reason, Detail: a.Detail}); err != nil {
			return err
		}
		now := tx.Now
		w.Intent.SentAt, w.Intent.AgentGeneration = &now, a.Generation
		return nil
	})
}

// mayIdleStop applies to an agent the conditions that apply to the controller's
// own idle pauses.
func (w *Worker) mayIdleStop(tx *Tx, r *policy.Resolved, refuse func(reason, format string, args ...any) error) error {
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

// AgentWithdraws withdraws an agent's intent: it did not stop its machine.
func (f *Fleet) AgentWithdraws(ctx context.Context, id string, generation uint64, why string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: ByAgent}, func(w *Worker, tx *Tx) error {
		in := w.Intent
		if in == nil || in.By != ByAgent.Name || in.AgentGeneration != generation || w.DesiredStatus != power.WorkerStopped {
			return nil
		}
		return w.CancelStop(tx, "pause_cancelled", why)
	})
}

// AgentConsulted reports whether the worker's agent is to prepare for a stop
// that the controller has decided and not sent: run the pre-stop hook and check
// again. It is not consulted about the end of a worker.
func (w *Worker) AgentConsulted() bool {
	in := w.Intent
	return in != nil && in.SentAt == nil && in.By != ByAgent.Name && w.DesiredStatus == power.WorkerStopped && w.Status != power.WorkerDraining
}
