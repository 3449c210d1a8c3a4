package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"lull/internal/server/idempotency"
)

// maxKey is the maximum length of an idempotency key, in bytes.
const maxKey = 128

// onceKey is the context key under which a request's idempotency key is stored.
type onceKey struct{}

// once answers a repeated call with the first call's answer.
func (s *Server) once(ctx huma.Context, next func(huma.Context)) {
	given, p := ctx.Header("Idempotency-Key"), principalOf(ctx.Context())
	if given == "" || ctx.Method() == http.MethodGet || p.token.ID == "" {
		next(ctx)
		return
	}
	if len(given) > maxKey {
		refuse(ctx, fault(http.StatusUnprocessableEntity, "invalid", "cannot use the idempotency key: it is longer than 128 bytes",
			&huma.ErrorDetail{Message: "longer than 128 bytes", Location: "header.Idempotency-Key"}))
		return
	}
	r, w := humago.Unwrap(ctx)
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
	if err != nil || len(body) > maxBody {
		r.Body = io.NopCloser(io.MultiReader(bytes.NewReader(body), r.Body))
		next(humago.NewContext(ctx.Operation(), r, w)) // the route refuses such a body
		return
	}
	key := idempotency.Key(p.token.ID, given)
	old, claim, err := s.replays.Load().Begin(r.Context(), key, fingerprint(r, body))
	switch {
	case err != nil:
		refuse(ctx, problem(err))
	case old != nil:
		w.Header().Set("Idempotency-Replayed", "true")
		give(w, *old)
	default:
		r = r.WithContext(context.WithValue(r.Context(), onceKey{}, key))
		r.Body = io.NopCloser(bytes.NewReader(body))
		s.first(ctx, r, w, claim, next)
	}
}

// first runs a call and stores its answer before sending it, so that an answer
// the client has received is final.
func (s *Server) first(ctx huma.Context, r *http.Request, w http.ResponseWriter, claim *idempotency.Claim, next func(huma.Context)) {
	rec := &recorder{header: w.Header()}
	ended := false
	// Storing the answer must not depend on the client staying connected.
	keep, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 10*time.Second)
	defer cancel()
	defer func() {
		if !ended { // the route panicked
			if err := claim.Drop(keep); err != nil {
				s.log.Warn("idempotency key stays taken until the lease ends", "err", err)
			}
		}
	}()
	next(humago.NewContext(ctx.Operation(), r, rec))
	ended = true
	a := rec.answer()
	kept := a
	if row, _ := ctx.Operation().Metadata["route"].(route); row.secret && a.Status < 300 {
		kept = secretGone()
	}
	if err := claim.Done(keep, kept); err != nil {
		s.log.Warn("cannot store the answer for repeated requests", "err", err)
	}
	give(w, a)
}

// secretGone returns the answer to a repeated call whose first answer contained a
// secret. Secrets are shown once and stored only as hashes.
func secretGone() idempotency.Answer {
	body, err := json.Marshal(fault(http.StatusConflict, "shown_once", "cannot show the token again: it was shown when this idempotency key was first used; create another"))
	if err != nil {
		body = []byte(`{"status":409}`)
	}
	return idempotency.Answer{Status: http.StatusConflict, Headers: map[string]string{"Content-Type": "application/problem+json"}, Body: body}
}

// fingerprint returns a hash that identifies a request's content.
func fingerprint(r *http.Request, body []byte) string {
	h := sha256.New()
	for _, part := range []string{r.Method, regionOf(r.Context()), r.URL.Path, r.URL.RawQuery, r.Header.Get("If-Match")} {
		h.Write([]byte(part + "\x00"))
	}
	h.Write(body)
	return hex.EncodeToString(h.Sum(nil))
}

// recorder buffers an answer.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
}

func (r *recorder) Write(b []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	return r.body.Write(b)
}

func (r *recorder) answer() idempotency.Answer {
	r.WriteHeader(http.StatusOK)
	a := idempotency.Answer{Status: r.status, Body: r.body.Bytes(), Headers: map[string]string{}}
	for _, name := range []string{"Content-Type", "ETag", "Location"} {
		if v := r.header.Get(name); v != "" {
			a.Headers[name] = v
		}
	}
	return a
}

func give(w http.ResponseWriter, a idempotency.Answer) {
	for k, v := range a.Headers {
		w.Header().Set(k, v)
	}
	w.WriteHeader(a.Status)
	_, _ = w.Write(a.Body) // the answer is stored; a client that has disconnected can repeat the request
}
