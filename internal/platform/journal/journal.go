// Package journal keeps evidence on disk: the readings and the verdict of every
// check, run-length encoded, in a bounded ring of checksummed files.
//
// Guarantees. Taking a check never fails and never waits for the disk; records
// that cannot be written are counted, and the count is shown. A kill -9 loses at
// most the repeats of the last Beat and the records of the last SyncEvery, and
// the loss shows as missing time. A file that cannot be read costs only its own
// records, and is named. Queries over several servers are in
// internal/server/peers.
package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/lib/segment"
)

// Options bound a journal. Zero values mean the defaults of a server.
type Options struct {
	Keep      time.Duration // maximum age of a record; 0 means 30 days
	MaxBytes  int64         // total size of the files; 0 means 2 GiB
	Beat      time.Duration // interval at which repeats are written; 0 means 30 min
	SyncEvery time.Duration // time after which written records are on disk; 0 means 5 s
	Lazy      bool          // after SyncEvery, only hand the records to the kernel, which writes them to disk when it likes
	Log       *slog.Logger
}

// Journal keeps evidence on disk. Create it with Open. Its time limits apply only
// while Run is running. It is safe for concurrent use.
type Journal struct {
	dir  string
	opts Options
	log  *segment.Log
	rec  evidence.Recorder

	mu      sync.Mutex
	waiting []evidence.Record
	spare   []evidence.Record // an empty list for waiting; nil while it is in use
	taken   chan struct{}     // waiting is no longer empty
	writing sync.Mutex        // held while records are written, so that they keep their order

	dirty                atomic.Bool
	checks, records, bad atomic.Int64
	fault                atomic.Pointer[string]
}

// Open opens or creates the journal in dir. It cuts off records that a crash left
// incomplete, and returns the damage.
func Open(dir string, o Options) (*Journal, []*segment.Damage, error) {
	o.Keep, o.Beat = cmp.Or(o.Keep, 30*24*time.Hour), cmp.Or(o.Beat, 30*time.Minute)
	o.SyncEvery, o.MaxBytes = cmp.Or(o.SyncEvery, 5*time.Second), cmp.Or(o.MaxBytes, 2<<30)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	log, damage, err := segment.Open(dir, segment.Options{SegmentBytes: min(8<<20, max(o.MaxBytes/8, 64<<10)), SegmentAge: max(o.Keep/30, time.Hour), MaxBytes: o.MaxBytes})
	if err != nil {
		return nil, damage, err
	}
	return &Journal{dir: dir, opts: o, log: log, taken: make(chan struct{}, 1), rec: evidence.Recorder{Beat: o.Beat}}, damage, nil
}

// OpenLogged is Open that logs the damage to o.Log, which must be set.
func OpenLogged(dir string, o Options) (*Journal, error) {
	j, damage, err := Open(dir, o)
	for _, d := range damage {
		o.Log.Warn("evidence was corrupt and has been truncated", "damage", d)
	}
	return j, err
}

// maxWaiting is the maximum number of checks waiting for the disk.
const maxWaiting = 100_000

// maxSpare is the maximum size of a list that is used again.
const maxSpare = 256

// Take records a check or a change. It never waits for the disk.
func (j *Journal) Take(r evidence.Record) {
	j.checks.Add(1)
	j.mu.Lock()
	first, full := len(j.waiting) == 0, len(j.waiting) >= maxWaiting
	if !full {
		j.waiting = append(j.waiting, r)
	}
	j.mu.Unlock()
	if first {
		select {
		case j.taken <- struct{}{}:
		default:
		}
	}
	if full {
		j.lost(errors.New("the disk is too slow"))
	}
}

// drain writes the waiting records, in order.
func (j *Journal) drain() {
	j.writing.Lock()
	defer j.writing.Unlock()
	j.mu.Lock()
	list := j.waiting
	j.waiting, j.spare = j.spare, nil
	j.mu.Unlock()
	for _, r := range list {
		j.write(j.rec.Take(r))
	}
	if clear(list); cap(list) <= maxSpare {
		j.mu.Lock()
		j.spare = list[:0]
		j.mu.Unlock()
	}
}

// lost counts a record that could not be written, and logs the first such error.
func (j *Journal) lost(err error) {
	why := err.Error()
	j.bad.Add(1)
	if old := j.fault.Swap(&why); old == nil || *old != why {
		j.opts.Log.Error("evidence cannot be stored; decisions continue without it", "err", err)
	}
}

