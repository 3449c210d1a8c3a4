// Package httpx contains the common parts of lull's HTTP APIs: a client for URLs
// and unix sockets, problem documents (RFC 9457) as errors, a reader of
// server-sent events, and a server with limits that identifies its unix peers.
//
// It guarantees that the size of every response read is bounded, that an error
// response is returned as an error with status and code, that a peer that stalls
// is disconnected, and that a stopping server gives requests a grace period.
// Routing, access rules and API documents are up to the caller: a Server takes
// any http.Handler.
package httpx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os/user"
	"strconv"
	"sync"
	"time"

	"lull/internal/lib/unixsock"
)

// The limits of a server.
const (
	requestLimit = 30 * time.Second // for reading a request, and for writing its response
	headerLimit  = 10 * time.Second
	idleLimit    = 2 * time.Minute // between the requests of a connection
	grace        = 5 * time.Second // for requests to end when the server stops
	maxHeader    = 64 << 10        // bytes
)

// Server serves a listener until its context ends. Set the fields before Run. A
// Server can run only once. It implements task.Task.
type Server struct {
	Name     string       // for errors and logs
	Listener net.Listener // owned by Run, which closes it
	Handler  http.Handler
	Log      *slog.Logger // nil means no logging

	once  sync.Once
	ready chan struct{}
}

func (s *Server) init() { s.once.Do(func() { s.ready = make(chan struct{}) }) }

// Ready returns a channel that is closed once connections are accepted.
func (s *Server) Ready() <-chan struct{} {
	s.init()
	return s.ready
}

func (s *Server) String() string { return s.Name }

// Run serves until ctx ends, then waits up to the grace period for requests to
// end. It returns nil if it stopped because ctx ended, even if it cut off
// requests.
func (s *Server) Run(ctx context.Context) error {
	s.init()
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	srv := &http.Server{
		Handler:           s.Handler,
		ReadHeaderTimeout: headerLimit,
		ReadTimeout:       requestLimit,
		WriteTimeout:      requestLimit,
		IdleTimeout:       idleLimit,
		MaxHeaderBytes:    maxHeader,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       WithPeer,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(s.Listener) }()
	close(s.ready)
	select {
	case err := <-served:
		return fmt.Errorf("cannot serve %s: %w", s.Name, err)
	case <-ctx.Done():
	}
	last, done := context.WithTimeout(base, grace)
	defer done()
	if err := srv.Shutdown(last); err != nil {
		log.Warn("requests were cut off", "server", s.Name)
		// Close before the context ends: a handler that returns early because its
		// context ended would otherwise answer 200.
		srv.Close()
		cancel()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("cannot serve %s: %w", s.Name, err)
	}
	return nil
}

type peerKey struct{}

// PeerOf returns the peer of the unix socket over which a request came. ok is
// false for TCP, and if the kernel did not identify the peer.
func PeerOf(ctx context.Context) (unixsock.Peer, bool) {
	p, ok := ctx.Value(peerKey{}).(unixsock.Peer)
	return p, ok
}

// WithPeer is used as the ConnContext of a server whose handlers call PeerOf or
// UserOf.
func WithPeer(ctx context.Context, c net.Conn) context.Context {
	if u, ok := c.(*net.UnixConn); ok {
		if p, err := unixsock.PeerOf(u); err == nil {
			return context.WithValue(ctx, peerKey{}, p)
		}
	}
	return ctx
}

// UserOf returns the name of the user at the other end of the unix socket over
// which a request came; "" if PeerOf returns false.
func UserOf(ctx context.Context) string {
	p, ok := PeerOf(ctx)
	if !ok {
		return ""
	}
	id := strconv.Itoa(p.UID)
	if u, err := user.LookupId(id); err == nil {
		return u.Username
	}
	return "uid " + id
}
