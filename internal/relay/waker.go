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
	// Dial reaches a backend that the kernel cannot (the network of a microVM
	// in this process). It costs goroutines per connection.
	Dial func(ctx context.Context) (net.Conn, error)
	// Generation changes with every start of the application. Idle HTTP
	// connections of an earlier generation are not used again.
	Generation uint64
}

// Cause says what requested a wake.
type Cause string

const (
	CauseConnect Cause = "connect" // a new connection on an exposed port
	CauseRequest Cause = "request" // an HTTP request on the shared port
	CauseData    Cause = "data"    // bytes or a close on an open connection
)

// Arrival describes the client that requests a wake, for the record.
type Arrival struct {
	Instance string
	Port     int // as given to Listen or Route
	Remote   netip.AddrPort
	Cause    Cause
	At       time.Time
}

// Waker is implemented by the owner of the power state.
type Waker interface {
	// Ready returns where to connect for this port if the application is running
	// and accepts right now. It is called for every arrival on the event loops:
	// it must not block, and should take no lock and allocate no memory. It must
	// return false from before Sleep until the application accepts again.
	Ready(port int) (Backend, bool)
	// Wake wakes the instance and returns once Ready would return true. It
	// blocks until then, until the wake failed, or until ctx ends, which happens
	// at WakeTimeout and when no connection waits anymore. The error is shown to
	// users. For CauseData the connection belongs to the previous run: a waker
	// refuses if that run has ended.
	Wake(ctx context.Context, why Arrival) error
}

// Reasons for rejecting a client, for errors.Is.
var (
	ErrQueueFull  = errors.New("too many clients wait for this instance")
	ErrClosed     = errors.New("the instance was removed")
	ErrWake       = errors.New("wake failed")
	ErrNotAccept  = errors.New("the application does not accept connections")
	errAbandoned  = errors.New("all clients of this wake have disconnected")
	errClientGone = errors.New("the client went away")
)
