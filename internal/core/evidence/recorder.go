package evidence

import (
	"slices"
	"sync"
	"time"

	"lull/internal/core/idle"
)

// Recorder turns checks into records: one when something changes, one when a run
// of equal checks ends, and one per Beat during the run, so that a crash loses
// little. It is safe for concurrent use.
type Recorder struct {
	Beat time.Duration // maximum time a run stays unwritten; > 0

	mu   sync.Mutex
	runs map[string]*run
}

// run is a series of checks of an object with the same result.
type run struct {
	began time.Time
	kept  time.Time // time of the last record
	last  Record    // last check
	more  int       // checks since the last record
}

// Take takes a check or a change and returns the records to write now.
func (r *Recorder) Take(rec Record) []Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.runs == nil {
		r.runs = map[string]*run{}
	}
	old := r.runs[rec.Object]
	if rec.Change != nil {
		delete(r.runs, rec.Object)
		return append(old.end(), rec)
	}
	if old != nil && Continues(&old.last, &rec) {
		rec.Activity = append(old.last.Activity, rec.Activity...)
		rec.Levels = old.last.Levels.with(rec.Levels)
		old.last = rec
		old.more++
		if rec.At.Sub(old.kept) < r.Beat && !moved(&rec) {
			return nil
		}
		return old.end()
	}
	out := old.end()
	rec.Since, rec.Checks = time.Time{}, 1
	r.runs[rec.Object] = &run{began: rec.At, kept: rec.At, last: rec}
	r.runs[rec.Object].last.Activity, r.runs[rec.Object].last.Levels = nil, nil
	return append(out, rec)
}

// moved reports whether a check brings so many times of use that it must be
// written at once.
func moved(rec *Record) bool { return len(rec.Activity) >= 64 }

// end returns the last check of a run, or nothing if it was already written.
func (u *run) end() []Record {
	if u == nil || u.more == 0 {
		return nil
	}
	out := u.last
	out.Since, out.Checks = u.began, u.more
	u.more, u.kept, u.last.Activity, u.last.Levels = 0, out.At, nil, nil
	return []Record{out}
}

// Overdue returns the records that must be written although no new check arrived,
// and drops runs that have ended.
func (r *Recorder) Overdue(now time.Time) []Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Record
	for object, u := range r.runs {
		if now.Sub(u.kept) >= r.Beat {
			out = append(out, u.end()...)
		}
		if now.Sub(u.last.At) > r.Beat+2*u.last.Next.Sub(u.last.At) {
			out = append(out, u.end()...)
			delete(r.runs, object)
		}
	}
	slices.SortFunc(out, func(a, b Record) int { return a.At.Compare(b.At) })
	return out
}

// Open reports whether any object has a run.
func (r *Recorder) Open() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.runs) > 0
}

// Flush returns the records of all checks that are not yet written.
func (r *Recorder) Flush() []Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Record
	for _, u := range r.runs {
		out = append(out, u.end()...)
	}
	slices.SortFunc(out, func(a, b Record) int { return a.At.Compare(b.At) })
	return out
}

// Pending returns, for one object or for all if object is empty, the last check
// that is not yet in a record.
func (r *Recorder) Pending(object string) []Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Record
	for name, u := range r.runs {
		if u.more > 0 && (object == "" || object == name) {
			rec := u.last
			rec.Since, rec.Checks, rec.Activity = u.began, u.more, slices.Clone(rec.Activity)
			out = append(out, rec)
		}
	}
	slices.SortFunc(out, func(a, b Record) int { return a.At.Compare(b.At) })
	return out
}

// slack returns the latest time at which the next check still counts as on time:
// after twice the planned interval, and at least half a minute late.
func slack(r *Record) time.Time {
	return r.Next.Add(max(r.Next.Sub(r.At), 30*time.Second))
}

// Continues reports whether check b continues the run of a: both have the same
// policy, blocks, holds and signal states, activity happened at least every
// second check interval, and no check was missed in between.
func Continues(a, b *Record) bool {
	if b.At.After(slack(a)) || !samePolicy(a.Policy, b.Policy) {
		return false
	}
	va, vb := &a.Verdict, &b.Verdict
	if va.IsIdle != vb.IsIdle || va.Eligible != vb.Eligible || va.InSnoozePeriod != vb.InSnoozePeriod || len(va.Blocks) != len(vb.Blocks) {
		return false
	}
	for i := range va.Blocks {
		x, y := &va.Blocks[i], &vb.Blocks[i]
		if x.Code != y.Code || x.Signal != y.Signal || x.Holder != y.Holder {
			return false
		}
	}
	x, y := va.LastActivityAt, vb.LastActivityAt
	if (x == nil) != (y == nil) || x != nil && !x.Equal(*y) && !steady(*x, *y, b) {
		return false
	}
	return sameEvidence(&a.Evidence, &b.Evidence)
}

// steady reports whether use continued from x to y without a gap that would
// matter to any policy.
func steady(x, y time.Time, b *Record) bool {
	most := 2 * time.Duration(b.Policy.CheckInterval)
	for _, t := range append(slices.Clone(b.Activity), y) {
		if t.After(x) {
			if t.Sub(x) > most {
				return false
			}
			x = t
		}
	}
	return true
}

func samePolicy(a, b idle.Policy) bool {
	same := slices.Equal(a.Signals, b.Signals) && (a.Signals == nil) == (b.Signals == nil)
	a.Signals, b.Signals = nil, nil
	return same && a.Name == b.Name && a.Timeout == b.Timeout && a.Snooze == b.Snooze && a.WarnBefore == b.WarnBefore &&
		a.CheckInterval == b.CheckInterval && a.Detection == b.Detection && a.AutoPause == b.AutoPause && a.Action == b.Action
}

func sameEvidence(a, b *idle.Evidence) bool {
	if a.Status != b.Status || a.Running != b.Running || !a.LastResumedAt.Equal(b.LastResumedAt) || !a.CreatedAt.Equal(b.CreatedAt) || !a.RunningSince.Equal(b.RunningSince) ||
		!a.SnoozedUntil.Equal(b.SnoozedUntil) || !a.WarningSentAt.Equal(b.WarningSentAt) || (a.Connections > 0) != (b.Connections > 0) ||
		len(a.Readings) != len(b.Readings) || len(a.Leases) != len(b.Leases) || len(a.Guards) != len(b.Guards) {
		return false
	}
	for i := range a.Readings {
		x, y := &a.Readings[i], &b.Readings[i]
		if x.Signal != y.Signal || x.State != y.State || x.Threshold != y.Threshold && x.Window == y.Window {
			return false
		}
	}
	for i := range a.Leases {
		x, y := a.Leases[i], b.Leases[i]
		if x.Holder != y.Holder || !x.ExpiresAt.Equal(y.ExpiresAt) {
			return false
		}
	}
	for i := range a.Guards {
		if a.Guards[i].Code != b.Guards[i].Code {
			return false
		}
	}
	return true
}
