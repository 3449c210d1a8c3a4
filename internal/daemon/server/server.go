// Package server is the HTTP API of a fleet (spec, section 2.7): it says who
// may ask, checks what is asked, hands it to package fleet and renders the
// outcome.
//
// Guarantees. Every route but the public ones (health, the description of the
// API, and the answers to a warning, which carry a signature) needs a token
// whose role covers it; the table of routes is in the OpenAPI document that is served,
// with the role of each. Every fault is a problem document (RFC 9457) that
// names the field, and changes nothing. A mutating call with an
// Idempotency-Key is answered as the first one with that key was. Every
// change is in the audit log with who asked for it. A command that is not
// finished when it is answered is answered with 202 and where to look.
//
// It leaves out observing and acting (daemon/controller; a Live and an Admin
// are handed in), the listener and its certificate's use (cmd; see Certificate),
// and the dashboard (server/web).
package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/base/delay"
	"lull/internal/base/humax"
	"lull/internal/base/task"
	"lull/internal/daemon/server/access"
	"lull/internal/daemon/server/agents"
	"lull/internal/daemon/server/board"
	"lull/internal/daemon/server/feed"
	"lull/internal/daemon/server/hosts"
	"lull/internal/daemon/server/replay"
	"lull/internal/daemon/server/roster"
	"lull/internal/evidence"
	"lull/internal/fleet"
	"lull/internal/idle"
	"lull/internal/link/control"
	"lull/internal/savings"
	"lull/internal/store"
)

// Live knows what the owner of a worker has in memory.
type Live interface {
	// Observation is what is known of a worker; false if nobody who
	// observes it can be asked.
	Observation(ctx context.Context, id string) (control.Observation, bool)
	// Report hands what the worker's agent sees to the owner; false if that
	// cannot be reached.
	Report(ctx context.Context, id string, r control.AgentReport) bool
	// Verdicts are the idle status of every worker that anybody who can be
	// asked observes, by id and without readings.
	Verdicts(ctx context.Context) map[string]fleet.IdleStatus
}

// Evidence is what servers recorded of their checks (spec, section 2.1).
type Evidence interface {
	// Read yields records in the order of time, and says which are missing.
	Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error)
}

// Admin is the controller as administrators see it.
type Admin interface {
	// Stats are the counters of this process.
	Stats() map[string]any
	// Trigger starts a reconcile of all workers now.
	Trigger()
	Shards(ctx context.Context) (control.Shards, error)
	// Resign gives up what this server owns, so that others take it.
	Resign(ctx context.Context) error
}

// Options are what a Server is made of. Fleet is needed; everything else may
// be left out.
type Options struct {
	Fleet *fleet.Fleet
	// Tokens says who may ask. Nil makes one over the fleet's store.
	Tokens *access.Tokens
	// Live and Admin are the controller; nil in a process without one.
	Live  Live
	Admin Admin
	// Regions tells which regions an account has; nil in a process that asks no
	// cloud.
	Regions Regions
	// Instances tells what EC2 knows of an instance that is to be imported; nil
	// imports unseen.
	Instances Instances
	// CML reports whether a CML answers at the endpoint of w, and its version or
	// why none was found. Nil leaves the probing to the controller.
	CML func(ctx context.Context, w fleet.Worker) (found bool, detail string)
	// Evidence is what was recorded, by all servers; nil keeps none.
	Evidence Evidence
	// Record keeps what agents report for this server's part of Evidence; nil
	// keeps none of it. It never waits.
	Record func(evidence.Record)
	// Prices replaces the published table; nil takes that.
	Prices savings.Prices
	// Web serves what is no API: the dashboard. Nil serves a 404.
	Web http.Handler
	// Peers answers the other servers below /internal/; nil answers none.
	Peers http.Handler
	// Others are the hosts that the other servers hear; nil where there is none.
	Others  OtherHosts
	Metrics prometheus.Gatherer
	// Snapshot reads the whole state for a backup; nil has none.
	Snapshot func(ctx context.Context) (io.ReadCloser, error)
	// Notifier tests channels of notifications; nil in a process without one.
	Notifier Notifier
	Version  string
	// BuildDate, RFC 3339, is what agents are compared with.
	BuildDate string
	Shadow    bool
	Log       *slog.Logger
	// People are those of an OIDC issuer; nil is none. PublicURL is where
	// browsers reach the server, to come back to from the issuer; empty is
	// where they asked.
	People    People
	PublicURL string
	// LeaseTTL is how long claims of this server outlive it; 0 is 15 s.
	LeaseTTL time.Duration
	// Name is what listings call this server; empty makes one up.
	Name string
}

