package server

import (
	"context"
	"errors"
	"net/http"
	"time"

	"lull/internal/core/policy/when"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/history"
	"lull/internal/server/prices"
	"lull/internal/server/savings"
	"lull/internal/server/timeline"
)

// bound parses one end of a period in the past. A time without a zone is in UTC.
func bound(field, text string) (time.Time, error) {
	t, err := when.Bound(time.Now().UTC(), text)
	if err != nil {
		err = invalid(field, err.Error())
	}
	return t, err
}

// Between is a period in the past, as query parameters.
type Between struct {
	From string `query:"from" maxLength:"80" doc:"RFC 3339, how long before now (2h), 18:00, fri 18:00 or 2006-01-02 15:04, in UTC or with a zone behind it"`
	To   string `query:"to" maxLength:"80" doc:"End, in the same format; default: now"`
}

func (b Between) read() (from, to time.Time, err error) {
	if from, err = bound("query.from", b.From); err == nil {
		to, err = bound("query.to", b.To)
	}
	return from, to, err
}

// period parses the period. Without a beginning it is usual long; longer than longest
// is an error.
func (b Between) period(usual, longest time.Duration) (from, to time.Time, err error) {
	if from, to, err = b.read(); err != nil {
		return from, to, err
	}
	return history.Period(from, to, time.Now(), usual, longest)
}

// Then is a moment in the past, as a query parameter.
type Then struct {
	At string `query:"at" maxLength:"80" doc:"RFC 3339, how long ago (2h), 18:00, fri 18:00 or 2006-01-02 15:04, in UTC or with a zone behind it; default now"`
}

func (t Then) read() (time.Time, error) {
	at, err := bound("query.at", t.At)
	return at.UTC(), err
}

func (s *Server) timelineRoutes() {
	register(s, route{id: "worker-timeline", method: "GET", path: workersPath + "/{worker_id}/timeline", role: access.Viewer,
		doc: "Recorded signals and verdicts of a worker over a time range"},
		func(ctx context.Context, in *struct {
			One
			Between
			Points int `query:"points" minimum:"10" maximum:"2000" default:"500" doc:"Approximate number of points per signal; never more than twice as many"`
		}) (*answer[control.Timeline], error) {
			w, err := s.fleet.Worker(ctx, in.ID)
			if err != nil {
				return nil, problem(err)
			}
			return ok(s.timeline(ctx, w.ID, &w, in.Between, in.Points))
		})
}

// timeline returns the timeline of an object: a worker, or a machine with an agent. w
// is nil if the machine is no worker.
func (s *Server) timeline(ctx context.Context, object string, w *worker.Worker, in Between, points int) (control.Timeline, error) {
	from, to, err := in.period(timeline.Usual, timeline.Longest)
	if err != nil {
		return control.Timeline{}, err
	}
	of := timeline.Subject{Object: object, Worker: w}
	if w != nil {
		changes, err := history.Changes(ctx, s.fleet, audit.Query{WorkerID: w.ID, From: from})
		if err != nil {
			return control.Timeline{}, err
		}
		of.Changes = changes[w.ID]
	}
	t, err := timeline.Draw(ctx, s.past.Evidence, of, from, to, points)
	if err != nil || w == nil {
		return t, err
	}
	table, err := s.prices.Prices(ctx)
	if err != nil {
		return t, err
	}
	t.USDPerHour = table.Hour(w.AWSRegion, w.InstanceType)
	return t, nil
}

// summed are the query parameters of a sum; see savings.Question.
type summed struct {
	Between
	By     string `query:"by" maxLength:"140" default:"worker" doc:"worker, region, policy, instance_type, or tag:NAME. By policy, a stop counts for the policy that applied when it was decided, if recorded; everything else counts for the current one"`
	Every  string `query:"every" enum:"day,week,month" doc:"Also sum up each day, week from Monday, or month"`
	IdleBy string `query:"idle_by" maxLength:"140" doc:"Also return, for each worker, region, policy, instance_type or tag:NAME, the hours of the week in which it was idle but kept running, in use, stopped or unknown"`
	Limit  int    `query:"idle_limit" minimum:"1" maximum:"1000" default:"1000" doc:"Groups of idle_by, the costliest first"`
	Idle   bool   `query:"idle" default:"true" doc:"false omits the idle hours, which require reading all evidence"`
	Zone   string `query:"time_zone" maxLength:"64" default:"UTC" doc:"Time zone of days and hours, such as Europe/Berlin"`
}

func (s *Server) savingsRoutes() {
	register(s, route{id: "savings", method: "GET", path: base + "/savings", role: access.Viewer,
		doc: "Hours avoided and money saved by real stops, and the idle hours that were not avoided, with their cause"},
		func(ctx context.Context, in *summed) (*answer[control.Savings], error) {
			from, to, err := in.period(savings.Usual, savings.Longest)
			if err != nil {
				return nil, problem(err)
			}
			table, err := s.prices.Prices(ctx)
			if err != nil {
				return nil, problem(err)
			}
			l := savings.Ledger{Records: s.past, Policies: s.fleet, Prices: table}
			return ok(l.Sum(ctx, savings.Question{By: in.By, Every: in.Every, IdleBy: in.IdleBy, Most: in.Limit, Idle: in.Idle, Zone: in.Zone}, from, to))
		})
	register(s, route{id: "list-prices", method: "GET", path: base + "/savings/prices", role: access.Viewer, doc: "The price table, with the source of each price"},
		func(ctx context.Context, _ *struct{}) (*answer[control.Prices], error) {
			return ok(s.prices.List(ctx))
		})
	register(s, route{id: "refresh-prices", method: "POST", path: base + "/savings/prices/refresh", role: access.Admin, status: http.StatusOK,
		doc: "Read the prices of the regions, instance types and volume types in use from the AWS Price List API, and store them"},
		func(ctx context.Context, _ *struct{}) (*answer[control.PriceRefresh], error) {
			var all []worker.Worker
			for after := ""; ; {
				page, err := s.fleet.Workers(ctx, worker.Filter{}, after, 1000)
				if err != nil {
					return nil, problem(err)
				}
				all = append(all, page.Workers...)
				if after = page.Next; after == "" {
					break
				}
			}
			r, err := s.prices.Refresh(ctx, actor(ctx), all)
			if unread, ok := errors.AsType[*prices.UnreadError](err); ok {
				return nil, fault(http.StatusServiceUnavailable, "cloud_unavailable", unread.Error())
			}
			return ok(r, err)
		})
}
