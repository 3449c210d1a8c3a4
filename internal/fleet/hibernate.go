package fleet

import (
	"context"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
)

// PastPauses returns the durations of a worker's latest pauses that have ended,
// newest first, from the audit log. It returns at most worker.MostPauses.
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
		if len(out) == worker.MostPauses {
			break
		}
	}
	return out, nil
}
