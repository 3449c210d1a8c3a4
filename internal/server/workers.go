package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/roster"
)

// One is the path of a worker. Embedded parameters must be exported: huma ignores
// others.
type One struct {
	ID string `path:"worker_id" maxLength:"128" doc:"Id of a worker"`
}

// Paged are the query parameters for one page of a listing.
type Paged struct {
	After string `query:"after" maxLength:"300" doc:"Cursor: next from the previous page"`
	Limit int    `query:"limit" minimum:"1" maximum:"1000" default:"100"`
}

// Selected are the query parameters that select workers.
type Selected struct {
	Text       string   `query:"q" maxLength:"128" doc:"Text in the name, an id, an address, a tag, the owner or the template, case-insensitive"`
	Name       string   `query:"name" maxLength:"128" doc:"Exactly this name"`
	Region     string   `query:"aws_region" maxLength:"32"`
	Short      string   `query:"region" maxLength:"32" doc:"The same as aws_region"`
	Status     []string `query:"status,explode" maxItems:"11" enum:"PENDING,PROVISIONING,STARTING,RUNNING,DRAINING,STOPPING,STOPPED,TERMINATING,TERMINATED,FAILED,UNKNOWN" doc:"Repeatable"`
	Template   string   `query:"template" maxLength:"128"`
	Owner      string   `query:"owner" maxLength:"256"`
	Tag        []string `query:"tag,explode" maxItems:"10" doc:"name=value, or name for any value"`
	Terminated bool     `query:"terminated" doc:"Include terminated workers"`
}

func (q *Selected) query(ctx context.Context) roster.Query {
	out := roster.Query{Name: q.Name, Text: q.Text, Filter: worker.Filter{
		Region: cmp.Or(regionOf(ctx), q.Region, q.Short), Template: q.Template, Owner: q.Owner, WithTerminated: q.Terminated}}
	for _, status := range q.Status {
		out.Statuses = append(out.Statuses, power.Worker(status))
	}
	for _, t := range q.Tag {
		name, value, _ := strings.Cut(t, "=")
		if out.Tags == nil {
			out.Tags = map[string]string{}
		}
		out.Tags[name] = value
	}
	return out
}

type workerList struct {
	Paged
	Selected
	Sort string `query:"sort" enum:"id,name" default:"id"`
}

// shown returns a worker as the API's answer.
func shown(w worker.Worker, err error) (*answer[worker.Worker], error) {
	if err != nil {
		return nil, problem(err)
	}
	return &answer[worker.Worker]{Status: http.StatusOK, ETag: etag(w.Revision()), Body: w.Public()}, nil
}

// accepted returns the answer to a command: 202 while it is unfinished.
func accepted(w worker.Worker, err error) (*answer[worker.Worker], error) {
	a, err := shown(w, err)
	if err == nil && !finished(&w) {
		a.Status, a.Location = http.StatusAccepted, workersPath+"/"+w.ID
	}
	return a, err
}

// finished reports whether a worker has reached its desired status.
func finished(w *worker.Worker) bool {
	return w.Status == w.DesiredStatus && w.Intent == nil && w.License.PendingOperation == "" || w.Status == power.WorkerFailed
}

func etag(revision int64) string { return `"` + strconv.FormatInt(revision, 10) + `"` }

// revisionOf parses If-Match; 0 means any revision.
func revisionOf(match string) (int64, error) {
	if match == "" || match == "*" {
		return 0, nil
	}
	n, err := strconv.ParseInt(strings.Trim(strings.TrimPrefix(match, "W/"), `"`), 10, 64)
	if err != nil || n <= 0 {
		return 0, fault(http.StatusUnprocessableEntity, "invalid", "cannot use If-Match: not an ETag of this API",
			&huma.ErrorDetail{Message: "not an ETag of this API", Location: "header.If-Match"})
	}
	return n, nil
}

