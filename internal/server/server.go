// Package server is the HTTP API of a fleet. It authorizes and validates requests,
// passes them to package fleet and renders the result.
//
// Every route except the public ones needs a token whose role covers the route.
// Public are health, the description of the API, and the answers to warnings and
// enrollment, which carry their own signature or secret. The OpenAPI document lists
// the routes and the role of each. Every error is a problem document (RFC 9457) that
// names the field, and changes nothing. A mutating call with an Idempotency-Key gets
// the answer of the first call with that key. Every change is in the audit log with
// its actor. A command that is unfinished when it is answered gets a 202 with the
// place to poll.
//
// Package controller observes and acts (a Live and an Admin are passed in), cmd
// listens and provides TLS (see Certificate), and the dashboard is in server/web.
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

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/lib/humax"
	"lull/internal/lib/task"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/agents"
	"lull/internal/server/board"
	"lull/internal/server/feed"
	"lull/internal/server/history"
	"lull/internal/server/hosts"
	"lull/internal/server/idempotency"
	"lull/internal/server/prices"
	"lull/internal/server/roster"
	"lull/internal/store"
)

// Live reads the in-memory state of the servers that own the workers.
type Live interface {
	// Observation returns what the worker's owner knows beyond the record; false if
	// the owner cannot be asked or there is none.
	Observation(ctx context.Context, id string) (control.Observation, bool)
	// Report passes an agent's report to the worker's owner; false if the owner
	// cannot be reached.
	Report(ctx context.Context, id string, r control.AgentReport) bool
	// Verdicts returns the idle status of every worker observed by a reachable
	// server, by ID and without readings.
	Verdicts(ctx context.Context) map[string]worker.IdleStatus
}

// Admin lets administrators inspect and direct the controller.
type Admin interface {
	// Stats returns the counters of this process.
	Stats() map[string]any
	// Trigger makes the controller reconcile all workers now.
	Trigger()
	Shards(ctx context.Context) (control.Shards, error)
	// Resign gives up the workers that this server owns, so that other servers take
	// them over.
	Resign(ctx context.Context) error
}

// Options configure a Server. Fleet is required; everything else is optional.
type Options struct {
	Fleet *fleet.Fleet
	// Tokens authenticates callers. Nil creates one over the fleet's store.
	Tokens *access.Tokens
	// Live and Admin are the controller; nil in a process without one.
	Live  Live
	Admin Admin
	// Regions returns the regions of an account; nil in a process that asks no
	// cloud.
	Regions Regions
	// Instances looks up an EC2 instance before it is imported; nil imports
	// without that.
	Instances Instances
	// CML reports whether a CML answers at the endpoint of w, and its version or
	// why none was found. Nil leaves the probing to the controller.
	CML func(ctx context.Context, w worker.Worker) (found bool, detail string)
	// Evidence reads the records of all servers; nil if none are kept.
	Evidence history.Evidence
	// Record stores agents' reports for this server's part of Evidence; nil
	// stores none. It never blocks.
	Record func(evidence.Record)
	// Prices replaces the built-in and the refreshed prices; nil uses those.
	Prices savings.Prices
	// PriceSource reads current prices from the cloud; nil in a process that
	// does not call it.
	PriceSource prices.Source
	// Web serves all paths outside the API: the dashboard. Nil serves a 404.
	Web http.Handler
	// Peers serves the other servers below /internal/; nil for none.
	Peers http.Handler
	// Others reads the hosts that report to the other servers; nil for none.
	Others  OtherHosts
	Metrics prometheus.Gatherer
	// Snapshot reads the complete state for a backup; nil if unsupported.
	Snapshot func(ctx context.Context) (io.ReadCloser, error)
	// Notifier tests notification channels; nil in a process without one.
	Notifier Notifier
	Version  string
	// BuildDate, in RFC 3339, is compared with the build date of agents.
	BuildDate string
	Shadow    bool
	Log       *slog.Logger
	// IdentityProvider signs in the users of an OIDC issuer; nil for none. PublicURL
	// is the dashboard's address, to which the issuer sends browsers back; if empty,
	// the address of the request is used.
	Identity  IdentityProvider
	PublicURL string
	// Program is the file of the lull program that enrolling machines download;
	// empty offers none.
	Program string
	// LeaseTTL is how long this server's claims in the store outlive it; 0 is 15 s.
	LeaseTTL time.Duration
	// Name is this server's name in listings; empty generates one.
	Name string
	// Local restricts the server to one host in this process; nil serves a fleet.
	Local *Local
}

