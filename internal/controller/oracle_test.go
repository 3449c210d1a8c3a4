package controller

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// onStop checks each stop when it takes effect: a worker in use must not be stopped.
func (d *day) onStop(id string, sent time.Time) {
	ctx := context.Background()
	wid, err := d.fleet.WorkerOf(ctx, region0, id)
	if err != nil || wid == "" {
		d.fault("stop of %s, which no worker owns: %v", id, err)
		return
	}
	w, err := d.fleet.Worker(ctx, wid)
	if err != nil {
		d.fault("cannot read %s: %v", wid, err)
		return
	}
	if w.Intent == nil || w.Intent.SentAt == nil || !w.Intent.Reason.ByIdleness() {
		return
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	d.mu.Lock()
	d.checked++
	d.mu.Unlock()
	m, now := d.world.insts[id], time.Now()
	timeout := time.Hour
	switch {
	case sent.Sub(m.answer) > FinalCheckAge:
		go d.fault("%s stopped on readings that are %s old", wid, sent.Sub(m.answer))
	case !m.known:
		go d.fault("%s stopped though its telemetry is unknown", wid)
	case now.Sub(m.newest) < timeout && !m.newest.IsZero():
		go d.fault("%s stopped %s after activity", wid, now.Sub(m.newest))
	case w.LastResumedAt != nil && now.Sub(*w.LastResumedAt) < timeout:
		go d.fault("%s stopped %s after its resume", wid, now.Sub(*w.LastResumedAt))
	case w.SnoozedUntil != nil && now.Before(*w.SnoozedUntil):
		go d.fault("%s stopped in a snooze", wid)
	}
}

// floor checks each transaction: one that pauses or drains a worker for idleness must
// leave at least minWorkers up.
func (d *day) floor(t store.Txn) {
	up, idle := -1, false
	for _, op := range t.Then {
		switch data := string(op.Data); {
		case op.Key == "pool":
			if _, rest, ok := strings.Cut(data, `"up":`); ok {
				up, _ = strconv.Atoi(rest[:strings.IndexAny(rest, ",}")])
			}
		case strings.HasPrefix(op.Key, "audit/"):
			idle = idle || (strings.Contains(data, `"action":"pause_intended"`) || strings.Contains(data, `"action":"drain_started"`)) &&
				(strings.Contains(data, `"reason":"idle_timeout"`) || strings.Contains(data, `"reason":"scale_down"`))
		}
	}
	if idle && up < d.p.minWorkers {
		go d.fault("a pause for idleness leaves %d up, the floor is %d", up, d.p.minWorkers)
	}
}

// judge checks that a worker that is idle, readable and not blocked is stopped within
// check interval and warning.
func (d *day) judge(u *user, w *worker.Worker) {
	now := time.Now()
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	m := d.world.insts[w.EC2InstanceID]
	pausable := m != nil && w.Status == power.WorkerRunning && w.DesiredStatus == power.WorkerRunning && !m.down && !m.optOut && m.State == "running"
	if pausable {
		base := w.CreatedAt
		for _, e := range m.events {
			if !e.arrives.After(now) && e.at.After(base) {
				base = e.at
			}
		}
		pausable = now.Sub(base) >= time.Hour && (w.LastResumedAt == nil || now.Sub(*w.LastResumedAt) >= time.Hour) &&
			(w.SnoozedUntil == nil || !now.Before(*w.SnoozedUntil))
	}
	if !pausable {
		u.since = time.Time{}
		return
	}
	if u.since.IsZero() {
		u.since = now
	}
	slack := 90 * time.Second
	if d.p.faults {
		// Two checks in a row may fail, and a warning that has lapsed by then is sent
		// again.
		slack += 13 * time.Minute
	}
	if d.p.crashes {
		slack += 5 * time.Minute // a new owner spreads its first checks
	}
	if up := now.Sub(u.since); up > 10*time.Minute+slack {
		go d.fault("%s is up %s after it could be paused: %s", w.ID, up, d.state(w.ID))
		u.since = now
	}
}

// state describes the owner's in-memory state of a worker, for failures.
func (d *day) state(id string) string {
	for _, s := range d.servers {
		if s.c == nil {
			continue
		}
		s.c.mu.Lock()
		e := s.c.entries[id]
		if e == nil || s.c.shards[e.shard] == nil {
			s.c.mu.Unlock()
			continue
		}
		out := fmt.Sprintf("running=%t queued=%t again=%t heap=%d due in %s, settled=%t seen=%s at -%s, failures=%d, next check in %s, fetched -%s, rev %d", e.running, e.queued, e.again, e.heap,
			time.Until(e.due), e.reconciled, e.seen, time.Since(e.seenAt), e.failures, time.Until(e.known().nextCheck), time.Since(e.known().fetchedAt), e.w.Revision())
		if v := e.known().verdict; v != nil {
			out += fmt.Sprintf(", verdict %+v", v.Blocks)
		}
		s.c.mu.Unlock()
		return out
	}
	return "no server owns it"
}

// finish checks the whole fleet when the day is over.
func (d *day) finish(ctx context.Context) {
	counted := 0
	for _, id := range d.ids {
		w, err := d.fleet.Worker(ctx, id)
		if err != nil {
			d.fault("%s is lost: %v", id, err)
			continue
		}
		if w.Counted() {
			counted++
		}
		if w.Status == power.WorkerFailed {
			d.failed++
		}
		if power.WorkerTable.IsTransitional(w.Status) && time.Since(w.StatusSince) > 20*time.Minute {
			d.fault("%s is stuck in %s since %s (%s)", id, w.Status, time.Since(w.StatusSince), w.StatusReason)
		}
		d.world.mu.Lock()
		m := d.world.insts[w.EC2InstanceID]
		runs := m != nil && m.State == "running"
		d.world.mu.Unlock()
		if runs && w.Status == power.WorkerStopped {
			d.fault("%s is STOPPED and its instance runs", id)
		}
	}
	if pool, err := d.fleet.Pool(ctx); err != nil || pool.Up != counted {
		d.fault("the pool counts %d up, %d are: %v", pool.Up, counted, err)
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	owners := map[string]int{}
	for token, n := range d.world.launchT {
		if n > 1 {
			d.fault("%s launched %d times", token, n)
		}
	}
	for id, m := range d.world.insts {
		if w := m.Tags["lull:worker-id"]; w != "" && m.State != "terminated" {
			if owners[w]++; owners[w] > 1 {
				d.fault("worker %s has a second instance %s", w, id)
			}
		}
	}
}

// audit replays every decision of the day, and checks the pause counters against the
// audit log.
func (d *day) audit(ctx context.Context) {
	counts, decisions := map[string][6]int64{}, 0
	row := map[string]int{"idle_timeout": 0, "schedule": 0, "ttl": 0, "scale_down": 0, "manual": 1, "external": 2}
	resume := map[string]int{"auto": 3, "manual": 4, "external": 5}
	q := audit.Query{Limit: 1000}
	for {
		page, err := d.fleet.Audit(ctx, q)
		if err != nil {
			d.fault("cannot read the audit log: %v", err)
			return
		}
		for _, e := range page.Entries {
			if e.Decision != nil {
				decisions++
				if err := e.Decision.Replay(); err != nil {
					d.fault("%s of %s: %v", e.Action, e.WorkerID, err)
				}
			}
			n := counts[e.WorkerID]
			switch e.Action {
			case "pause_intended", audit.DrainStarted, "external_pause":
				n[row[e.Reason]]++
			case "resumed":
				n[resume[e.Reason]]++
			}
			counts[e.WorkerID] = n
			if e.From != "" {
				if err := power.WorkerTable.Check(e.From, e.To); err != nil {
					d.fault("%s: %v", e.WorkerID, err)
				}
			}
			if e.Action == "pause_intended" && e.Reason == string(power.ReasonIdleTimeout) {
				if e.Decision == nil || !e.Decision.Verdict.Eligible {
					d.fault("%s was paused without an eligible verdict", e.WorkerID)
				}
			}
		}
		if q.After = page.Next; page.Next == "" {
			break
		}
	}
	if decisions == 0 {
		d.fault("the audit log holds no decision")
	}
	for _, id := range d.ids {
		if w, err := d.fleet.Worker(ctx, id); err == nil {
			has := [6]int64{w.AutoPauseCount, w.ManualPauseCount, w.ExternalPauseCount, w.AutoResumeCount, w.ManualResumeCount, w.ExternalResumeCount}
			if has != counts[id] {
				d.fault("%s counts %v, the log %v", id, has, counts[id])
			}
		}
	}
}

func (d *day) report() string {
	var s Stats
	for _, sv := range d.servers {
		n := sv.c.Stats()
		s.AutoPause += n.AutoPause
		s.PauseCancelled += n.PauseCancelled
		s.LateActions += n.LateActions
		s.LateActivity += n.LateActivity
		s.IdleDetection += n.IdleDetection
	}
	return fmt.Sprintf("seed %d: %d stops checked, %d workers FAILED, auto_pause %d, cancelled %d, late actions %d, late activity %d, checks %d, calls %v",
		d.p.seed, d.checked, d.failed, s.AutoPause, s.PauseCancelled, s.LateActions, s.LateActivity, s.IdleDetection, d.world.calls)
}
