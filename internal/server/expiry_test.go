package server

import (
	"cmp"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/board"
)

// TestExpiryComesFirst checks that a worker's expiry is the first fact if it comes
// before any pause, even if readings are unknown, and that it is not mentioned for a
// worker that lull does not act on.
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
		end         bool // the expiry is named
		standing    control.Standing
	}{
		"about to end, not known":  {ttl: in(8 * time.Second), warned: in(-52 * time.Second), action: "terminate", blocks: []idle.Block{unknown}, first: true, end: true, standing: control.StandingPausingSoon},
		"stopped before the pause": {ttl: in(time.Minute), target: in(time.Hour), blocks: []idle.Block{idleSoon}, first: true, end: true, standing: control.StandingPausingSoon},
		"paused before the end":    {ttl: in(time.Hour), target: in(time.Minute), action: "terminate", blocks: []idle.Block{idleSoon}, end: true, standing: control.StandingPausingSoon},
		"far away":                 {ttl: in(30 * time.Hour), action: "terminate", blocks: []idle.Block{unknown}, first: true, end: true, standing: control.StandingUnknown},
		"kept beyond it":           {ttl: in(20 * time.Minute), target: in(3 * time.Hour), blocks: []idle.Block{kept}, first: true, end: true, standing: control.StandingBlocked},
		"near, and not warned":     {ttl: in(10 * time.Second), target: in(3 * time.Hour), blocks: []idle.Block{kept}, first: true, at: in(time.Minute), end: true, standing: control.StandingPausingSoon},
		"halted beyond it":         {ttl: in(20 * time.Minute), target: in(3 * time.Hour), halt: long, blocks: []idle.Block{byLong, kept}, first: true, at: in(31 * time.Minute), end: true, standing: control.StandingBlocked},
		"halted until before it":   {ttl: in(20 * time.Minute), target: in(3 * time.Hour), halt: short, blocks: []idle.Block{byShort, kept}, first: true, end: true, standing: control.StandingBlocked},
		"over":                     {ttl: in(-time.Minute), warned: in(-2 * time.Minute), action: "terminate", blocks: []idle.Block{unknown}, first: true, end: true, standing: control.StandingPausingSoon},
		"in dry-run mode":          {ttl: in(time.Minute), blocks: []idle.Block{unknown}, shadow: true, standing: control.StandingUnknown},
		"halted":                   {ttl: in(time.Minute), halt: halt.Halt{On: true}, blocks: []idle.Block{unknown, {Code: idle.Halted, Sentence: "Halted."}}, standing: control.StandingUnknown},
	} {
		w := &worker.Worker{ID: "w-1", Name: "a6", Status: power.WorkerRunning, Armed: !c.shadow, TTLDeadline: c.ttl, TTLAction: c.action, WarningSentAt: c.warned}
		if c.warned != nil {
			w.WarningFor = power.ReasonTTL
		}
		st := worker.IdleStatus{TimeoutMinutes: 60, Verdict: idle.Verdict{At: now, IsIdle: c.target != nil && c.target.Sub(now) > time.Hour, Blocks: c.blocks, TargetPauseAt: c.target}}
		st.Expiry = w.Ends(now, &policy.Resolved{WarnBefore: idle.Duration(time.Minute)}, c.halt)
		a := about(w)
		a.Expiry = st.Expiry
		explain(&a, w, st, now)
		at := cmp.Or(c.at, c.ttl)
		end := a.Fact(why.Expires.Code)
		if (end != nil) != c.end || c.end && (!end.At.Equal(*at) || st.Expiry.Action != cmp.Or(c.action, "stop") || !st.Expiry.Deadline.Equal(*c.ttl)) || c.first != (a.Facts[0].Code == why.Expires.Code) {
			t.Errorf("%s: %+v", name, a.Facts)
		}
		if c.first && a.Fact(why.Pauses.Code) != nil {
			t.Errorf("%s: it names a pause that does not come: %s", name, a.Answer)
		}
		row := board.Row(w, &st, now)
		if row.Standing != c.standing || c.first && (!strings.HasPrefix(row.Sentence, end.Sentence) || row.TargetPauseAt == nil || !row.TargetPauseAt.Equal(*at)) {
			t.Errorf("%s: the overview has %s: %s %v", name, row.Standing, row.Sentence, row.TargetPauseAt)
		}
	}
}

// TestWhoEndedIt checks that why about a terminated worker says who terminated it.
func TestWhoEndedIt(t *testing.T) {
	at := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		w    worker.Worker
		kind why.Kind
		by   string
	}{
		{worker.Worker{TerminateFor: power.ReasonTTL, TerminateBy: &audit.ByController, TTLDeadline: &at}, why.Terminated, "Its ttl_deadline 2026-03-02T12:00:00Z"},
		{worker.Worker{TerminateBy: &audit.Actor{Name: "ada", Kind: audit.KindUser}}, why.Terminated, "ada"},
		{worker.Worker{TerminateFor: power.ReasonExternal, StatusReason: "external: EC2 terminated the instance"}, why.Gone, ""},
		{worker.Worker{}, why.Gone, ""},
	} {
		c.w.Status, c.w.StatusSince = power.WorkerTerminated, at
		var a why.Account
		explain(&a, &c.w, worker.IdleStatus{}, at)
		if len(a.Facts) != 1 || a.Facts[0].Code != c.kind.Code || a.Facts[0].By != c.by || !a.Facts[0].At.Equal(at) || !strings.Contains(a.Answer, c.w.StatusReason) {
			t.Errorf("%+v, want %s by %q", a, c.kind.Code, c.by)
		}
	}
}