// Server is the API of one process. Create it with New and run it before it
// gets requests.
type Server struct {
	fleet   *fleet.Fleet
	tokens  *access.Tokens
	live    Live
	admin   Admin
	regions Regions

	instances Instances
	cml       func(ctx context.Context, w worker.Worker) (bool, string)

	prices   *prices.Table
	web      http.Handler
	metrics  prometheus.Gatherer
	notifier Notifier
	version  string
	built    string

	identity  IdentityProvider
	publicURL string
	program   string
	shadow    bool
	log       *slog.Logger
	leaseTTL  time.Duration

	mux       *http.ServeMux
	api       huma.API
	name      string
	machines  *machines
	agents    *agents.Agents
	hosts     *hosts.Hosts
	local     *Local // nil for a server of a fleet
	others    OtherHosts
	lease     atomic.Int64 // the store.LeaseID of this server's claims; 0 before Run
	roster    *roster.Roster
	board     *board.Board
	past      *history.Reader
	feed      *feed.Hub
	haltWaits atomic.Int64  // requests that wait for a halt
	streams   chan struct{} // holds one element per open event stream
	snapshot  func(ctx context.Context) (io.ReadCloser, error)
	replays   atomic.Pointer[idempotency.Log] // set before ready is closed
	ready     chan struct{}
}

// maxStreams is the maximum number of open event streams of a server.
const maxStreams = 512

// New returns a Server. It starts nothing.
func New(o Options) (*Server, error) {
	if o.Fleet == nil {
		return nil, errors.New("cannot make a server without a fleet")
	}
	s := &Server{
		fleet: o.Fleet, tokens: o.Tokens, live: o.Live, admin: o.Admin, regions: o.Regions, web: o.Web, metrics: o.Metrics, snapshot: o.Snapshot, notifier: o.Notifier,
		version: o.Version, built: o.BuildDate, shadow: o.Shadow, log: o.Log, leaseTTL: o.LeaseTTL,
		mux: http.NewServeMux(), machines: newMachines(), agents: agents.New(o.Record), hosts: hosts.New(o.Version, o.BuildDate), others: o.Others, streams: make(chan struct{}, maxStreams), ready: make(chan struct{}),
	}
	s.instances, s.cml, s.local = o.Instances, o.CML, o.Local
	s.identity, s.publicURL, s.program, s.name = o.Identity, o.PublicURL, o.Program, o.Name
	if s.name == "" {
		s.name = "server-" + strings.ToLower(rand.Text()[:8])
	}
	var err error
	if s.prices, err = prices.New(o.Fleet.Store(), o.Prices, o.PriceSource); err != nil {
		return nil, err
	}
	if s.tokens == nil {
		s.tokens = access.New(o.Fleet.Store())
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.feed = feed.NewHub(o.Fleet.Store())
	s.roster = roster.New(o.Fleet.Store(), s.log)
	s.past = &history.Reader{Log: o.Fleet, Roster: s.roster, Templates: o.Fleet, Evidence: o.Evidence}
	var observed func(context.Context) map[string]worker.IdleStatus
	if o.Live != nil {
		observed = o.Live.Verdicts
	}
	s.board = board.New(s.roster, observed, s.prices.Prices)
	if s.leaseTTL == 0 {
		s.leaseTTL = 15 * time.Second
	}
	cfg := humax.Config("lull server", o.Version)
	cfg.Info.Description = "A fleet of cloud workers: which are idle, why, and the actions taken."
	cfg.DocsPath, cfg.OpenAPIPath, cfg.SchemasPath = "", "", ""
	cfg.Transformers = append(cfg.Transformers, located)
	cfg.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"token": {Type: "http", Scheme: "bearer", Description: "A token of lull token create"},
	}
	// Durations are fractional seconds on the wire.
	cfg.Components.Schemas.RegisterTypeAlias(reflect.TypeFor[idle.Duration](), reflect.TypeFor[float64]())
	s.api = humago.New(s.mux, cfg)
	s.api.UseMiddleware(s.authorize, humax.Strict, s.inRegion, s.once)
	if s.local != nil {
		s.localRoutes()
		humax.NeverNull(s.api.OpenAPI())
	} else {
		s.routes()
	}
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
	s.signInRoutes()
	s.adminRoutes()
	s.notifyRoutes()
	s.answerRoutes()
	s.healthRoutes()
	s.pageRoute()
	humax.NeverNull(s.api.OpenAPI())
}

