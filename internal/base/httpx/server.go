// Package httpx is the plumbing that every HTTP API of lull shares: a server
// with limits, request ids, peer credentials and problem documents (RFC 9457),
// streams of JSON lines and of server-sent events, and a client for unix
// sockets and URLs.
//
// It guarantees that a body is never read past its limit, that a peer that
// stalls is let go, that every answer carries a request id, that a panic is
// one failed request, and that a stopping server lets requests end for a while
// and tells streams at once. Routing, access rules and documents of the API
// are left to those who own them: a Server takes any http.Handler.
package httpx

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"time"
)

// The limits of a server that says nothing else.
const (
	DefaultMaxBody  = 1 << 20          // bytes of a request's body
	DefaultRequest  = 30 * time.Second // to read a request, and to write its answer
	DefaultIdle     = 2 * time.Minute  // between the requests of a connection
	DefaultGrace    = 5 * time.Second  // for requests to end when the server stops
	maxHeaderBytes  = 64 << 10
	readHeaderLimit = 10 * time.Second
)

// Server serves a listener until its context ends. Set the fields before Run;
// a Server runs once. It has the shape of task.Task.
type Server struct {
	Name     string       // for errors and logs
	Listener net.Listener // owned by Run, which closes it
	Handler  http.Handler
	Log      *slog.Logger // nil discards

	MaxBody int64         // 0 is DefaultMaxBody, negative is no limit
	Request time.Duration // 0 is DefaultRequest; streams extend it with every write
	Grace   time.Duration // 0 is DefaultGrace

	once  sync.Once
	ready chan struct{}
}

func (s *Server) init() { s.once.Do(func() { s.ready = make(chan struct{}) }) }

// Ready closes when connections are accepted.
func (s *Server) Ready() <-chan struct{} {
	s.init()
	return s.ready
}

func (s *Server) String() string { return s.Name }

// Run serves until ctx ends, then lets requests end for the grace time. It
// returns nil when it stopped as asked, also when it had to cut requests off.
func (s *Server) Run(ctx context.Context) error {
	s.init()
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	base, cancel := context.WithCancel(context.WithValue(context.WithoutCancel(ctx), stoppingKey{}, ctx.Done()))
	defer cancel()
	limit := or(s.Request, DefaultRequest)
	srv := &http.Server{
		Handler:           s.wrap(log),
		ReadHeaderTimeout: min(readHeaderLimit, limit),
		ReadTimeout:       limit,
		WriteTimeout:      limit,
		IdleTimeout:       DefaultIdle,
		MaxHeaderBytes:    maxHeaderBytes,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       withPeer,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(s.Listener) }()
	close(s.ready)
	select {
	case err := <-served:
		return fmt.Errorf("cannot serve %s: %w", s.Name, err)
	case <-ctx.Done():
	}
	grace, done := context.WithTimeout(base, or(s.Grace, DefaultGrace))
	defer done()
	if err := srv.Shutdown(grace); err != nil {
		log.Warn("requests were cut off", "server", s.Name)
		cancel()
		srv.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("cannot serve %s: %w", s.Name, err)
	}
	return nil
}

func or[T int64 | time.Duration](v, otherwise T) T {
	if v == 0 {
		return otherwise
	}
	return v
}

type stoppingKey struct{}

// Stopping closes when the server that has this request is asked to stop.
// Streams end then; without it they would be cut off after the grace time. It
// is nil for requests of another server.
func Stopping(ctx context.Context) <-chan struct{} {
	ch, _ := ctx.Value(stoppingKey{}).(<-chan struct{})
	return ch
}

type requestKey struct{}

// RequestID is the id of the request that a context belongs to, or "".
func RequestID(ctx context.Context) string {
	id, _ := ctx.Value(requestKey{}).(string)
	return id
}

// RequestIDHeader carries the request id in both directions. A client may
// choose it: up to 64 letters, digits, dots, dashes and underscores.
const RequestIDHeader = "X-Request-Id"

func requestID(given string) string {
	if given == "" || len(given) > 64 {
		return rand.Text()
	}
	for _, c := range []byte(given) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '-', c == '_':
		default:
			return rand.Text()
		}
	}
	return given
}

// wrap puts id, size limit and recovery around the handler.
func (s *Server) wrap(log *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := requestID(r.Header.Get(RequestIDHeader))
		w.Header().Set(RequestIDHeader, id)
		r = r.WithContext(context.WithValue(r.Context(), requestKey{}, id))
		if limit := or(s.MaxBody, DefaultMaxBody); limit > 0 {
			r.Body = http.MaxBytesReader(w, r.Body, limit)
		}
		track := &tracked{ResponseWriter: w}
		defer func() {
			v := recover()
			if v == nil {
				return
			}
			if v == http.ErrAbortHandler {
				panic(v)
			}
			log.Error("a request panicked", "server", s.Name, "request", id, "path", r.URL.Path, "panic", v, "stack", string(debug.Stack()))
			if track.wrote {
				panic(http.ErrAbortHandler) // the client must not take half an answer for a whole one
			}
			WriteProblem(w, r, &Problem{Status: http.StatusInternalServerError, Detail: "the request failed inside lull; the log has it under its request id"})
		}()
		s.Handler.ServeHTTP(track, r)
	})
}

// tracked knows whether an answer has begun.
type tracked struct {
	http.ResponseWriter
	wrote bool
}

func (t *tracked) WriteHeader(status int) {
	t.wrote = t.wrote || status >= 200
	t.ResponseWriter.WriteHeader(status)
}

func (t *tracked) Write(p []byte) (int, error) {
	t.wrote = true
	return t.ResponseWriter.Write(p)
}

// Flush keeps http.Flusher for those who ask for it by type.
func (t *tracked) Flush() {
	t.wrote = true
	http.NewResponseController(t.ResponseWriter).Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (t *tracked) Unwrap() http.ResponseWriter { return t.ResponseWriter }