// Server is the API of one process. Make it with New and run it before it is
// asked.
type Server struct {
	fleet    *fleet.Fleet
	tokens   *access.Tokens
	live     Live
	admin    Admin
	regions  Regions
	evidence Evidence

	instances Instances
	cml       func(ctx context.Context, w fleet.Worker) (bool, string)

	prices   savings.Prices
	web      http.Handler
	metrics  prometheus.Gatherer
	notifier Notifier
	version  string
	built    string

	people    People
	publicURL string
	shadow    bool
	log       *slog.Logger
	leaseTTL  time.Duration

	mux       *http.ServeMux
	api       huma.API
	name      string
	machines  *machines
	agents    *agents.Agents
	hosts     *hosts.Hosts
	others    OtherHosts
	lease     atomic.Int64 // the store.LeaseID of its claims; 0 before it runs
	roster    *roster.Roster
	board     *board.Board
	feed      *feed.Hub
	haltWaits atomic.Int64  // requests that wait for a halt
	streams   chan struct{} // one for each event stream that may be open
	snapshot  func(ctx context.Context) (io.ReadCloser, error)
	replays   atomic.Pointer[replay.Log] // set before ready closes
	ready     chan struct{}
}

// maxStreams is how many event streams a server has open at once.
const maxStreams = 512

// New makes a Server and starts nothing.
func New(o Options) (*Server, error) {
	if o.Fleet == nil {
		return nil, errors.New("cannot make a server without a fleet")
	}
	s := &Server{
		fleet: o.Fleet, tokens: o.Tokens, live: o.Live, admin: o.Admin, regions: o.Regions, evidence: o.Evidence, prices: o.Prices, web: o.Web, metrics: o.Metrics, snapshot: o.Snapshot, notifier: o.Notifier,
		version: o.Version, built: o.BuildDate, shadow: o.Shadow, log: o.Log, leaseTTL: o.LeaseTTL,
		mux: http.NewServeMux(), machines: newMachines(), agents: agents.New(o.Record), hosts: hosts.New(o.Version, o.BuildDate), others: o.Others, streams: make(chan struct{}, maxStreams), ready: make(chan struct{}),
	}
	s.instances, s.cml = o.Instances, o.CML
	s.people, s.publicURL, s.name = o.People, o.PublicURL, o.Name
	if s.name == "" {
		s.name = "server-" + strings.ToLower(rand.Text()[:8])
	}
	if s.prices == nil {
		var err error
		if s.prices, err = savings.Published(); err != nil {
			return nil, err
		}
	}
	if s.tokens == nil {
		s.tokens = access.New(o.Fleet.Store())
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.feed = feed.NewHub(o.Fleet.Store())
	s.roster = roster.New(o.Fleet.Store(), s.log)
	var observed func(context.Context) map[string]fleet.IdleStatus
	if o.Live != nil {
		observed = o.Live.Verdicts
	}
	s.board = board.New(s.roster, observed)
	if s.leaseTTL == 0 {
		s.leaseTTL = 15 * time.Second
	}
	cfg := humax.Config("lull server", o.Version)
	cfg.Info.Description = "A fleet of cloud workers: who is idle, why, and what is done about it."
	cfg.DocsPath, cfg.OpenAPIPath, cfg.SchemasPath = "", "", ""
	cfg.Transformers = append(cfg.Transformers, located)
	cfg.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"token": {Type: "http", Scheme: "bearer", Description: "A token of lull token create"},
	}
	// A duration is seconds on the wire, with fractions.
	cfg.Components.Schemas.RegisterTypeAlias(reflect.TypeFor[idle.Duration](), reflect.TypeFor[float64]())
	s.api = humago.New(s.mux, cfg)
	s.api.UseMiddleware(s.authorize, humax.Strict, s.inRegion, s.once)
	s.routes()
	if err := s.regional(); err != nil {
		return nil, err
	}
	if o.Peers != nil {
		s.mux.Handle("/internal/", o.Peers)
	}
	s.mux.HandleFunc("/", s.elsewhere)
	return s, nil
}

func (s *Server) routes() {
	s.workerRoutes()
	s.commandRoutes()
	s.whyRoutes()
	s.overviewRoutes()
	s.timelineRoutes()
	s.simulateRoutes()
	s.savingsRoutes()
	s.templateRoutes()
	s.policyRoutes()
	s.scheduleRoutes()
	s.overrideRoutes()
	s.budgetRoutes()
	s.settingRoutes()
	s.auditRoutes()
	s.eventRoutes()
	s.tokenRoutes()
	s.machineRoutes()
	s.haltRoutes()
	s.peopleRoutes()
	s.adminRoutes()
	s.notifyRoutes()
	s.answerRoutes()
	s.healthRoutes()
	s.pageRoute()
	humax.NeverNull(s.api.OpenAPI())
}

