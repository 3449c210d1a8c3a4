// Package audit implements the audit log: each change, with who made it and why. An
// entry also carries the domain events of its change, and is written in the same
// transaction.
package audit

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet/warning"
	"lull/internal/store"
)

// Actor identifies who caused a change.
type Actor struct {
	Name string `json:"name"`
	Kind string `json:"kind"` // one of the Kind constants
}

// Kinds of actors.
const (
	KindUser       = "person"
	KindController = "controller"
	KindAgent      = "agent"
	KindWake       = "wake"
	KindSchedule   = "schedule"
	KindCloud      = "cloud"
)

// ByController is the actor of lull's own decisions, ByCloud the actor of
// changes made outside lull.
var (
	ByController = Actor{Name: "worker-controller", Kind: KindController}
	ByCloud      = Actor{Name: "cloud", Kind: KindCloud}
)

// Names of domain events, as used in the event stream and webhooks.
const (
	EventCreated        = "worker.created"
	EventImported       = "worker.imported"
	EventActivity       = "worker.activity.updated"
	EventPaused         = "worker.paused"
	EventResumed        = "worker.resumed"
	EventStatus         = "worker.status.updated"
	EventDrained        = "worker.drained"
	EventLicense        = "worker.license.updated"
	EventDetection      = "worker.idle_detection.toggled"
	EventPauseWarning   = "worker.pause_warning"
	EventUnknownSignal  = "worker.signal_unknown"
	EventLateAction     = "worker.late_action"
	EventLateActivity   = "worker.late_activity"
	EventPauseCancelled = "worker.pause_cancelled"
	EventStartWithdrawn = "worker.start_withdrawn"
	EventRules          = "rules.updated" // a policy, schedule, group, override or budget
)

// Audit actions of scaling. Other actions are named where they are written.
const (
	Provisioned     = "provisioned"
	ProvisionFailed = "provision_failed"
	DrainStarted    = "drain_started"
	Drained         = "drained"
	DrainCancelled  = "drain_cancelled"
	StartWithdrawn  = "start_withdrawn"

	SkippedAutoPause   = "skipped_auto_pause"
	SkippedNotIdle     = "skipped_not_idle"
	SkippedNotEligible = "skipped_not_eligible"
	SkippedMinWorkers  = "skipped_min_workers"
	SkippedCooldown    = "skipped_cooldown"
)

// Entry is one entry of the audit log, with its domain events. It is written in
// the transaction of the change that it describes.
type Entry struct {
	// ID is the store revision of the change. Entries of one change share it. A
	// stream carries the ID only with the last of them.
	ID         int64              `json:"id"`
	At         time.Time          `json:"at"`
	Action     string             `json:"action"`
	Events     []string           `json:"events,omitempty"`
	By         Actor              `json:"by"`
	WorkerID   string             `json:"worker_id,omitempty"`
	WorkerName string             `json:"worker_name,omitempty"`
	Region     string             `json:"aws_region,omitempty"`
	From       power.Worker       `json:"from,omitempty"`
	To         power.Worker       `json:"to,omitempty"`
	Reason     string             `json:"reason,omitempty"`
	Detail     string             `json:"detail,omitempty"`
	Generation int64              `json:"generation,omitempty"`
	Decision   *evidence.Decision `json:"decision,omitempty"`
	Policy     string             `json:"policy,omitempty"`  // policy that applied when the pause was decided
	Warning    *warning.Warning   `json:"warning,omitempty"` // the warning of a pause_warning
}

var entryCodec = store.Codec[Entry]{Version: 1}

// Pauses reports whether the entry records the decision to pause or drain the
// worker, with the cause in Reason.
func (e *Entry) Pauses() bool {
	return e.Action == DrainStarted || slices.Contains(e.Events, EventPaused)
}

// DecodeEntry decodes an entry from a watch or a listing.
func DecodeEntry(v store.Value) (Entry, error) {
	e, err := entryCodec.Decode(v.Key, v.Data)
	e.ID = v.ModRevision
	return e, err
}

// auditPrefix begins the keys of entries.
const auditPrefix = "audit/"

