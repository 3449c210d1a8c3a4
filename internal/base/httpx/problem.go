package httpx

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
)

// Problem is an RFC 9457 problem document and the error that carries it.
type Problem struct {
	Type      string  `json:"type,omitempty"` // a URI; absent is about:blank
	Title     string  `json:"title"`          // of the status where it is empty
	Status    int     `json:"status"`
	Detail    string  `json:"detail,omitempty"`     // a sentence for people
	Code      string  `json:"code,omitempty"`       // for programs, such as a block's code
	RequestID string  `json:"request_id,omitempty"` // filled in by WriteProblem
	Errors    []Fault `json:"errors,omitempty"`     // every fault of a bad request
}

// Fault is one thing that is wrong with a request.
type Fault struct {
	Message  string `json:"message"`
	Location string `json:"location,omitempty"` // such as body.pause_after or query.limit
}

func (p *Problem) Error() string {
	text := p.Detail
	if text == "" {
		text = or2(p.Title, http.StatusText(p.Status))
	}
	for _, f := range p.Errors {
		text += "; "
		if f.Location != "" {
			text += f.Location + ": "
		}
		text += f.Message
	}
	return text
}

func or2(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}

// Problemf makes a problem from a status and a sentence.
func Problemf(status int, format string, args ...any) *Problem {
	return &Problem{Status: status, Detail: fmt.Sprintf(format, args...)}
}

// WriteProblem answers a request with a problem document.
func WriteProblem(w http.ResponseWriter, r *http.Request, p *Problem) {
	out := *p
	if out.Status < 400 || out.Status > 599 {
		out.Status = http.StatusInternalServerError
	}
	out.Title = or2(out.Title, http.StatusText(out.Status))
	out.RequestID = or2(out.RequestID, RequestID(r.Context()))
	body, err := json.Marshal(&out)
	if err != nil {
		http.Error(w, out.Title, out.Status)
		return
	}
	h := w.Header()
	h.Del("Content-Length")
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(out.Status)
	w.Write(append(body, '\n'))
}

// Handle makes a http.Handler of a function that returns its error. A *Problem
// is answered as it is, a body past the limit with 413; a client that has gone
// gets nothing; any other error is logged under the request id and answered
// with 500, its text kept from the client.
func Handle(log *slog.Logger, f func(http.ResponseWriter, *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := f(w, r)
		if err == nil {
			return
		}
		if p, ok := errors.AsType[*Problem](err); ok {
			WriteProblem(w, r, p)
			return
		}
		if e, ok := errors.AsType[*http.MaxBytesError](err); ok {
			WriteProblem(w, r, Problemf(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", e.Limit))
			return
		}
		if errors.Is(err, context.Canceled) && r.Context().Err() != nil {
			return
		}
		log.Error("a request failed", "request", RequestID(r.Context()), "method", r.Method, "path", r.URL.Path, "error", err)
		WriteProblem(w, r, Problemf(http.StatusInternalServerError, "the request failed inside lull; the log has it under its request id"))
	})
}

// WriteJSON answers with a value as JSON and a line end.
func WriteJSON(w http.ResponseWriter, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("cannot encode the answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, err = w.Write(append(body, '\n'))
	return err
}

// ReadJSON decodes the body of a request into v: exactly one JSON value with
// no field that v does not have. Its errors are problems with status 400, or
// 413 for a body past the limit, that name the field.
func ReadJSON(r *http.Request, v any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(v)
	if err == nil {
		if _, more := d.Token(); more != io.EOF {
			if _, ok := errors.AsType[*http.MaxBytesError](more); ok {
				return more
			}
			return Problemf(http.StatusBadRequest, "cannot read the body: something follows the JSON value")
		}
		return nil
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return err
	}
	bad := &Problem{Status: http.StatusBadRequest, Detail: "cannot read the body"}
	fault := Fault{Message: err.Error(), Location: "body"}
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		fault.Message = fmt.Sprintf("a %s stands where a %s belongs", e.Value, e.Type)
		if e.Field != "" {
			fault.Location = "body." + e.Field
		}
	}
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		fault.Message = fmt.Sprintf("no JSON at byte %d: %v", e.Offset, e)
	}
	if errors.Is(err, io.EOF) {
		fault.Message = "it is empty"
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		fault.Message = "it is cut off"
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		fault = Fault{Message: "there is no such field", Location: "body." + strings.Trim(name, `"`)}
	}
	bad.Errors = []Fault{fault}
	return bad
}