func (s *Server) workerRoutes() {
	register(s, route{id: "list-workers", method: "GET", path: workersPath, role: access.Viewer, doc: "Workers, page by page, with how many there are in all"},
		func(ctx context.Context, in *workerList) (*answer[control.List[worker.Worker]], error) {
			return ok(s.listWorkers(ctx, in))
		})
	register(s, route{id: "create-worker", method: "POST", path: workersPath, role: access.Admin, status: http.StatusAccepted, long: true,
		doc: "Record a worker that is launched from a template"},
		func(ctx context.Context, in *struct{ Body fleet.NewWorker }) (*answer[worker.Worker], error) {
			if err := intoRegionOf(ctx, &in.Body.AWSRegion); err != nil {
				return nil, problem(err)
			}
			if err := s.hasRegion(ctx, in.Body.Account, in.Body.AWSRegion); err != nil {
				return nil, problem(err)
			}
			return accepted(s.createOnce(ctx, in.Body))
		})
	register(s, route{id: "import-worker", method: "POST", path: workersPath + "/import", role: access.Admin, status: http.StatusAccepted, long: true,
		doc: "Import an EC2 instance, from the given region or else from the discovery regions; it stays in dry-run mode until it is armed"},
		func(ctx context.Context, in *struct{ Body fleet.ImportedWorker }) (*answer[worker.Worker], error) {
			return accepted(s.importWorker(ctx, in.Body))
		})
	register(s, route{id: "list-discovered", method: "GET", path: workersPath + "/discovered", role: access.Viewer, doc: "Instances that discovery found and that are not workers yet, and a summary of the last scan"},
		func(ctx context.Context, _ *struct{}) (*answer[control.ListDiscovered], error) {
			items, err := s.fleet.Discovered(ctx)
			if err != nil {
				return nil, problem(err)
			}
			scan, err := s.fleet.LastScan(ctx)
			return ok(control.ListDiscovered{List: control.List[fleet.Discovered]{Items: items}, Scan: scan}, err)
		})
	register(s, route{id: "get-worker", method: "GET", path: workersPath + "/{worker_id}", role: access.Viewer, doc: "One worker"},
		func(ctx context.Context, in *One) (*answer[worker.Worker], error) {
			a, err := shown(s.fleet.Worker(ctx, in.ID))
			if err != nil {
				return nil, err
			}
			var st worker.IdleStatus
			seen, known := s.observe(ctx, in.ID)
			if known = known && seen.Status != nil; known {
				st = *seen.Status
			}
			a.Body = asSeen(a.Body, st, known)
			return s.ending(ctx, a)
		})
	register(s, route{id: "update-worker", method: "PATCH", path: workersPath + "/{worker_id}", role: access.Operator, doc: "Change user-set fields; If-Match guards against concurrent changes"},
		func(ctx context.Context, in *struct {
			One
			Match string `header:"If-Match" maxLength:"40"`
			Body  worker.Profile

			RawBody []byte
		}) (*answer[worker.Worker], error) {
			at, err := revisionOf(in.Match)
			if err != nil {
				return nil, err
			}
			if err := s.mayUpdate(ctx, in.ID, in.RawBody); err != nil {
				return nil, err
			}
			if err := cleared(&in.Body, in.RawBody); err != nil {
				return nil, problem(err)
			}
			a, err := shown(s.fleet.UpdateWorker(ctx, actor(ctx), in.ID, at, in.Body))
			if err != nil {
				return nil, err
			}
			return s.ending(ctx, a)
		})
	register(s, route{id: "forget-worker", method: "DELETE", path: workersPath + "/{worker_id}", role: access.Admin, doc: "Remove the record of a terminated worker"},
		func(ctx context.Context, in *struct {
			One
			Force bool `query:"force" doc:"Also forget a worker that is TERMINATING, or that EC2 never reported: an existing EC2 instance keeps running and costing money"`
		}) (*struct{}, error) {
			return nil, problem(s.fleet.ForgetWorker(ctx, actor(ctx), in.ID, in.Force))
		})
	s.observedRoutes()
}

// operators lists the fields of a worker that an operator may change. The other
// fields hold credentials or decide what lull may do with the worker, and need an
// admin.
var operators = []string{"name", "tags", "owner", "contacts", "is_idle_detection_enabled", "idle_timeout_minutes", "snooze_minutes", "pause_action", "ttl_deadline"}

// mayUpdate rejects an operator's change that needs an admin. Setting an expiry that
// terminates counts as such.
func (s *Server) mayUpdate(ctx context.Context, id string, body []byte) error {
	if principalOf(ctx).token.Role.Covers(access.Admin) {
		return nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		return problem(invalid("", err.Error()))
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(operators, name) {
			return fault(http.StatusForbidden, "role", "cannot change "+name+" as operator: it needs admin", &huma.ErrorDetail{Message: "needs admin", Location: "body." + name})
		}
	}
	if _, deadline := fields["ttl_deadline"]; deadline {
		w, err := s.fleet.Worker(ctx, id)
		if err != nil {
			return problem(err)
		}
		if w.TTLAction == "terminate" {
			return fault(http.StatusForbidden, "role", "cannot change ttl_deadline as operator: "+w.Name+" is terminated at that deadline, which needs admin",
				&huma.ErrorDetail{Message: "needs admin", Location: "body.ttl_deadline"})
		}
	}
	return nil
}

