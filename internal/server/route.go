package server

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/server/access"
)

// maxBody bounds a request body.
const maxBody = 256 << 10

// route is one row of the table of routes: the operation, who may call it, and
// its documentation in the OpenAPI document.
type route struct {
	id, method, path, doc string
	role                  access.Role // empty is public
	machine               bool        // a machine named in the path may also call it with its own token
	status                int         // of success; 0 is huma's default
	long                  bool        // may be answered with 202
	secret                bool        // the answer contains a secret, which is stored nowhere
}

const base = "/api/v1"

// answer is a body with headers, which are omitted when empty.
type answer[T any] struct {
	Status   int
	ETag     string `header:"ETag"`
	Location string `header:"Location"`
	Body     T
}

func ok[T any](body T, err error) (*answer[T], error) {
	if err != nil {
		return nil, problem(err)
	}
	return &answer[T]{Status: http.StatusOK, Body: body}, nil
}

// register adds a route to the table.
func register[I, O any](s *Server, r route, do func(context.Context, *I) (*O, error)) {
	op := huma.Operation{OperationID: r.id, Method: r.method, Path: r.path, Summary: r.doc, DefaultStatus: r.status,
		MaxBodyBytes: maxBody, Metadata: map[string]any{"route": r}, Extensions: map[string]any{"x-lull-role": string(r.role)},
		Errors: []int{http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusConflict,
			http.StatusUnprocessableEntity, http.StatusServiceUnavailable}}
	switch {
	case r.role == "":
		op.Extensions["x-lull-role"] = "none"
	default:
		op.Security = []map[string][]string{{"token": {}}}
	}
	if r.method != "GET" && r.role != "" {
		op.Parameters = append(op.Parameters, &huma.Param{Name: "Idempotency-Key", In: "header",
			Description: "Repeats of the call with the same key get its first answer, for 24 hours",
			Schema:      &huma.Schema{Type: huma.TypeString, MaxLength: new(maxKey)}})
	}
	if r.long {
		op.Responses = map[string]*huma.Response{"200": {Description: "Done"}, "202": {Description: "Durable but not finished; see Location"}}
	}
	huma.Register(s.api, op, do)
	if r.long {
		// huma documents only one status, but 202 has the same body.
		item := s.api.OpenAPI().Paths[r.path]
		for _, made := range []*huma.Operation{item.Get, item.Put, item.Post, item.Delete, item.Patch} {
			if made == nil || made.OperationID != r.id {
				continue
			}
			done, open := made.Responses["200"], made.Responses["202"]
			if done.Content == nil {
				done.Content, done.Headers = open.Content, open.Headers
			}
			open.Content, open.Headers = done.Content, done.Headers
		}
	}
}

// regionKey is the context key of the region in a request's path.
type regionKey struct{}

func regionOf(ctx context.Context) string {
	r, _ := ctx.Value(regionKey{}).(string)
	return r
}

const (
	workersPath  = base + "/workers"
	regionalPath = base + "/region/{aws_region}/workers"
)

// regional copies every route about workers below its region, and documents the
// copies.
func (s *Server) regional() error {
	paths := s.api.OpenAPI().Paths
	for _, p := range slices.Sorted(maps.Keys(paths)) {
		rest, ok := strings.CutPrefix(p, workersPath)
		if !ok {
			continue
		}
		paths[regionalPath+rest] = inRegionItem(paths[p])
	}
	s.mux.HandleFunc(base+"/region/{aws_region}/workers", s.intoRegion)
	s.mux.HandleFunc(base+"/region/{aws_region}/workers/", s.intoRegion)
	return nil
}

func (s *Server) intoRegion(w http.ResponseWriter, r *http.Request) {
	region := r.PathValue("aws_region")
	escaped, found := strings.CutPrefix(r.URL.EscapedPath(), base+"/region/"+region)
	plain, _ := strings.CutPrefix(r.URL.Path, base+"/region/"+region)
	if !found {
		writeProblem(w, http.StatusNotFound, "not_found", fmt.Sprintf("cannot find %s", r.URL.Path))
		return
	}
	in := r.Clone(context.WithValue(r.Context(), regionKey{}, region))
	in.URL.Path, in.URL.RawPath = base+plain, base+escaped
	s.mux.ServeHTTP(w, in)
}

func inRegionItem(item *huma.PathItem) *huma.PathItem {
	out := *item
	for _, op := range []**huma.Operation{&out.Get, &out.Put, &out.Post, &out.Delete, &out.Patch} {
		if *op == nil {
			continue
		}
		c := **op
		c.OperationID += "-in-region"
		c.Parameters = append([]*huma.Param{{Name: "aws_region", In: "path", Required: true,
			Schema: &huma.Schema{Type: huma.TypeString, MaxLength: new(32)}}}, c.Parameters...)
		*op = &c
	}
	return &out
}

// inRegion rejects a worker outside the region of the path.
func (s *Server) inRegion(ctx huma.Context, next func(huma.Context)) {
	region, id := regionOf(ctx.Context()), ctx.Param("worker_id")
	if region == "" || id == "" {
		next(ctx)
		return
	}
	w, err := s.fleet.Worker(ctx.Context(), id)
	if err == nil && w.AWSRegion != region {
		err = notFound("worker", id)
	}
	if err != nil {
		refuse(ctx, problem(err))
		return
	}
	next(ctx)
}
