package instance

import (
	"context"
	"syscall"

	"lull/internal/power"
)

// Runtime starts and finds again the runs of one kind of instance. Its methods
// are safe for concurrent use.
type Runtime interface {
	Start(ctx context.Context, l Launch) (Workload, error)
	// Adopt finds a run after a restart of the daemon. An identity with only
	// its Run set means that the daemon died before it could record the rest.
	// The error is a *GoneError when that run is over.
	Adopt(ctx context.Context, id string, ident Identity) (Workload, error)
	Capabilities() power.Capabilities
}

// Workload is one run. The daemon serialises its calls, except Sample.
type Workload interface {
	Identity() Identity
	// Freeze returns nil only once every task is still; on an error all of it
	// runs again.
	Freeze(ctx context.Context) error
	Thaw() error
	Still() (bool, error) // whether it is frozen now, whoever froze it
	// Guard duplicates the sockets of the frozen workload and calls wake, from
	// any goroutine and without waiting, as soon as one of them stirs.
	Guard(ports []Endpoint, outbound bool, wake func(reason string)) (Guard, error)
	Sample(ports []Endpoint) Sample
	Listeners() ([]Listener, error)
	Signal(sig syscall.Signal) error
	Kill(ctx context.Context) error // nil only when no process is left
	Memory() (int64, error)
	Reclaim(ctx context.Context) (freed int64, err error)
}

// Guard watches a frozen workload's sockets.
type Guard interface {
	Pending() string // what waits right now, "" for nothing
	// Close gives every duplicate back. Nothing is thawed before it: a
	// duplicate that outlives the freeze swallows the end of connections.
	Close()
}