// cleared clears the fields of p that are null in a body. A decoder cannot
// distinguish them from absent fields.
func cleared(p *worker.Profile, body []byte) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		return invalid("", err.Error())
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if string(fields[name]) == "null" {
			errs = append(errs, p.Clear(name))
		}
	}
	return errors.Join(errs...)
}

// createOnce gives the worker of a call with an idempotency key the same ID
// each time, so that a repeat after a crash finds the worker that it created.
func (s *Server) createOnce(ctx context.Context, n fleet.NewWorker) (worker.Worker, error) {
	if key, keyed := ctx.Value(onceKey{}).(string); keyed {
		n.WorkerID = "w-" + key[:16]
	}
	w, err := s.fleet.CreateWorker(ctx, actor(ctx), n)
	if _, made := errors.AsType[*failure.Conflict](err); made && n.WorkerID != "" {
		return s.fleet.Worker(ctx, n.WorkerID)
	}
	return w, err
}

func intoRegionOf(ctx context.Context, region *string) error {
	r := regionOf(ctx)
	if r != "" && *region != "" && *region != r {
		return invalid("aws_region", "differs from the region in the path")
	}
	if r != "" {
		*region = r
	}
	return nil
}

func (s *Server) listWorkers(ctx context.Context, in *workerList) (control.List[worker.Worker], error) {
	out := control.List[worker.Worker]{Items: []worker.Worker{}}
	q := in.query(ctx)
	q.ByName, q.After, q.Limit = in.Sort == "name", in.After, in.Limit
	page, err := s.roster.Select(ctx, q)
	if err != nil {
		return out, err
	}
	workers, err := s.fleet.WorkersByID(ctx, page.IDs)
	if err != nil {
		return out, err
	}
	seen, err := s.board.Seen(ctx, time.Now())
	if err != nil {
		return out, err
	}
	for _, w := range workers {
		st, known := seen[w.ID]
		item := asSeen(w.Public(), st, known)
		if item.Expiry, err = s.expiry(ctx, &w); err != nil { // by this record, which may be newer than the observation
			return out, err
		}
		out.Items = append(out.Items, item)
	}
	out.Next, out.Total = page.Next, &page.Total
	return out, nil
}

// asSeen returns w with the owner's live readings in place of the stored ones, which
// are out of date between two writes. Without live readings, the time of the pause is
// unknown.
func asSeen(w worker.Worker, st worker.IdleStatus, known bool) worker.Worker {
	if w.Status != power.WorkerRunning {
		return w
	}
	w.TargetPauseAt, w.NextIdleCheckAt = nil, nil
	if !known {
		return w
	}
	w.TargetPauseAt, w.PauseNotBefore = st.TargetPauseAt, st.NotBefore()
	if t := st.NextIdleCheckAt; !t.IsZero() {
		w.NextIdleCheckAt = &t
	}
	if t := st.LastActivityAt; t != nil && (w.LastActivityAt == nil || t.After(*w.LastActivityAt)) {
		w.LastActivityAt = t
	}
	w.Checked(lastCheck(&st))
	return w
}

// lastCheck returns when a live status was last computed from readings; zero if a
// signal is unknown.
func lastCheck(st *worker.IdleStatus) time.Time {
	if st.ReadingsUnknown || st.Has(idle.SignalUnknown) {
		return time.Time{}
	}
	return st.CheckedAt
}

// observe returns the owner's in-memory state of a worker; false if the owner cannot
// be asked.
func (s *Server) observe(ctx context.Context, id string) (control.Observation, bool) {
	if s.live == nil {
		return control.Observation{}, false
	}
	return s.live.Observation(ctx, id)
}

// idleStatus returns the idle status of a worker from live readings or, without
// those, from its record.
func (s *Server) idleStatus(ctx context.Context, w *worker.Worker) (worker.IdleStatus, error) {
	if seen, live := s.observe(ctx, w.ID); live && seen.Status != nil {
		st := meant(w, *seen.Status)
		var err error
		st.Expiry, err = s.expiry(ctx, w) // from this record, because the expiry may have been set just now
		return st, err
	}
	p, err := s.fleet.Policy(ctx, w)
	if err != nil {
		return worker.IdleStatus{}, err
	}
	return meant(w, s.fleet.StatusOf(time.Now(), w, &p, nil, nil, s.shadow)), nil
}

// expiry returns a worker's expiry; nil if it has none.
func (s *Server) expiry(ctx context.Context, w *worker.Worker) (*why.Expiry, error) {
	if w.TTLDeadline == nil || s.shadow {
		return nil, nil
	}
	p, err := s.fleet.Policy(ctx, w)
	if err != nil {
		return nil, err
	}
	return w.Ends(time.Now(), &p, s.fleet.Halted()), nil
}

