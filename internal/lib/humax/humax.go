// Package humax contains the common rules of lull's huma routes.
//
// It guarantees that no response has null in place of a list, and that a request
// is checked before its route runs. A body on a route that takes none, a body
// that is not JSON, and a repeated, unknown or malformed query parameter are
// refused with 422 and the name of the fault. A client that stops sending its
// body is disconnected with 408 after BodyTimeout. Access rules and the meaning
// of the fields are up to the APIs.
package humax

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"lull/internal/lib/httpx"
)

// BodyTimeout is the time limit for a client to send a body.
const BodyTimeout = 10 * time.Second

// Config returns the configuration of an API without huma's own pages. The
// OpenAPI document is at /openapi.json unless the caller changes that.
func Config(title, version string) huma.Config {
	cfg := huma.DefaultConfig(title, version)
	cfg.CreateHooks = nil // no $schema member in responses
	cfg.RejectUnknownQueryParameters = true
	cfg.Transformers = append(cfg.Transformers, func(_ huma.Context, _ string, v any) (any, error) {
		if _, problem := v.(error); problem {
			return v, nil
		}
		return httpx.Lists(v), nil
	})
	return cfg
}

// Strict is the middleware that checks requests. It reads the body of a request
// and replaces it, so it must come after authorization.
func Strict(ctx huma.Context, next func(huma.Context)) {
	r, w := humago.Unwrap(ctx)
	if p := badQuery(ctx.Operation(), r.URL.RawQuery); p != nil {
		httpx.WriteProblem(w, p)
		return
	}
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		next(ctx)
		return
	}
	body, p := readBody(ctx.Operation(), r, w)
	if p != nil {
		w.Header().Set("Connection", "close") // the rest of the body was not read
		httpx.WriteProblem(w, p)
		return
	}
	again := r.WithContext(r.Context())
	again.Body = io.NopCloser(bytes.NewReader(body))
	next(humago.NewContext(ctx.Operation(), again, bodyRead{w}))
}

// bodyRead is the ResponseWriter of a request whose body has been read. It has no
// read deadline, because that would only cancel a request that takes longer.
type bodyRead struct{ http.ResponseWriter }

func (w bodyRead) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// SetReadDeadline does nothing.
func (bodyRead) SetReadDeadline(time.Time) error { return nil }

func fault(status int, code, detail, where, message string) *httpx.Problem {
	p := httpx.NewProblem(status, code, detail)
	p.Errors = []httpx.Fault{{Message: message, Location: where}}
	return p
}

func invalid(detail, where, message string) *httpx.Problem {
	return fault(http.StatusUnprocessableEntity, "invalid", detail, where, message)
}

// badQuery returns a problem for the parts of a query that net/url would silently
// drop: pairs that cannot be decoded, and repeated values of a parameter that
// takes one.
func badQuery(op *huma.Operation, raw string) *httpx.Problem {
	q, err := url.ParseQuery(raw)
	if err != nil {
		return invalid("cannot read the query: "+err.Error(), "query", err.Error())
	}
	for _, p := range op.Parameters {
		if p.In != "query" || p.Schema != nil && p.Schema.Type == huma.TypeArray {
			continue
		}
		if v := q[p.Name]; len(v) > 1 {
			return invalid(fmt.Sprintf("cannot use the query parameter %s: it is given %d times", p.Name, len(v)), "query."+p.Name, "given more than once")
		} else if len(v) == 1 && v[0] == "" && p.Schema != nil && p.Schema.Type != huma.TypeString {
			return invalid(fmt.Sprintf("cannot use the query parameter %s: it is empty", p.Name), "query."+p.Name, "empty")
		}
	}
	return nil
}