func (j *Journal) write(list []evidence.Record) {
	for _, r := range list {
		b, err := r.Pack()
		if err == nil {
			_, err = j.log.Append(r.At, b)
		}
		if err != nil {
			j.lost(err)
			continue
		}
		j.records.Add(1)
		j.fault.Store(nil)
	}
	if len(list) > 0 {
		j.dirty.Store(true)
	}
}

// String returns the journal's name as a task.
func (j *Journal) String() string { return "the evidence journal" }

// Run writes what is due and drops what is too old, until ctx ends. While no check
// is taken and no run is open, it wakes once an hour.
func (j *Journal) Run(ctx context.Context) error {
	swept := time.Now()
	for {
		next := swept.Add(time.Hour)
		if j.rec.Open() {
			next = swept.Add(max(time.Minute, j.opts.SyncEvery))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(next)):
		case <-j.taken:
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(j.opts.SyncEvery):
			}
		}
		pprof.Do(ctx, pprof.Labels("part", "evidence"), func(context.Context) { j.drain() })
		now := time.Now()
		if now.Sub(swept) >= time.Minute {
			swept = now
			j.writing.Lock()
			j.write(j.rec.Overdue(now))
			j.writing.Unlock()
			if _, err := j.log.Drop(now.Add(-j.opts.Keep)); err != nil {
				j.opts.Log.Error("old evidence cannot be dropped", "err", err)
			}
		}
		if j.dirty.Swap(false) {
			sync := j.log.Sync
			if j.opts.Lazy {
				sync = j.log.Flush
			}
			if err := sync(); err != nil {
				j.opts.Log.Error("evidence cannot be made durable", "err", err)
			}
		}
	}
}

// Close writes everything queued and releases the journal. Take must not be
// called afterwards.
func (j *Journal) Close() error {
	j.drain()
	j.write(j.rec.Flush())
	return j.log.Close()
}

// Read passes the records of q to yield, oldest first, including runs that began
// before q.From and may have lasted into it. It returns the time ranges that are
// missing because files are damaged or too old to be kept.
func (j *Journal) Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	j.drain()
	// Read the records in memory first. If a record is written to a file in
	// between, it is yielded twice rather than never.
	pending := j.rec.Pending(q.Object)
	from := q.From
	if !from.IsZero() {
		from = from.Add(-2*j.opts.Beat - time.Hour)
	}
	var missing []evidence.Missing
	var last time.Time // time of the previous record
	var torn []int     // indexes of missing ranges whose end is unknown
	known := func(at time.Time) {
		for _, i := range torn {
			missing[i].To = at
		}
		torn, last = nil, at
	}
	for rec, err := range j.log.Records(segment.From{Time: from}) {
		if ctx.Err() != nil {
			return missing, context.Cause(ctx)
		}
		if d, ok := errors.AsType[*segment.Damage](err); ok {
			torn = append(torn, len(missing))
			missing = append(missing, evidence.Missing{From: last, Why: d.Error()})
			continue
		}
		if err != nil {
			return missing, fmt.Errorf("cannot read the evidence: %w", err)
		}
		if last.IsZero() && !q.From.IsZero() && rec.Time.After(q.From) && j.log.First() > 1 {
			missing = append(missing, evidence.Missing{From: q.From, To: rec.Time, Why: "it is older than the retained records"})
		}
		known(rec.Time)
		if !q.To.IsZero() && rec.Time.After(q.To.Add(2*j.opts.Beat+time.Hour)) {
			break
		}
		object, _, err := evidence.ObjectOf(rec.Payload)
		if err == nil && q.Object != "" && string(object) != q.Object {
			continue
		}
		var r evidence.Record
		if err == nil {
			r, err = evidence.Unpack(rec.Payload)
		}
		if err != nil {
			missing = append(missing, evidence.Missing{From: rec.Time, To: rec.Time, Why: err.Error()})
			continue
		}
		if err := yield(r); err != nil {
			return missing, err
		}
	}
	if len(torn) > 0 {
		known(time.Now())
	}
	for _, r := range pending {
		if err := yield(r); err != nil {
			return missing, err
		}
	}
	return missing, nil
}

// Stats are the counters of a journal since it was opened.
type Stats struct {
	Checks  int64  `json:"checks"`
	Records int64  `json:"records"`
	Lost    int64  `json:"lost"` // records that could not be written
	Bytes   int64  `json:"bytes"`
	Fault   string `json:"fault,omitempty"`
}

// Stats returns the present counters.
func (j *Journal) Stats() Stats {
	s := Stats{Checks: j.checks.Load(), Records: j.records.Load(), Lost: j.bad.Load(), Bytes: j.log.Size()}
	if f := j.fault.Load(); f != nil {
		s.Fault = *f
	}
	return s
}
