package fleet

import (
	"context"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
)

// Parameters of pause_action auto.
const (
	// HibernateWithin is the longest pause for which hibernation is worthwhile.
	// An instance is billed while its memory is written, in return for a faster
	// resume. After a weekend, no user needs what was in memory.
	HibernateWithin = 48 * time.Hour
	// leastPauses is the minimum number of pauses for a prediction, and
	// mostPauses the maximum number considered.
	leastPauses = 3
	mostPauses  = 20
)

// PastPauses returns the durations of a worker's last pauses that have ended,
// newest first, from the audit log: at most mostPauses.
func (f *Fleet) PastPauses(ctx context.Context, id string) ([]time.Duration, error) {
	page, err := f.NewestAudit(ctx, audit.Query{WorkerID: id, Limit: 500})
	if err != nil {
		return nil, err
	}
	var out []time.Duration
	var ended time.Time
	for _, e := range page.Entries {
		switch {
		case e.From == power.WorkerStopped && e.To != power.WorkerTerminating:
			ended = e.At
		case e.To == power.WorkerStopped && !ended.IsZero():
			out, ended = append(out, ended.Sub(e.At)), time.Time{}
		}
		if len(out) == mostPauses {
			break
		}
	}
	return out, nil
}

// HibernatePays reports whether the next pause is expected to be short enough
// for hibernation, and why: whether the median of pauses is.
func HibernatePays(pauses []time.Duration) (bool, string) {
	if len(pauses) < leastPauses {
		return false, fmt.Sprintf("%d of its pauses are known, %d are needed to expect how long one is", len(pauses), leastPauses)
	}
	sorted := slices.Sorted(slices.Values(pauses))
	expected := sorted[len(sorted)/2]
	how := "at most"
	if expected > HibernateWithin {
		how = "more than"
	}
	return expected <= HibernateWithin, fmt.Sprintf("its last %d pauses were %s long (median), %s %s", len(pauses), idle.Human(expected), how, idle.Human(HibernateWithin))
}
