package agent

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"lull/internal/lib/segment"
	"lull/internal/protocol/agentctl"
)

// FileJournal stores the history in a ring of checksummed files. Most entries are
// written in batches, so a crash loses at most those of the last flushEvery. Actions
// are written and synced at once.
type FileJournal struct {
	log segment.Values[agentctl.Entry]

	mu      sync.Mutex
	flushed time.Time
}

// journalBytes is the maximum size of the history, enough for months.
const journalBytes = 32 << 20

// flushEvery is the interval at which entries are written unless one must be written
// at once. Entries about an idle machine must not keep its disk busy.
const flushEvery = 15 * time.Minute

// OpenJournal opens the history in dir. Damage left by a crash is cut off and
// reported.
func OpenJournal(dir string) (*FileJournal, []*segment.Damage, error) {
	log, damage, err := segment.OpenValues[agentctl.Entry](dir, segment.Options{SegmentBytes: 4 << 20, MaxBytes: journalBytes})
	if err != nil {
		return nil, damage, err
	}
	return &FileJournal{log: log}, damage, nil
}

// Append implements Journal.
func (j *FileJournal) Append(e agentctl.Entry) error {
	if err := j.log.Append(e.At, e); err != nil {
		return fmt.Errorf("cannot write an entry of the history: %w", err)
	}
	j.mu.Lock()
	due := e.Kind != "verdict" || e.At.Sub(j.flushed) >= flushEvery
	if due {
		j.flushed = e.At
	}
	j.mu.Unlock()
	if !due {
		return nil
	}
	return j.log.Sync()
}

// Entries implements Journal. If some records are unreadable, it returns the others
// together with an error.
func (j *FileJournal) Entries(q agentctl.HistoryQuery) ([]agentctl.Entry, error) {
	var out []agentctl.Entry
	var faults []error
	for e, err := range j.log.All(segment.From{Time: q.Since}) {
		if err != nil {
			faults = append(faults, err)
			continue
		}
		if within(q, e) {
			out = append(out, e)
			if q.Limit > 0 && len(out) > 2*q.Limit {
				out = append(out[:0], out[len(out)-q.Limit:]...)
			}
		}
	}
	if q.Limit > 0 && len(out) > q.Limit {
		out = out[len(out)-q.Limit:]
	}
	return out, errors.Join(faults...)
}

// Close makes the history durable.
func (j *FileJournal) Close() error { return j.log.Close() }

var _ Journal = (*FileJournal)(nil)

// MemoryJournal keeps the newest Most entries in memory. It is safe for
// concurrent use.
type MemoryJournal struct {
	Most int // 0 means 4096

	mu   sync.Mutex
	list []agentctl.Entry
}

var _ Journal = (*MemoryJournal)(nil)

// Append implements Journal.
func (j *MemoryJournal) Append(e agentctl.Entry) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	most := j.Most
	if most <= 0 {
		most = 4096
	}
	if len(j.list) >= most {
		j.list = append(j.list[:0], j.list[len(j.list)-most+1:]...)
	}
	j.list = append(j.list, e)
	return nil
}

// Entries implements Journal.
func (j *MemoryJournal) Entries(q agentctl.HistoryQuery) ([]agentctl.Entry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []agentctl.Entry
	for _, e := range j.list {
		if within(q, e) {
			out = append(out, e)
		}
	}
	if q.Limit > 0 && len(out) > q.Limit {
		out = out[len(out)-q.Limit:]
	}
	return out, nil
}

func within(q agentctl.HistoryQuery, e agentctl.Entry) bool {
	return (q.Since.IsZero() || !e.At.Before(q.Since)) && (q.Until.IsZero() || e.At.Before(q.Until))
}