// String returns the server's name as a task.
func (s *Server) String() string { return "the API" }

// Ready is closed when requests can be answered.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// sweepEvery is the interval at which old idempotent answers are removed.
const sweepEvery = time.Hour

// Run keeps the server's state current until ctx ends. Its claims in the store are
// held by a lease. If the lease is lost, for example because the store was
// unreachable for long, its claims become free and Run takes a new lease.
func (s *Server) Run(ctx context.Context) error {
	lease, err := s.fleet.Store().Grant(ctx, s.leaseTTL)
	if err != nil {
		return fmt.Errorf("cannot start the API: %w", err)
	}
	s.replays.Store(idempotency.New(s.fleet.Store(), lease))
	s.lease.Store(int64(lease.ID()))
	fault := func(err error) { s.log.Error("record cannot be read", "err", err) }
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

// upkeep removes old idempotent answers and replaces a lost lease, until ctx ends.
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
			s.log.Warn("the API's lease is lost; it will get a new one")
			next, err := s.fleet.Store().Grant(ctx, s.leaseTTL)
			if err != nil {
				if delay.For(ctx, time.Second) != nil {
					return
				}
				continue
			}
			lease = next
			s.lease.Store(int64(lease.ID()))
			s.replays.Store(idempotency.New(s.fleet.Store(), lease))
		case <-look.C:
			if err := s.attend(ctx); err != nil {
				s.log.Warn("cannot announce which machines report to this server", "err", err)
			}
			if err := s.replays.Load().ReleaseEnded(ctx); err != nil {
				s.log.Warn("a repeated request may be refused elsewhere until the store answers", "err", err)
			}
		case <-tick.C:
			if _, err := s.replays.Load().Sweep(ctx, time.Now()); err != nil {
				s.log.Warn("cannot remove old answers", "err", err)
			}
		}
	}
}

// revoke releases the server's claims at once. If that fails, they end with the
// lease.
func (s *Server) revoke(ctx context.Context, lease store.Lease) {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := lease.Revoke(last); err != nil {
		s.log.Debug("lease ends by itself", "err", err)
	}
}

// API returns the OpenAPI side of the server.
func (s *Server) API() huma.API { return s.api }

// Handler returns the handler for all requests. It rejects cross-site requests
// of browsers.
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

// elsewhere answers requests without a route: the dashboard, or a problem.
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
		writeProblem(w, http.StatusMethodNotAllowed, "method_not_allowed", fmt.Sprintf("cannot %s %s: this path takes %s", r.Method, r.URL.Path, strings.Join(allow, ", ")))
	case s.web != nil && !api:
		s.web.ServeHTTP(w, r)
	default:
		writeProblem(w, http.StatusNotFound, "not_found", fmt.Sprintf("cannot find %s", r.URL.Path))
	}
}
