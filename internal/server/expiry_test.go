package server

import (
	"cmp"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/board"
)

// TestExpiryComesFirst checks that a worker's expiry is the first answer if it
// comes before any pause, whatever is unknown, and that it is not mentioned for
// a worker on which nothing acts.
func TestExpiryComesFirst(t *testing.T) {
	now := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	in := func(d time.Duration) *time.Time { t := now.Add(d); return &t }
	unknown := idle.Block{Code: idle.SignalUnknown, Sentence: "Not known: cml."}
	kept := idle.Block{Code: idle.InSnoozePeriod, Sentence: "Protected for another 3h.", Until: in(3 * time.Hour)}
	halted := func(d time.Duration) (halt.Halt, idle.Block) {
		h := halt.Halt{On: true, Until: in(d)}
		return h, h.Block()
	}
	long, byLong := halted(30 * time.Minute)
	short, byShort := halted(5 * time.Minute)
	idleSoon := idle.Block{Code: idle.NotIdleYet, Sentence: "Not idle yet.", Until: in(time.Minute)}
	for name, c := range map[string]struct {
		ttl, target *time.Time
		action      string
		blocks      []idle.Block
		shadow      bool
		halt        halt.Halt
		warned, at  *time.Time // at is ttl if nil
		first       bool
		says        string
		standing    control.Standing
	}{
		"about to end, not known":  {ttl: in(8 * time.Second), warned: in(-52 * time.Second), action: "terminate", blocks: []idle.Block{unknown}, first: true, says: "It is terminated at 2026-03-02T12:00:08Z, in 8s", standing: control.StandingPausingSoon},
		"stopped before the pause": {ttl: in(time.Minute), target: in(time.Hour), blocks: []idle.Block{idleSoon}, first: true, says: "It is stopped at", standing: control.StandingPausingSoon},
		"paused before the end":    {ttl: in(time.Hour), target: in(time.Minute), action: "terminate", blocks: []idle.Block{idleSoon}, says: "It is terminated at", standing: control.StandingPausingSoon},
		"far away":                 {ttl: in(30 * time.Hour), action: "terminate", blocks: []idle.Block{unknown}, first: true, says: "It is terminated at", standing: control.StandingUnknown},
		"kept beyond it":           {ttl: in(20 * time.Minute), target: in(3 * time.Hour), blocks: []idle.Block{kept}, first: true, says: "It is stopped at 2026-03-02T12:20:00Z, in 20m, by its ttl_deadline", standing: control.StandingBlocked},
		"near, and not warned":     {ttl: in(10 * time.Second), target: in(3 * time.Hour), blocks: []idle.Block{kept}, first: true, at: in(time.Minute), says: "It is stopped at 2026-03-02T12:01:00Z, in 1m, by its ttl_deadline 2026-03-02T12:00:10Z: its users are warned first", standing: control.StandingPausingSoon},
		"halted beyond it":         {ttl: in(20 * time.Minute), target: in(3 * time.Hour), halt: long, blocks: []idle.Block{byLong, kept}, first: true, at: in(31 * time.Minute), says: "It is stopped at 2026-03-02T12:31:00Z, in 31m, by its ttl_deadline 2026-03-02T12:20:00Z: a halt puts that off until 2026-03-02T12:30:00Z", standing: control.StandingBlocked},
		"halted until before it":   {ttl: in(20 * time.Minute), target: in(3 * time.Hour), halt: short, blocks: []idle.Block{byShort, kept}, first: true, says: "It is stopped at 2026-03-02T12:20:00Z", standing: control.StandingBlocked},
		"over":                     {ttl: in(-time.Minute), warned: in(-2 * time.Minute), action: "terminate", blocks: []idle.Block{unknown}, first: true, says: "It is terminated now", standing: control.StandingPausingSoon},
		"in shadow":                {ttl: in(time.Minute), blocks: []idle.Block{unknown}, shadow: true, standing: control.StandingUnknown},
		"halted":                   {ttl: in(time.Minute), halt: halt.Halt{On: true}, blocks: []idle.Block{unknown, {Code: idle.Halted, Sentence: "Halted."}}, standing: control.StandingUnknown},
	} {
		w := &worker.Worker{ID: "w-1", Name: "a6", Status: power.WorkerRunning, Armed: !c.shadow, TTLDeadline: c.ttl, TTLAction: c.action, WarningSentAt: c.warned}
		if c.warned != nil {
			w.WarningFor = power.ReasonTTL
		}
		st := worker.IdleStatus{TimeoutMinutes: 60, Verdict: idle.Verdict{At: now, IsIdle: c.target != nil && c.target.Sub(now) > time.Hour, Blocks: c.blocks, TargetPauseAt: c.target}}
		st.Expiry = w.Ends(now, &policy.Resolved{WarnBefore: idle.Duration(time.Minute)}, c.halt)
		_, text := explain(w, st, st.Expiry, now)
		if (c.says == "") == strings.Contains(text, "ttl_deadline") || !strings.Contains(text, c.says) || c.first != (c.says != "" && strings.HasPrefix(text, c.says)) {
			t.Errorf("%s: %s", name, text)
		}
		if c.first && strings.Contains(text, "it is paused at") {
			t.Errorf("%s: it names a pause that does not come: %s", name, text)
		}
		row := board.Row(w, &st, now)
		at := cmp.Or(c.at, c.ttl)
		if row.Standing != c.standing || c.first && (!strings.HasPrefix(row.Sentence, c.says) || row.TargetPauseAt == nil || !row.TargetPauseAt.Equal(*at)) {
			t.Errorf("%s: the overview has %s: %s %v", name, row.Standing, row.Sentence, row.TargetPauseAt)
		}
	}
}

// TestWhoEndedIt checks that the answer about a terminated worker says who
// ended it.
func TestWhoEndedIt(t *testing.T) {
	at := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	for want, w := range map[string]worker.Worker{
		"Its ttl_deadline 2026-03-02T12:00:00Z ended it": {TerminateFor: power.ReasonTTL, TerminateBy: &audit.ByController, TTLDeadline: &at},
		"ada ended it": {TerminateBy: &audit.Actor{Name: "ada", Kind: audit.KindPerson}},
		"It is gone since 2026-03-02T12:00:00Z: external: EC2 terminated the instance.": {TerminateFor: power.ReasonExternal, StatusReason: "external: EC2 terminated the instance"},
		"It is gone since 2026-03-02T12:00:00Z.":                                        {},
	} {
		w.Status, w.StatusSince = power.WorkerTerminated, at
		if q, text := explain(&w, worker.IdleStatus{}, nil, at); q != "why was it terminated" || !strings.HasPrefix(text, want) {
			t.Errorf("%s? %s Want %s", q, text, want)
		}
	}
}
