package fleet

import (
	"context"
	"fmt"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
)

// BudgetsOf returns the state of the budgets that apply to an action on w, from the
// pool as last read.
func (f *Fleet) BudgetsOf(now time.Time, w *worker.Worker, what, reason string) []policy.Used {
	return f.Rules().BudgetsFor(now, f.subject(w, nil), what, reason, f.now.pool.Load().Spent, f.Size)
}

// stopBudget returns a function for Case.Budget: the blocks of w's stop budgets, if
// spent is already spent.
func (f *Fleet) stopBudget(now time.Time, w *worker.Worker, spent policy.Ledger) func(string) []idle.Block {
	return func(reason string) []idle.Block {
		return policy.Blocks(f.Rules().BudgetsFor(now, f.subject(w, nil), policy.Stops, reason, spent, f.Size))
	}
}

// StopBudget returns a function for Case.Budget, from the pool as last read.
func (f *Fleet) StopBudget(now time.Time, w *worker.Worker) func(string) []idle.Block {
	return f.stopBudget(now, w, f.now.pool.Load().Spent)
}

// overdue returns Refused if w cannot be started because its ttl_deadline would stop
// it again. That applies to every actor. A worker that is running may continue until
// its warning ends.
func (f *Fleet) overdue(now time.Time, w *worker.Worker, command string) error {
	runs := w.Status == power.WorkerRunning && w.Intent == nil
	ends := w.Status == power.WorkerTerminating || w.Status == power.WorkerTerminated
	if !w.Overdue(now) || runs || ends || !w.Armed || f.PolicyWith(now, w, nil).Shadow {
		return nil
	}
	return &failure.Refused{Command: command, Name: w.Name, Reason: "ttl_over", Detail: w.OverdueSince() + "; " + w.Prolong()}
}

// frozen returns Refused if a user froze w, so that it cannot be started
// automatically.
func (f *Fleet) frozen(now time.Time, w *worker.Worker, command string) error {
	r := f.PolicyWith(now, w, nil)
	if r.FrozenUntil == nil {
		return nil
	}
	return &failure.Refused{Command: command, Name: w.Name, Reason: "frozen", Detail: fmt.Sprintf("it is frozen until %s", r.FrozenUntil.UTC().Format(time.RFC3339))}
}

// spend counts an action on w against its budgets, in the change tx.
func (f *Fleet) spend(tx *worker.Tx, w *worker.Worker, what, reason string) {
	tx.Spend(f.Rules().Spend(tx.Now, f.subject(w, nil), what, reason, tx.Pool.Spent))
}

// BudgetStates returns the state of every budget, from the stored pool.
func (f *Fleet) BudgetStates(ctx context.Context) (map[string]policy.Used, error) {
	pool, err := f.Pool(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]policy.Used{}
	rules := f.Rules()
	for i := range rules.Budgets {
		b := &rules.Budgets[i]
		out[b.Name] = rules.StateOf(time.Now(), b, pool.Spent[b.Name], f.Size(b.Selector))
	}
	return out, nil
}