// Keys returns the keys of the audit log, for the event stream.
func Keys() store.Keys { return store.Prefix(auditPrefix) }

// EventID returns the ID of an event. It consists of the ID of its entry, whose
// key in the log is key, and the event's index in the entry. It is the same at
// every delivery.
func EventID(key string, index int) string {
	return strings.TrimPrefix(key, auditPrefix) + "." + strconv.Itoa(index)
}

const timeLayout = "20060102T150405.000000000"

// Ops returns the writes of e: the entry, whose key sorts by time, and its marks,
// which index it by worker and by power.
func Ops(e Entry) ([]store.Op, error) {
	if e.At.IsZero() {
		e.At = time.Now()
	}
	e.At = e.At.UTC().Round(0)
	name := e.At.Format(timeLayout) + "-" + rand.Text()[:12]
	data, err := entryCodec.Encode(auditPrefix+name, e)
	if err != nil {
		return nil, err
	}
	marks, err := marksOf(&e, name)
	return append([]store.Op{store.Put(auditPrefix+name, data)}, marks...), err
}

// Log is the audit log in a store. Its writes fail unless all guards hold.
type Log struct {
	store  store.Store
	guards []store.Cond
}

// New returns the log in a store.
func New(s store.Store, guards ...store.Cond) *Log { return &Log{s, guards} }

// Query selects entries. Empty fields select all.
type Query struct {
	WorkerID string
	Action   string
	By       string    // a part of the actor's name, in any case
	Kind     string    // one of the Kind constants
	From, To time.Time // half open; zero is no bound
	After    string    // the cursor of the previous page
	Limit    int       // 0 means 100, at most 1000
}

// Page is one page of the log. Next is empty at the end.
type Page struct {
	Entries []Entry `json:"entries"`
	Next    string  `json:"next,omitempty"`
}

// all reports whether q selects every entry in the range of keys that it reads.
func (q *Query) all() bool { return q.Action == "" && q.By == "" && q.Kind == "" }

// Takes reports whether q selects an entry whose worker and time already match.
func (q *Query) Takes(e *Entry) bool {
	return (q.Action == "" || e.Action == q.Action) && (q.Kind == "" || e.By.Kind == q.Kind) &&
		(q.By == "" || strings.Contains(strings.ToLower(e.By.Name), strings.ToLower(q.By)))
}

// checked returns q with the default limit applied. Errors: Invalid.
func (q Query) checked() (Query, error) {
	switch {
	case q.Limit == 0:
		q.Limit = 100
	case q.Limit < 0 || q.Limit > 1000:
		return q, failure.Invalidf("limit", "%d is not between 1 and 1000", q.Limit)
	}
	if len(q.After) > maxCursor {
		return q, failure.Invalidf("after", "it is not a cursor")
	}
	return q, nil
}

// Audit returns a page of the log, oldest first. It reads at most maxScanned entries,
// so a page may be short or empty although Next is set. Errors: Invalid, and those of
// the store.
func (log *Log) Audit(ctx context.Context, q Query) (Page, error) {
	q, err := q.checked()
	if err != nil {
		return Page{}, err
	}
	read := reader{log: log, q: q, after: q.After}
	if read.after == "" && !q.From.IsZero() {
		read.after = q.From.UTC().Format(timeLayout)
	}
	var out Page
	for {
		e, more, err := read.next(ctx, q.Limit-len(out.Entries))
		if err != nil {
			return out, err
		}
		if !more {
			if read.bounded {
				out.Next = read.after
			}
			return out, nil
		}
		if out.Entries = append(out.Entries, e); len(out.Entries) == q.Limit {
			out.Next = read.after
			return out, nil
		}
	}
}

// ExportAudit writes all entries that q selects as JSON lines.
func (log *Log) ExportAudit(ctx context.Context, w io.Writer, q Query) error {
	return log.eachPage(ctx, q, func(l []Entry) error { return writeLines(w, l) })
}