// String names the server as a task.
func (s *Server) String() string { return "the API" }

// Ready closes when requests can be answered.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// sweepEvery is how often old answers are removed.
const sweepEvery = time.Hour

// Run keeps what the server knows fresh until ctx ends. Its claims are held
// by a lease; one that is lost, as when the store is away for long, is
// replaced, and the claims that it held are free.
func (s *Server) Run(ctx context.Context) error {
	lease, err := s.fleet.Store().Grant(ctx, s.leaseTTL)
	if err != nil {
		return fmt.Errorf("cannot start the API: %w", err)
	}
	s.replays.Store(replay.New(s.fleet.Store(), lease))
	s.lease.Store(int64(lease.ID()))
	fault := func(err error) { s.log.Error("record cannot be read", "error", err) }
	tokens := task.Loop("the tokens", func(ctx context.Context) error { return s.tokens.Run(ctx, fault) })
	open := task.Func("the API's upkeep", func(ctx context.Context, ready func()) error {
		for _, known := range []<-chan struct{}{s.tokens.Ready(), s.roster.Ready()} {
			select {
			case <-known:
			case <-ctx.Done():
				s.revoke(ctx, lease)
				return nil
			}
		}
		close(s.ready)
		ready()
		s.upkeep(ctx, lease)
		return nil
	})
	return task.Run(ctx, tokens, task.Loop("the list of workers", s.roster.Run), task.Loop(s.feed.String(), s.feed.Run), open)
}

// upkeep sweeps old answers and replaces a lease that is lost, until ctx
// ends.
func (s *Server) upkeep(ctx context.Context, lease store.Lease) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	look := time.NewTicker(presenceEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			s.revoke(ctx, lease)
			return
		case <-lease.Lost():
			s.log.Warn("the lease of the API is lost; it takes another")
			next, err := s.fleet.Store().Grant(ctx, s.leaseTTL)
			if err != nil {
				if delay.For(ctx, time.Second) != nil {
					return
				}
				continue
			}
			lease = next
			s.lease.Store(int64(lease.ID()))
			s.replays.Store(replay.New(s.fleet.Store(), lease))
		case <-look.C:
			if err := s.attend(ctx); err != nil {
				s.log.Warn("other servers may not see which machines are heard here", "error", err)
			}
			if err := s.replays.Load().Settle(ctx); err != nil {
				s.log.Warn("a repeated request may be refused elsewhere until the store answers", "error", err)
			}
		case <-tick.C:
			if _, err := s.replays.Load().Sweep(ctx, time.Now()); err != nil {
				s.log.Warn("old answers stay", "error", err)
			}
		}
	}
}

// revoke gives the claims back at once; if that fails they end with the TTL.
func (s *Server) revoke(ctx context.Context, lease store.Lease) {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := lease.Revoke(last); err != nil {
		s.log.Debug("lease ends by itself", "error", err)
	}
}

// API is the OpenAPI side of the server.
func (s *Server) API() huma.API { return s.api }

// Handler answers everything. It refuses requests that a browser makes for
// another site.
func (s *Server) Handler() http.Handler {
	cop := http.NewCrossOriginProtection()
	cop.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		writeProblem(w, http.StatusForbidden, "cross_origin", "cannot accept a request that a browser makes for another site")
	}))
	inner := cop.Handler(s.mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "no-store")
		inner.ServeHTTP(w, s.identify(r))
	})
}

// elsewhere answers what no route has: the dashboard, or a problem.
func (s *Server) elsewhere(w http.ResponseWriter, r *http.Request) {
	var allow []string
	for _, m := range []string{"GET", "POST", "PUT", "PATCH", "DELETE"} {
		probe := r.Clone(r.Context())
		probe.Method = m
		if _, pattern := s.mux.Handler(probe); pattern != "/" && m != r.Method {
			allow = append(allow, m)
		}
	}
	api := strings.HasPrefix(r.URL.Path, "/api/") || strings.HasPrefix(r.URL.Path, "/admin/")
	switch {
	case len(allow) > 0:
		w.Header().Set("Allow", strings.Join(allow, ", "))
		writeProblem(w, http.StatusMethodNotAllowed, "method_not_allowed", fmt.Sprintf("cannot %s %s: it takes %s", r.Method, r.URL.Path, strings.Join(allow, ", ")))
	case s.web != nil && !api:
		s.web.ServeHTTP(w, r)
	default:
		writeProblem(w, http.StatusNotFound, "not_found", fmt.Sprintf("cannot find %s", r.URL.Path))
	}
}
