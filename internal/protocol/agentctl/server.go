package agentctl

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"lull/internal/lib/httpx"
)

const maxBody = 1 << 20

// Handler serves a over HTTP.
func Handler(a Agent) http.Handler {
	mux := http.NewServeMux()
	route := func(pattern string, h func(r *http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			v, err := h(r)
			if err != nil {
				writeError(w, err)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			json.NewEncoder(w).Encode(v)
		})
	}
	route("GET /v1/status", func(r *http.Request) (any, error) { return a.Status(r.Context()) })
	route("GET /v1/why", func(r *http.Request) (any, error) {
		at, err := queryTime(r, "at")
		if err != nil {
			return nil, err
		}
		return a.Why(r.Context(), at)
	})
	route("POST /v1/reload", func(r *http.Request) (any, error) { return a.Reload(r.Context()) })
	route("POST /v1/snooze", func(r *http.Request) (any, error) {
		q, err := body[SnoozeRequest](r)
		if err != nil {
			return nil, err
		}
		return a.Snooze(r.Context(), q)
	})
	route("POST /v1/complete", func(r *http.Request) (any, error) {
		q, err := body[CompleteRequest](r)
		if err != nil {
			return nil, err
		}
		return a.Complete(r.Context(), q)
	})
	route("POST /v1/ttl/extend", func(r *http.Request) (any, error) {
		q, err := body[ExtendRequest](r)
		if err != nil {
			return nil, err
		}
		return a.ExtendTTL(r.Context(), q)
	})
	route("GET /v1/leases", func(r *http.Request) (any, error) { return a.Leases(r.Context()) })
	route("POST /v1/leases", func(r *http.Request) (any, error) {
		q, err := body[LeaseRequest](r)
		if err != nil {
			return nil, err
		}
		return a.HoldLease(r.Context(), q)
	})
	route("DELETE /v1/leases/{holder}", func(r *http.Request) (any, error) {
		return struct{}{}, a.ReleaseLease(r.Context(), r.PathValue("holder"))
	})
	route("GET /v1/history", func(r *http.Request) (any, error) {
		q, err := historyQuery(r)
		if err != nil {
			return nil, err
		}
		return a.History(r.Context(), q)
	})
	route("POST /v1/halt", func(r *http.Request) (any, error) {
		q, err := body[HaltRequest](r)
		if err != nil {
			return nil, err
		}
		return a.Halt(r.Context(), q)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, Refusal(CodeNotFound, "cannot serve %s %.80q: no such route", r.Method, r.URL.Path))
	})
	return mux
}

func historyQuery(r *http.Request) (q HistoryQuery, err error) {
	if q.Since, err = queryTime(r, "since"); err != nil {
		return q, err
	}
	if q.Until, err = queryTime(r, "until"); err != nil {
		return q, err
	}
	if v := r.URL.Query().Get("limit"); v != "" {
		if q.Limit, err = strconv.Atoi(v); err != nil || q.Limit < 0 {
			return q, Refusal(CodeBadRequest, "cannot read limit %.40q: want a whole number", v)
		}
	}
	return q, nil
}

func queryTime(r *http.Request, name string) (time.Time, error) {
	v := r.URL.Query().Get(name)
	if v == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339, v)
	if err != nil {
		return t, Refusal(CodeBadRequest, "cannot read %s %.60q: want RFC 3339", name, v)
	}
	return t, nil
}

func body[T any](r *http.Request) (T, error) {
	var v T
	b, err := io.ReadAll(r.Body)
	if err == nil && len(b) > 0 {
		err = json.Unmarshal(b, &v)
	}
	if err != nil {
		return v, Refusal(CodeBadRequest, "cannot read the request: %v", err)
	}
	return v, nil
}

// writeError responds with the problem in err; any other error is reported as
// internal.
func writeError(w http.ResponseWriter, err error) {
	p, ok := errors.AsType[*httpx.Problem](err)
	if !ok {
		p = httpx.NewProblem(http.StatusInternalServerError, "internal", err.Error())
	}
	httpx.WriteProblem(w, p)
}