// ending adds the expiry to an answer about a worker.
func (s *Server) ending(ctx context.Context, a *answer[worker.Worker]) (*answer[worker.Worker], error) {
	x, err := s.expiry(ctx, &a.Body)
	if err != nil {
		return nil, problem(err)
	}
	a.Body.Expiry = x
	return a, nil
}

// meant removes from a stopped worker's status what applies only to a running one:
// the idle time and unread sources.
func meant(w *worker.Worker, st worker.IdleStatus) worker.IdleStatus {
	if up(w.Status) {
		return st
	}
	st.Blocks = slices.DeleteFunc(slices.Clone(st.Blocks), func(b idle.Block) bool {
		switch b.Code {
		case idle.NotIdleYet, idle.RecentActivity, idle.SignalActive, idle.SignalIncomplete, idle.SignalUnknown, idle.WarningPending:
			return true
		}
		return false
	})
	if len(st.Blocks) > 0 {
		st.Reason = st.Blocks[0].Code
	}
	st.Readings = []idle.Reading{}
	return st
}

func (s *Server) observedRoutes() {
	at := func(suffix string) string { return workersPath + "/{worker_id}/" + suffix }
	register(s, route{id: "worker-activity", method: "GET", path: at("activity"), role: access.Viewer, doc: "Last activity, recent events, pauses and resumes, snooze"},
		func(ctx context.Context, in *One) (*answer[worker.Activity], error) {
			a, err := s.fleet.GetWorkerActivity(ctx, in.ID)
			seen, live := s.observe(ctx, in.ID)
			if err != nil || !live || seen.Status == nil {
				return ok(a, err)
			}
			if !seen.Status.NextIdleCheckAt.IsZero() {
				a.NextIdleCheckAt, a.TargetPauseAt = &seen.Status.NextIdleCheckAt, seen.Status.TargetPauseAt // newer than the stored values
			}
			if t := lastCheck(seen.Status); !t.IsZero() && (a.LastActivityCheckAt == nil || t.After(*a.LastActivityCheckAt)) {
				a.LastActivityCheckAt = &t
			}
			return ok(a, err)
		})
	register(s, route{id: "worker-idle-status", method: "GET", path: at("idle-status"), role: access.Viewer, doc: "The verdict, with countdown and everything that blocks a pause"},
		func(ctx context.Context, in *One) (*answer[worker.IdleStatus], error) {
			w, err := s.fleet.Worker(ctx, in.ID)
			if err != nil {
				return nil, problem(err)
			}
			return ok(s.idleStatus(ctx, &w))
		})
	register(s, route{id: "worker-ec2-state", method: "GET", path: at("ec2-state"), role: access.Viewer, doc: "The state in EC2; observed_at is null when it is the recorded state"},
		func(ctx context.Context, in *One) (*answer[worker.EC2State], error) {
			e, err := s.fleet.GetWorkerEC2State(ctx, in.ID)
			if seen, live := s.observe(ctx, in.ID); err == nil && live && seen.EC2 != nil {
				e = *seen.EC2
			}
			if e.Tags == nil {
				e.Tags = map[string]string{}
			}
			return ok(e, err)
		})
	register(s, route{id: "worker-telemetry-events", method: "GET", path: at("telemetry-events"), role: access.Viewer, doc: "The relevant CML events last seen, newest first"},
		func(ctx context.Context, in *One) (*answer[[]worker.Event], error) {
			l, err := s.fleet.GetWorkerTelemetryEvents(ctx, in.ID)
			if seen, live := s.observe(ctx, in.ID); err == nil && live && seen.Telemetry != nil {
				l = seen.Telemetry
			}
			if l == nil {
				l = []worker.Event{}
			}
			return ok(l, err)
		})
	register(s, route{id: "worker-metrics", method: "GET", path: at("metrics"), role: access.Viewer, doc: "Utilization, labs and nodes, each with its age or why it is unknown"},
		func(ctx context.Context, in *One) (*answer[control.Metrics], error) {
			w, err := s.fleet.Worker(ctx, in.ID)
			if err != nil {
				return nil, problem(err)
			}
			if seen, live := s.observe(ctx, in.ID); live && seen.Metrics != nil {
				return ok(*seen.Metrics, nil)
			}
			return ok(control.Metrics{WorkerID: w.ID, CMLVersion: w.CMLVersion, Readings: "unknown"}, nil)
		})
	register(s, route{id: "worker-license", method: "GET", path: at("license"), role: access.Viewer, doc: "State of the CML license"},
		func(ctx context.Context, in *One) (*answer[worker.License], error) {
			w, err := s.fleet.Worker(ctx, in.ID)
			return ok(w.Public().License, err)
		})
}
