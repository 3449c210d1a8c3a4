package mutants

// A mutant is a fault that can be switched on in a special build. Each of its
// edits replaces text that occurs exactly once in the tree, in whatever file. The
// new text calls mutantOn with the mutant's name; every edited package gets that
// function.
type mutant struct {
	name  string // what goes wrong
	tests []test // tests that must each detect it
}

// test names a test and the folder of its package.
type test struct{ folder, name string }

var (
	fleetOracle = test{"internal/controller", "TestTruthFleet"}
	agentOracle = test{"internal/agent", "TestOracle"}
	hostOracle  = test{"internal/host", "TestNothingInUseIsPaused"}
	idleLaws    = "internal/core/idle"
)

var mutants = []mutant{
	// An active reading blocks until a newer one is quiet, whatever its age.
	{"active-allows", []test{fleetOracle, {idleLaws, "TestLawActiveNeverAllows"}}},
	{"gaps-allow", []test{{idleLaws, "TestLawQuietProvesItsWindowsOnly"}}},
	{"active-allows-by-window-start", []test{fleetOracle}},
	// The final check reads every source again.
	{"no-final-check", []test{fleetOracle}},
	{"final-check-cml-only", []test{fleetOracle, {"internal/controller", "TestFinalCheckReadsLoad"}}},
	{"max-age-by-setting", []test{{"internal/controller", "TestFinalCheckReadsLoad"}}},
	// New windows trigger a check of their worker.
	{"windows-without-wake", []test{{"internal/controller", "TestNewWindowsWakeTheWorker"}}},
	// The newest baseline counts, and the first start begins a snooze.
	{"baseline-first", []test{fleetOracle, {idleLaws, "TestBaseline"}}},
	{"no-first-snooze", []test{fleetOracle}},
	// An unknown is never quiet, whatever its cause.
	{"unknown-allows", []test{fleetOracle, agentOracle}},
	{"stale-allows", []test{fleetOracle}},
	{"cml-clock-trusted", []test{fleetOracle}},
	{"agent-clock-trusted", []test{fleetOracle}},
	{"never-pauses", []test{fleetOracle, agentOracle, hostOracle}},
	// A halt ends retries, an expiry ends what failed, a template identifies CML.
	{"halt-bounds-no-retry", []test{{"internal/controller", "TestHaltEndsRetries"}}},
	{"failed-never-expires", []test{{"internal/controller", "TestEndOfAFailedWorker"}}},
	{"pin-not-inherited", []test{{"cmd/lull", "TestScaledUpWorkerIsPaused"}}},

	{"first-sample-quiet", []test{agentOracle}},
	{"unread-quiet", []test{{"internal/agent", "TestUnreadRateIsNotQuiet"}}},
	{"silent-probe-quiet", []test{agentOracle}},
	{"own-writes-wide", []test{agentOracle}},
	{"own-writes-count", []test{agentOracle}},
	{"completion-held-by-nothing", []test{agentOracle, {"internal/agent", "TestSnoozeAndLeaseHoldACompletion"}}},
	{"ttl-warned-late", []test{agentOracle}},
	{"not-warned-again", []test{agentOracle, {"internal/agent", "TestWarnedAgainAfterASleep"}}},
	{"ttl-held", []test{agentOracle, {"internal/agent", "TestNothingHoldsATTL"}}},
	{"suspend-unnoticed", []test{agentOracle}},
	{"no-boot-grace", []test{agentOracle}},
	{"cache-forgotten", []test{agentOracle}},
	{"tags-not-reread", []test{agentOracle}},
	{"agent-no-final-check", []test{agentOracle}},
	{"snooze-ignored", []test{agentOracle}},
	{"lease-ignored", []test{agentOracle, hostOracle}},

	{"disk-unseen", []test{hostOracle, {"internal/host", "TestDiskWorkHolds"}}},
	{"pending-request-unseen", []test{hostOracle, {"internal/host", "TestPendingRequestHolds"}}},
	{"sleeps-for-ever", []test{{"internal/host", "TestNothingSleepsThatCannotWake"}}},
	{"fleet-halt-not-for-hosts", []test{{"internal/host/report", "TestFleetHaltReachesTheHost"}}},
	{"fleet-halt-not-for-agents", []test{{"internal/agent/servertest", "TestFleetHaltReachesTheAgent"}}},
}

// edit replaces the text old, which occurs once in the files below internal/.
// Several mutants may share an edit.
type edit struct{ old, new string }

