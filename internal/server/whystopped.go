package server

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
)

// decided returns the audit entry with the decision on the last stop of w, or nil if
// the log no longer has it. last are the newest entries.
func (s *Server) decided(ctx context.Context, w *worker.Worker, last []audit.Entry) (*audit.Entry, error) {
	for i := range last {
		if last[i].Pauses() {
			return &last[i], nil
		}
	}
	at := *w.LastPausedAt
	page, err := s.fleet.Audit(ctx, audit.Query{WorkerID: w.ID, From: at, To: at.Add(time.Second)})
	if err != nil {
		return nil, err
	}
	for i := range page.Entries {
		if page.Entries[i].Pauses() {
			return &page.Entries[i], nil
		}
	}
	return nil, nil
}

// groundsInto adds the reasons for a stop to y: the rule, how long the worker had
// been idle, and the signals at the deciding check.
func groundsInto(y *control.Why, e *audit.Entry) {
	if e == nil {
		return
	}
	d := e.Decision
	if d == nil {
		if e.Policy != "" {
			y.Add(why.UnderPolicy, time.Time{}, "", e.Policy)
		}
		return
	}
	v, p := d.Verdict, d.Policy
	v.NextIdleCheckAt, v.TargetPauseAt, v.WarnAt = time.Time{}, nil, nil // these do not apply after the stop
	y.Verdict, y.PolicyThen, y.Account.Policy = &v, &p, &p
	y.Signals = evidence.Signals(v.At, p, d.Evidence.Readings)
	y.Checked = &evidence.Checked{At: v.At, Since: v.At, State: d.Evidence.Status}
	rule, scheduled := "policy "+cmp.Or(e.Policy, p.Name), strings.HasPrefix(p.Name, policy.ScheduleName)
	if scheduled {
		rule = p.Name
	}
	if scheduled && p.Signals != nil && len(p.Signals) == 0 { // a schedule's stop with force does not depend on readings
		y.Add(why.Scheduled, time.Time{}, "", strings.TrimSuffix(e.Detail, "."))
		return
	}
	y.Add(why.WasIdle, v.At, "", idle.HumanMinutes(v.IdleMinutes), rule, idle.Human(time.Duration(p.Timeout)))
}

// unborn makes y the answer for a moment before lull knew the worker. e is the
// worker's first audit entry.
func unborn(y *control.Why, e *audit.Entry, imported bool) {
	came := "created"
	if imported {
		came = "imported"
	}
	y.NoRemedy()
	y.Ask("why is it unknown").Add(why.Unborn, e.At, e.By.Name, came)
}

// opening returns when a schedule next starts the worker, as text; empty for never.
func opening(st *policy.ScheduleState) string {
	switch {
	case !st.Open:
		return " The schedule starts the worker when it opens."
	case st.NextOpen == nil:
		return " The schedule does not open again, so it does not start the worker."
	}
	return fmt.Sprintf(" The schedule starts the worker when it opens next, at %s.", policy.ClockIn(*st.NextOpen, st.Zone))
}
