package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"runtime/pprof"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"lull/internal/lib/delay"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/store"
)

// noController returns the error of a server process that runs no controller.
func noController() error {
	return fault(http.StatusConflict, "no_controller", "cannot do that here: this process has no controller; ask one with --role all or controller")
}

func (s *Server) adminRoutes() {
	register(s, route{id: "admin-stats", method: "GET", path: "/admin/stats", role: access.Viewer, doc: "Counters of this process"},
		func(context.Context, *struct{}) (*answer[map[string]any], error) {
			if s.admin == nil {
				return nil, noController()
			}
			return ok(s.admin.Stats(), nil)
		})
	register(s, route{id: "trigger-reconcile", method: "POST", path: "/admin/trigger-reconcile", role: access.Admin, status: http.StatusAccepted, doc: "Reconcile all workers of this server now"},
		func(context.Context, *struct{}) (*struct{}, error) {
			if s.admin == nil {
				return nil, noController()
			}
			s.admin.Trigger()
			return nil, nil
		})
	register(s, route{id: "shards", method: "GET", path: "/admin/shards", role: access.Admin, doc: "Which servers share the fleet, and what this one owns"},
		func(ctx context.Context, _ *struct{}) (*answer[control.Shards], error) {
			if s.admin == nil {
				return nil, noController()
			}
			return ok(s.admin.Shards(ctx))
		})
	register(s, route{id: "resign", method: "POST", path: "/admin/resign", role: access.Admin, status: http.StatusAccepted, doc: "Release the workers of this server to the other servers"},
		func(ctx context.Context, _ *struct{}) (*struct{}, error) {
			if s.admin == nil {
				return nil, noController()
			}
			return nil, problem(s.admin.Resign(ctx))
		})
	s.copyRoutes()
	r := route{id: "metrics", method: "GET", path: "/metrics", role: access.Viewer, doc: "Counters of this process for Prometheus"}
	register(s, r, func(context.Context, *struct{}) (*huma.StreamResponse, error) {
		if s.metrics == nil {
			return nil, fault(http.StatusNotFound, "no_metrics", "no metrics on this server")
		}
		h := promhttp.HandlerFor(s.metrics, promhttp.HandlerOpts{})
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			r, w := humago.Unwrap(hc)
			h.ServeHTTP(w, r)
		}}, nil
	})
	describe(s, r, "text/plain", "Prometheus exposition format")
}

// copyRoutes registers the downloads for administrators: the complete state, and
// profiles of the process.
func (s *Server) copyRoutes() {
	r := route{id: "backup", method: "GET", path: "/admin/backup", role: access.Admin, doc: "The whole state as one snapshot of the running server, for lull server restore"}
	register(s, r, func(ctx context.Context, _ *struct{}) (*huma.StreamResponse, error) {
		if s.snapshot == nil {
			return nil, fault(http.StatusConflict, "no_backup", "cannot back up this store")
		}
		snapshot, err := s.snapshot(ctx)
		if err != nil {
			return nil, problem(err)
		}
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			defer snapshot.Close()
			hc.SetHeader("Content-Type", "application/octet-stream")
			hc.SetStatus(http.StatusOK)
			if _, err := io.Copy(hc.BodyWriter(), snapshot); err != nil {
				s.log.Warn("the download of a backup failed", "err", err)
				panic(http.ErrAbortHandler) // a truncated response must not look complete
			}
		}}, nil
	})
	describe(s, r, "application/octet-stream", "A snapshot of etcd with its checksum")
	r = route{id: "profile", method: "GET", path: "/admin/profile", role: access.Admin, doc: "A profile of this process for go tool pprof: of its CPU over some seconds, by parts of the work, or of its heap or goroutines now"}
	register(s, r, func(_ context.Context, in *struct {
		Kind    string `query:"kind" enum:"cpu,heap,goroutine" default:"cpu"`
		Seconds int    `query:"seconds" minimum:"1" maximum:"300" default:"30" doc:"Of the CPU's profile"`
	}) (*huma.StreamResponse, error) {
		var profile bytes.Buffer
		if in.Kind == "cpu" {
			if err := pprof.StartCPUProfile(&profile); err != nil {
				return nil, fault(http.StatusConflict, "busy", "cannot profile: another profile is being made")
			}
		} else if err := pprof.Lookup(in.Kind).WriteTo(&profile, 0); err != nil {
			return nil, problem(err)
		}
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			if in.Kind == "cpu" {
				_ = delay.For(hc.Context(), time.Duration(in.Seconds)*time.Second) // if the client disconnects, the profile ends early
				pprof.StopCPUProfile()
			}
			hc.SetHeader("Content-Type", "application/octet-stream")
			hc.SetStatus(http.StatusOK)
			_, _ = hc.BodyWriter().Write(profile.Bytes()) // an error means that the client has disconnected
		}}, nil
	})
	describe(s, r, "application/octet-stream", "A profile in pprof's format")
}

// readyWithin is how long the store may take to answer a readiness check.
const readyWithin = 3 * time.Second

func (s *Server) healthRoutes() {
	register(s, route{id: "healthz", method: "GET", path: "/healthz", doc: "Whether the process is alive"},
		func(context.Context, *struct{}) (*answer[control.Health], error) {
			return ok(control.Health{Status: "ok"}, nil)
		})
	register(s, route{id: "readyz", method: "GET", path: "/readyz", doc: "Whether it can do its work; 503 while not"},
		func(ctx context.Context, _ *struct{}) (*answer[control.Health], error) {
			h := control.Health{Status: "ok", Parts: map[string]string{"store": "ok", "api": "ok"}}
			look, cancel := context.WithTimeout(ctx, readyWithin)
			defer cancel()
			if _, err := s.fleet.Store().Range(look, store.Query{Keys: store.Key("access/born"), KeysOnly: true}); err != nil {
				h.Status, h.Parts["store"] = "failing", "unavailable"
			}
			select {
			case <-s.ready:
			default:
				h.Status, h.Parts["api"] = "starting", "starting"
			}
			a := &answer[control.Health]{Status: http.StatusOK, Body: h}
			if h.Status != "ok" {
				a.Status = http.StatusServiceUnavailable
			}
			return a, nil
		})
	r := route{id: "openapi", method: "GET", path: "/openapi.json", doc: "This document"}
	document := sync.OnceValues(func() ([]byte, error) { return json.Marshal(s.api.OpenAPI()) })
	register(s, r, func(context.Context, *struct{}) (*huma.StreamResponse, error) {
		doc, err := document()
		if err != nil {
			return nil, problem(err)
		}
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			hc.SetHeader("Content-Type", "application/openapi+json")
			hc.SetStatus(http.StatusOK)
			_, _ = hc.BodyWriter().Write(doc) // an error means that the client has disconnected
		}}, nil
	})
	describe(s, r, "application/openapi+json", "OpenAPI 3.1")
}