var edits = []edit{
	{`		if r.State == Active {
			d.known = false`, `		if r.State == Active && !mutantOn("active-allows") && !mutantOn("active-allows-by-window-start") {
			d.known = false`},
	{`if r.StateAt(d.now) == Unknown {`, `if r.StateAt(d.now) == Unknown && !mutantOn("unknown-allows") {`},
	{`if b.at.After(d.base) {`, `if b.at.After(d.base) && !(mutantOn("baseline-first") && !d.base.IsZero()) {`},
	{`	d.until(end)
	if !d.now.Before(end) {
		return
	}
	d.v.InSnoozePeriod`, `	if mutantOn("snooze-ignored") {
		return
	}
	d.until(end)
	if !d.now.Before(end) {
		return
	}
	d.v.InSnoozePeriod`},
	{`if r.State != Quiet || r.QuietSince.IsZero() || d.base.IsZero() {`,
		`if r.State != Quiet || r.QuietSince.IsZero() || d.base.IsZero() || mutantOn("gaps-allow") || mutantOn("active-allows-by-window-start") {`},
	{`for _, l := range d.e.Leases {`, `for _, l := range d.e.Leases {
		if mutantOn("lease-ignored") {
			break
		}`},
	{`d.v.Eligible = len(d.v.Blocks) == 0`, `d.v.Eligible = len(d.v.Blocks) == 0 && !mutantOn("never-pauses")`},
	{`return r.MaxAge > 0 &&`, `return !mutantOn("stale-allows") && r.MaxAge > 0 &&`},

	{`	newest := l.Windows[len(l.Windows)-1]
`, `	newest, late := l.Windows[len(l.Windows)-1], time.Duration(0)
	if mutantOn("active-allows-by-window-start") { // alone it changes nothing: quiet windows must also cover the timeout
		late = l.Period
	}
`},
	{`l.Period, newest.End)`, `l.Period, newest.End.Add(-late))`},
	{`r.LastEvent = w.End`, `r.LastEvent = w.End.Add(-late)`},
	{`	r.MaxAge = idle.Duration(2 * l.Period)
`, `	r.MaxAge = idle.Duration(2 * l.Period)
	if mutantOn("max-age-by-setting") || mutantOn("final-check-cml-only") {
		r.MaxAge = idle.Duration(24 * time.Hour)
	}
`},
	{`return l != nil && now.Sub(l.readAt) <= loadFresh`, `return mutantOn("final-check-cml-only") || l != nil && now.Sub(l.readAt) <= loadFresh`},
	{`case e.load.end().After(was):`, `case e.load.end().After(was) && !mutantOn("windows-without-wake"):`},
	{`if l := j.loadSeen(); l != nil && l.end().After(j.live.loadEnd) && j.wantsLoad() {`,
		`if l := j.loadSeen(); l != nil && l.end().After(j.live.loadEnd) && j.wantsLoad() && !mutantOn("windows-without-wake") {`},
	{`	source := j.wantsAgent() && in.ByReadings()
`, `	source := j.wantsAgent() && in.ByReadings()
	if mutantOn("final-check-cml-only") || mutantOn("no-final-check") {
		return outcome{}, false
	}
`},
	{`	return a.at.Add(-max(a.r.At.Sub(t), 0))
`, `	if mutantOn("agent-clock-trusted") {
		return t
	}
	return a.at.Add(-max(a.r.At.Sub(t), 0))
`},
	{`last = j.finalCheck(ctx); !last.Verdict.Eligible {`, `last = j.finalCheck(ctx); !last.Verdict.Eligible && !mutantOn("no-final-check") {`},
	{`j.wantsAgent() && j.agent().age(time.Now()) > FinalCheckAge) {`,
		`j.wantsAgent() && j.agent().age(time.Now()) > FinalCheckAge && !mutantOn("final-check-cml-only") && !mutantOn("no-final-check")) {`},
	{`return time.Now().Add(FinalCheckAge - time.Second), j.c.fleet.Halted().On`, `if mutantOn("halt-bounds-no-retry") {
		return time.Time{}, j.c.fleet.Halted().On
	}
	return time.Now().Add(FinalCheckAge - time.Second), j.c.fleet.Halted().On`},
	{`|| w.failedExpires()`, `|| w.failedExpires() && !mutantOn("failed-never-expires")`},
	{`w.TLSCA, w.TLSPin, w.TLSInsecure = t.TLSCA, t.TLSPin, t.TLSInsecure`,
		`w.TLSCA, w.TLSPin, w.TLSInsecure = t.TLSCA, map[bool]string{false: t.TLSPin}[mutantOn("pin-not-inherited")], t.TLSInsecure`},
	{`w.RunningSince == nil && !found {`, `w.RunningSince == nil && !found && !mutantOn("no-first-snooze") {`},
	{`	if err != nil || received.Before(sent) {
		return Offset{}
	}
`, `	if err != nil || received.Before(sent) {
		return Offset{}
	}
	if mutantOn("cml-clock-trusted") {
		return Offset{Known: true, High: time.Second}
	}
`},

	{`	if !ok {
		return idle.NotKnown(SignalCPU, now, firstSample)
	}
`, `	if !ok {
		if mutantOn("first-sample-quiet") {
			return idle.Judge(SignalCPU, 0, percent, "%", 0, now)
		}
		return idle.NotKnown(SignalCPU, now, firstSample)
	}
`},
	{`	if !ok {
		return idle.NotKnown(signal, now, firstSample)
	}
`, `	if !ok {
		if mutantOn("first-sample-quiet") {
			return idle.Judge(signal, 0, 1, "", 0, now)
		}
		return idle.NotKnown(signal, now, firstSample)
	}
`},
	{`d <= int64(OwnWriteSpan/time.Second) {`, `(d <= int64(OwnWriteSpan/time.Second) || mutantOn("own-writes-wide") && d < 3600) && !mutantOn("own-writes-count") {`},
	{`		r.add(idle.NotKnown(name, r.at, "it did not answer in time"))
`, `		if mutantOn("silent-probe-quiet") {
			r.add(idle.Reading{Signal: name, State: idle.Quiet, At: r.at})
			continue
		}
		r.add(idle.NotKnown(name, r.at, "it did not answer in time"))
`},
	{`resumed := slept > 0 || jump > stepLimit
`, `resumed := (slept > 0 || jump > stepLimit) && !mutantOn("suspend-unnoticed")
`},
	{`r.readings[i].QuietSince = m.quietSince(&x, restarts)
`, `if !mutantOn("unread-quiet") && !mutantOn("first-sample-quiet") {
				r.readings[i].QuietSince = m.quietSince(&x, restarts)
			}
`},
	{`	end := a.state.SnoozedUntil
`, `	end := a.state.SnoozedUntil
	if mutantOn("completion-held-by-nothing") {
		return time.Time{}
	}
`},
	{`a.config.TTLAction, "This machine expires at " + t.Format(time.RFC3339) + ".", t.Format(time.RFC3339Nano), t})
`, `a.config.TTLAction, "This machine expires at " + t.Format(time.RFC3339) + ".", t.Format(time.RFC3339Nano), t})
		if mutantOn("ttl-held") {
			out[len(out)-1].at = later(t, a.heldUntil())
		}
`},
	{`	return later(d.at, sent.Add(a.config.WarnBefore), a.graceEnd())
`, `	if mutantOn("ttl-warned-late") && d.reason == reasonTTL {
		return later(d.at, a.graceEnd())
	}
	return later(d.at, sent.Add(a.config.WarnBefore), a.graceEnd())
`},
	{`		delete(a.state.Warned, reason) // the warning was before the suspend, so users must be warned again`, `		if mutantOn("not-warned-again") {
			break
		}
		delete(a.state.Warned, reason)`},
	{`if end := a.graceEnd(); now.Before(end) {`, `if end := a.graceEnd(); now.Before(end) && !mutantOn("no-boot-grace") {`},
	{`	b, err := a.o.Disk.Load(cacheFile)
`, `	b, err := a.o.Disk.Load(cacheFile)
	if mutantOn("cache-forgotten") {
		b, err = []byte("{}"), nil
	}
`},
	{`a.within(ctx, "read_tags", a.reread); err != nil {`, `a.within(ctx, "read_tags", a.reread); err != nil && !mutantOn("tags-not-reread") {`},
	{`func (a *Agent) reread(ctx context.Context) error {
`, `func (a *Agent) reread(ctx context.Context) error {
	if mutantOn("tags-not-reread") {
		return nil
	}
`},
	{`	for range 3 {
		if err := a.look1(ctx); err != nil {
			return err
		}
`, `	if mutantOn("agent-no-final-check") {
		return a.ask(ctx, func() { at.sent = true })
	}
	for range 3 {
		if err := a.look1(ctx); err != nil {
			return err
		}
`},
	{`func (a *Agent) stillRight(at *attempt) error {
`, `func (a *Agent) stillRight(at *attempt) error {
	if mutantOn("agent-no-final-check") {
		return nil
	}
`},

	{`	out = append(out, c.diskReading(base, s, now))
`, `	if !mutantOn("disk-unseen") {
		out = append(out, c.diskReading(base, s, now))
	}
`},
	{`		waits := !c.Accepted || c.Unread > 0 || owes(c, o.Endpoints)
`, `		waits := !c.Accepted || c.Unread > 0 || owes(c, o.Endpoints) && !mutantOn("pending-request-unseen")
`},
	{`	if !i.seen.unheard || len(s.Expose) > 0`, `	if mutantOn("sleeps-for-ever") || !i.seen.unheard || len(s.Expose) > 0`},
	{`func (h *Host) FleetHalt(x *idle.HaltedBy) error { return h.halts.SetFleet(x) }`, `func (h *Host) FleetHalt(x *idle.HaltedBy) error {
	if mutantOn("fleet-halt-not-for-hosts") {
		return nil
	}
	return h.halts.SetFleet(x)
}`},
	{`	a.state.FleetHalt = x
`, `	if mutantOn("fleet-halt-not-for-agents") {
		x = nil
	}
	a.state.FleetHalt = x
`},
}