// ExportAuditCSV writes all entries that q selects as a table, without the evidence
// of decisions.
func (log *Log) ExportAuditCSV(ctx context.Context, w io.Writer, q Query) error {
	table := csv.NewWriter(w)
	err := table.Write([]string{"at", "id", "action", "worker", "worker_id", "aws_region", "by", "by_kind", "from", "to", "reason", "detail"})
	if err != nil {
		return fmt.Errorf("cannot write the CSV of the audit log: %w", err)
	}
	return log.eachPage(ctx, q, func(l []Entry) error {
		for _, e := range l {
			if err := table.Write([]string{e.At.Format(time.RFC3339Nano), strconv.FormatInt(e.ID, 10), e.Action, asText(e.WorkerName), e.WorkerID, e.Region,
				asText(e.By.Name), e.By.Kind, string(e.From), string(e.To), asText(e.Reason), asText(e.Detail)}); err != nil {
				return fmt.Errorf("cannot write the CSV of the audit log: %w", err)
			}
		}
		if table.Flush(); table.Error() != nil {
			return fmt.Errorf("cannot write the CSV of the audit log: %w", table.Error())
		}
		return nil
	})
}

// asText escapes text that a spreadsheet would interpret as a formula, because names
// and reasons are user input.
func asText(s string) string {
	if s != "" && strings.ContainsRune("=+-@\t\r", rune(s[0])) {
		return "'" + s
	}
	return s
}

func (log *Log) eachPage(ctx context.Context, q Query, yield func([]Entry) error) error {
	q.Limit = 1000
	for {
		page, err := log.Audit(ctx, q)
		if err != nil {
			return err
		}
		if err := yield(page.Entries); err != nil {
			return err
		}
		if q.After = page.Next; page.Next == "" {
			return nil
		}
	}
}

func writeLines(w io.Writer, entries []Entry) error {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	for _, e := range entries {
		if err := enc.Encode(e); err != nil {
			return fmt.Errorf("cannot write the CSV of the audit log: %w", err)
		}
	}
	if _, err := w.Write(buf.Bytes()); err != nil {
		return fmt.Errorf("cannot write the CSV of the audit log: %w", err)
	}
	return nil
}

// Trim removes the oldest entries: those older than age, and those that make the log
// larger than keep bytes. archive must store them first. It returns how many were
// removed.
func (log *Log) Trim(ctx context.Context, now time.Time, age time.Duration, keep int64, archive func([]Entry) error) (int, error) {
	total, err := log.auditSize(ctx)
	if err != nil {
		return 0, err
	}
	removed := 0
	for {
		page, err := log.store.Range(ctx, store.Query{Keys: store.Prefix(auditPrefix), Limit: store.MaxOps / 3})
		if err != nil {
			return removed, fmt.Errorf("cannot trim the audit log: %w", err)
		}
		var old []Entry
		var ops []store.Op
		for _, v := range page.Values {
			e, err := DecodeEntry(v)
			if err != nil {
				return removed, err
			}
			if now.Sub(e.At) <= age && total <= keep {
				break
			}
			total -= int64(len(v.Data) + len(v.Key))
			old, ops = append(old, e), append(ops, store.Delete(v.Key))
			marks, err := marksOf(&e, strings.TrimPrefix(v.Key, auditPrefix))
			if err != nil {
				return removed, err
			}
			for _, m := range marks {
				ops = append(ops, store.Delete(m.Key))
			}
		}
		if len(ops) == 0 {
			return removed, nil
		}
		if err := archive(old); err != nil {
			return removed, fmt.Errorf("cannot archive the audit log: %w", err)
		}
		if _, err := log.store.Commit(ctx, store.Txn{If: log.guards, Then: ops}); err != nil {
			return removed, fmt.Errorf("cannot trim the audit log: %w", err)
		}
		removed += len(old)
	}
}

func (log *Log) auditSize(ctx context.Context) (int64, error) {
	total, after := int64(0), ""
	for {
		page, err := log.store.Range(ctx, store.Query{Keys: store.Prefix(auditPrefix), After: after, Limit: 500})
		if err != nil {
			return 0, fmt.Errorf("cannot measure the audit log: %w", err)
		}
		for _, v := range page.Values {
			total += int64(len(v.Data) + len(v.Key))
			after = v.Key
		}
		if !page.More {
			return total, nil
		}
	}
}
