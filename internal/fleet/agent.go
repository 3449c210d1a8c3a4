package fleet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// WorkerOfMachine returns the worker whose machine this is. machine is the worker's
// ID or its EC2 instance's ID in region. If region is empty, the default region and
// every configured one are searched. Errors: NotFound.
func (f *Fleet) WorkerOfMachine(ctx context.Context, machine, region string) (worker.Worker, error) {
	if failure.CheckName("machine", machine) != nil || region != "" && failure.CheckName("region", region) != nil {
		return worker.Worker{}, &failure.NotFound{Kind: "worker", Name: machine}
	}
	regions := []string{region}
	if s := f.Settings(); region == "" && strings.HasPrefix(machine, "i-") {
		regions = append(slices.Sorted(maps.Keys(s.AWSRegionConfigs)), s.AWSDefaultRegion)
	}
	read := []string{worker.Key(machine)}
	for _, r := range regions {
		read = append(read, worker.InstanceKey(r, machine))
	}
	res, err := f.store.Commit(ctx, store.Txn{Read: read})
	if err != nil {
		return worker.Worker{}, fmt.Errorf("cannot find the worker of machine %q: %w", machine, err)
	}
	if res.Read[0].Exists() {
		return worker.Decode(res.Read[0])
	}
	i := slices.IndexFunc(res.Read[1:], store.Value.Exists)
	if i < 0 {
		return worker.Worker{}, &failure.NotFound{Kind: "worker", Name: machine}
	}
	owner, err := worker.InstanceOwner(res.Read[1+i])
	if err != nil {
		return worker.Worker{}, err
	}
	w, err := f.Worker(ctx, owner)
	if err == nil && w.EC2InstanceID != machine {
		return worker.Worker{}, &failure.NotFound{Kind: "worker", Name: machine} // the worker has another EC2 instance now
	}
	return w, err
}

// AgentStop is the intent of an agent to stop its own machine.
type AgentStop struct {
	Generation uint64       // number that the agent gave to the intent
	Reason     power.Reason // idle_timeout or ttl
	Detail     string
	Shadow     bool // the whole server is in dry run
}

// AgentIntends records that an agent is about to stop its machine. The intent is
// durable, and counted, before the agent acts; a repeated call for the same
// generation gets the same answer. The agent may act on idleness only while it is the
// pause holder and nothing in the fleet forbids the pause. Errors: NotFound, Refused.
func (f *Fleet) AgentIntends(ctx context.Context, id string, a AgentStop) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: worker.ByAgent, Limits: true, Rules: true}, func(w *worker.Worker, tx *worker.Tx) error {
		refuse := func(reason, format string, args ...any) error {
			return &failure.Refused{Command: "let the agent stop", Name: w.Name, Reason: reason, Detail: fmt.Sprintf(format, args...)}
		}
		if in := w.Intent; in != nil && in.By == worker.ByAgent.Name && in.AgentGeneration == a.Generation && w.DesiredStatus == power.WorkerStopped {
			return nil
		}
		rules := f.PolicyWith(tx.Now, w, nil)
		switch {
		case a.Generation == w.AgentCalledOff:
			return refuse("called_off", "canceled")
		case tx.Halted:
			return refuse("halted", "automatic actions are halted")
		case a.Shadow || !w.Armed || rules.Shadow:
			return refuse("shadow", "it is in dry-run mode")
		case w.Status != power.WorkerRunning || w.DesiredStatus != power.WorkerRunning:
			return refuse("status", "the worker is %s and should be %s", w.Status, w.DesiredStatus)
		}
		if a.Reason == power.ReasonIdleTimeout {
			if err := w.MayIdleStop(tx, &rules, refuse); err != nil {
				return err
			}
			if b := f.stopBudget(tx.Now, w, tx.Pool.Spent)(policy.ForIdle); len(b) > 0 {
				return refuse(string(idle.Budget), "%s", b[0].Sentence)
			}
			f.spend(tx, w, policy.Stops, policy.ForIdle)
		}
		if err := w.IntendStop(tx, worker.Pause{Reason: a.Reason, Detail: a.Detail}); err != nil {
			return err
		}
		now := tx.Now
		w.Intent.SentAt, w.Intent.AgentGeneration = &now, a.Generation
		return nil
	})
}

// AgentWithdraws withdraws an agent's intent, because the agent did not stop its
// machine.
func (f *Fleet) AgentWithdraws(ctx context.Context, id string, generation uint64, why string) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: worker.ByAgent}, func(w *worker.Worker, tx *worker.Tx) error {
		in := w.Intent
		if in == nil || in.By != worker.ByAgent.Name || in.AgentGeneration != generation || w.DesiredStatus != power.WorkerStopped {
			return nil
		}
		return w.CancelStop(tx, "pause_cancelled", why)
	})
}