// readBody reads the body of a request for op, or returns a problem if it cannot
// be used.
func readBody(op *huma.Operation, r *http.Request, w http.ResponseWriter) ([]byte, *httpx.Problem) {
	none := op.RequestBody == nil
	if none && r.ContentLength > 0 {
		return nil, invalid("cannot take a body: this route has none", "body", "this route takes no body")
	}
	if r.ContentLength == 0 || r.Body == nil || r.Body == http.NoBody {
		if !none && op.RequestBody.Required {
			return nil, invalid("cannot do that without a body", "body", "the body is missing")
		}
		return nil, nil
	}
	most := op.MaxBodyBytes
	if most <= 0 {
		most = 1 << 20
	}
	if none {
		most = 0
	}
	// A transport without deadlines is a test's, which ends by itself.
	conn := http.NewResponseController(w)
	if err := conn.SetReadDeadline(time.Now().Add(BodyTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return nil, httpx.NewProblem(http.StatusInternalServerError, "internal", err.Error())
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, most+1))
	if err == nil {
		_ = conn.SetReadDeadline(time.Time{}) // remove the deadline: net/http keeps reading and would cancel the request when it passes
	}
	large := new(http.MaxBytesError)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, httpx.NewProblem(http.StatusRequestTimeout, "timeout", fmt.Sprintf("cannot wait for the rest of the body: it did not come within %v", BodyTimeout))
	case errors.As(err, &large), err == nil && !none && int64(len(body)) > most:
		return nil, httpx.NewProblem(http.StatusRequestEntityTooLarge, "too_large", fmt.Sprintf("cannot take a body of more than %d bytes", most))
	case err != nil:
		return nil, httpx.NewProblem(http.StatusBadRequest, "unreadable", "cannot read the body: "+err.Error())
	case none && len(body) > 0:
		return nil, invalid("cannot take a body: this route has none", "body", "this route takes no body")
	case none:
		return nil, nil
	case len(body) == 0 && op.RequestBody.Required:
		return nil, invalid("cannot do that without a body", "body", "the body is missing")
	case len(body) == 0 || op.RequestBody.Content["application/json"] == nil:
		return body, nil
	}
	if why := notJSON(body); why != "" {
		return nil, invalid("cannot read the body: "+why, "body", why)
	}
	return body, nil
}

// notJSON describes where body stops being a single JSON value; "" if it is one.
func notJSON(body []byte) string {
	var v any
	err := json.Unmarshal(body, &v)
	if err == nil {
		return ""
	}
	if at, ok := errors.AsType[*json.SyntaxError](err); ok {
		before := body[:min(int(at.Offset), len(body))]
		return fmt.Sprintf("not JSON at line %d, byte %d: %s", 1+bytes.Count(before, []byte("\n")), at.Offset, err)
	}
	return err.Error()
}

// NeverNull declares in the document that lists in responses are never null; huma
// considers any slice nullable. It does not change schemas that requests use too.
// Call it once, after all routes are registered.
func NeverNull(doc *huma.OpenAPI) {
	asked := map[*huma.Schema]bool{}
	var answered []*huma.Schema
	for _, item := range doc.Paths {
		for _, op := range []*huma.Operation{item.Get, item.Put, item.Post, item.Delete, item.Patch} {
			if op == nil {
				continue
			}
			if op.RequestBody != nil {
				for _, m := range op.RequestBody.Content {
					walk(doc, m.Schema, asked)
				}
			}
			for _, res := range op.Responses {
				for _, m := range res.Content {
					answered = append(answered, m.Schema)
				}
			}
		}
	}
	given := map[*huma.Schema]bool{}
	for _, s := range answered {
		walk(doc, s, given)
	}
	for s := range given {
		if s.Type == huma.TypeArray && !asked[s] {
			s.Nullable = false
		}
	}
}

// walk adds s and every schema that it refers to to the set to.
func walk(doc *huma.OpenAPI, s *huma.Schema, to map[*huma.Schema]bool) {
	if s == nil || to[s] {
		return
	}
	to[s] = true
	if s.Ref != "" {
		walk(doc, doc.Components.Schemas.SchemaFromRef(s.Ref), to)
	}
	walk(doc, s.Items, to)
	for _, p := range s.Properties {
		walk(doc, p, to)
	}
	if more, ok := s.AdditionalProperties.(*huma.Schema); ok {
		walk(doc, more, to)
	}
	for _, all := range [][]*huma.Schema{s.OneOf, s.AnyOf, s.AllOf} {
		for _, one := range all {
			walk(doc, one, to)
		}
	}
}
