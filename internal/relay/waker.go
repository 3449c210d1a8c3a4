package relay

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"
)

// Backend is the address at which the application of an instance accepts
// connections.
type Backend struct {
	// Addr is the TCP address to connect to when Dial is nil.
	Addr netip.AddrPort
	// Dial connects to a backend that the kernel cannot reach, such as one in the
	// network of a microVM in this process. Each such connection needs goroutines.
	Dial func(ctx context.Context) (net.Conn, error)
	// Generation changes at every start of the application. Idle HTTP connections
	// of an earlier generation are not used again.
	Generation uint64
}

// Cause is the kind of event that requests a wake.
type Cause string

const (
	CauseConnect Cause = "connect" // a new connection on an exposed port
	CauseRequest Cause = "request" // an HTTP request on the shared port
	CauseData    Cause = "data"    // bytes on an open connection, or its close
)

// Arrival describes the client for which a wake is requested.
type Arrival struct {
	Instance string
	Port     int // as given to Listen or Route
	Remote   netip.AddrPort
	Cause    Cause
	At       time.Time
}

// Waker controls whether an instance runs. The owner of the instance's power state
// implements it.
type Waker interface {
	// Ready returns the backend for a port if the application runs and accepts
	// connections. It is called on the event loops for every arrival, so it must
	// not block, and should take no lock and allocate no memory. From before Sleep
	// until the application accepts again it must return false.
	Ready(port int) (Backend, bool)
	// Wake wakes the instance. It returns nil once Ready returns true, and an error
	// if the wake fails or ctx ends. ctx ends at WakeTimeout, or when no connection
	// waits anymore. The error is shown to users. For CauseData the connection
	// belongs to the previous run, so Wake must fail if that run has ended.
	Wake(ctx context.Context, why Arrival) error
}

// Errors with which clients are rejected.
var (
	ErrQueueFull  = errors.New("too many clients wait for this instance")
	ErrClosed     = errors.New("the instance was removed")
	ErrWake       = errors.New("wake failed")
	ErrNotAccept  = errors.New("the application does not accept connections")
	errAbandoned  = errors.New("all clients of this wake have disconnected")
	errClientGone = errors.New("the client went away")
)
