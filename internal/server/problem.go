package server

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/lib/httpx"
	"lull/internal/server/access"
	"lull/internal/server/idempotency"
	"lull/internal/store"
)

// fault returns a problem document.
func fault(status int, code, detail string, errs ...*huma.ErrorDetail) *huma.ErrorModel {
	return &huma.ErrorModel{Type: httpx.TypeOf(code), Title: http.StatusText(status), Status: status, Detail: detail, Errors: errs}
}

func notFound(kind, name string) error { return &failure.NotFound{Kind: kind, Name: name} }

func invalid(field, detail string) error { return &failure.Invalid{Field: field, Detail: detail} }

// problem converts an error to a problem document. The document of an internal error
// does not contain internals.
func problem(err error) error {
	if err == nil {
		return nil
	}
	if model, ok := errors.AsType[*huma.ErrorModel](err); ok {
		return model
	}
	if m := recorded(err); m != nil {
		return m
	}
	switch {
	case errors.Is(err, access.ErrNotFound):
		return fault(http.StatusNotFound, "not_found", err.Error())
	case errors.Is(err, idempotency.ErrOther):
		return fault(http.StatusUnprocessableEntity, "idempotency_key_reused", err.Error(), &huma.ErrorDetail{Message: "used for another request", Location: "header.Idempotency-Key"})
	case errors.Is(err, idempotency.ErrRunning):
		return fault(http.StatusConflict, "idempotency_key_running", err.Error())
	case errors.Is(err, store.ErrNoSpace):
		return fault(http.StatusInsufficientStorage, "store_full", err.Error())
	case errors.Is(err, store.ErrTooLarge):
		return fault(http.StatusUnprocessableEntity, "too_large", err.Error())
	case errors.Is(err, store.ErrAmbiguous):
		return fault(http.StatusServiceUnavailable, "outcome_unknown", err.Error())
	case errors.Is(err, store.ErrConflict):
		return fault(http.StatusConflict, "changed", err.Error())
	case errors.Is(err, store.ErrUnavailable), errors.Is(err, store.ErrLeaseLost),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return fault(http.StatusServiceUnavailable, "store_unavailable", err.Error())
	}
	return fault(http.StatusInternalServerError, "internal", err.Error())
}

// recorded returns the problem for an error of package fleet, or nil.
func recorded(err error) *huma.ErrorModel {
	if e, ok := errors.AsType[*failure.NotFound](err); ok {
		return fault(http.StatusNotFound, "not_found", e.Error())
	}
	if e, ok := errors.AsType[*failure.Refused](err); ok {
		var details []*huma.ErrorDetail
		for _, b := range e.Blocks {
			details = append(details, &huma.ErrorDetail{Message: b.Sentence, Location: string(b.Code)})
		}
		return fault(http.StatusConflict, e.Reason, e.Error(), details...)
	}
	if e, ok := errors.AsType[*failure.Conflict](err); ok {
		return fault(http.StatusConflict, "conflict", e.Error())
	}
	if e, ok := errors.AsType[*power.IllegalError](err); ok {
		return fault(http.StatusConflict, "status", e.Error())
	}
	if e, ok := errors.AsType[*access.InvalidError](err); ok {
		return fault(http.StatusUnprocessableEntity, "invalid", e.Error(), &huma.ErrorDetail{Message: e.Detail, Location: "body." + e.Field})
	}
	var details []*huma.ErrorDetail
	for _, e := range invalids(err) {
		details = append(details, &huma.ErrorDetail{Message: e.Detail, Location: "body." + e.Field})
	}
	if len(details) > 0 {
		return fault(http.StatusUnprocessableEntity, "invalid", err.Error(), details...)
	}
	return nil
}

// invalids returns all Invalid errors in the tree of err.
func invalids(err error) []*failure.Invalid {
	if e, ok := err.(*failure.Invalid); ok {
		return []*failure.Invalid{e}
	}
	var out []*failure.Invalid
	switch u := err.(type) {
	case interface{ Unwrap() []error }:
		for _, e := range u.Unwrap() {
			out = append(out, invalids(e)...)
		}
	case interface{ Unwrap() error }:
		out = invalids(u.Unwrap())
	}
	return out
}

// writeProblem answers with a problem document outside of a route.
func writeProblem(w http.ResponseWriter, status int, code, detail string) {
	httpx.WriteProblem(w, httpx.NewProblem(status, code, detail))
}

// refuse answers with a problem document in a middleware.
func refuse(ctx huma.Context, err error) {
	m, ok := errors.AsType[*huma.ErrorModel](err)
	if !ok {
		m = fault(http.StatusInternalServerError, "internal", err.Error())
	}
	body, err := json.Marshal(m)
	if err != nil {
		body = []byte(`{"title":"Internal Server Error","status":500}`)
	}
	ctx.SetHeader("Content-Type", "application/problem+json")
	ctx.SetStatus(m.Status)
	_, _ = ctx.BodyWriter().Write(body) // an error means that the client has disconnected
}
