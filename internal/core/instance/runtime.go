package instance

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"lull/internal/core/power"
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

// Optional abilities of runtimes and workloads. The host checks for them with
// these interfaces.
type (
	// SpecChecker is a runtime with rules of its own for a Spec, beyond what
	// its capabilities say.
	SpecChecker interface{ CheckSpec(s *Spec) error }
	// Execer is a runtime that can run a command beside an instance. Exec returns
	// its exit code once everything it printed was written; a *CommandError if it
	// could not be started. When ctx ends the command is killed.
	Execer interface {
		Exec(ctx context.Context, id string, c Command, s Streams) (code int, err error)
	}
	// Forgetter is a runtime that keeps something of an instance across its
	// runs, until the instance is removed.
	Forgetter interface {
		Forget(ctx context.Context, id string) error
	}
	// Ender is a runtime that can end a run which it cannot adopt, because that
	// does not answer: End returns nil only when nothing of it is left.
	Ender interface {
		End(ctx context.Context, id string) error
	}
	// LogReader is a runtime whose instances' output is stored elsewhere. The
	// lines that q selects go to w.
	LogReader interface {
		Logs(ctx context.Context, id string, w io.Writer, q LogQuery) error
	}
	// Rooted is a runtime whose programs see a root directory of their own. Root
	// opens it while the instance runs or is frozen; the caller closes it.
	Rooted interface {
		Root(id string) (*os.File, error)
	}
	// FileKeeper is a runtime that copies files itself. Trees are tar streams, as of
	// package tartree. WriteFiles unpacks one into the directory at, or under that
	// name in the directory above. An error about a missing path is tartree.ErrNoPath,
	// one about a path that is no file or directory tartree.ErrIrregular.
	FileKeeper interface {
		FilesAwake() bool // whether the instance must run for access to its files
		ReadFiles(ctx context.Context, id, at string, w io.Writer) (begun bool, err error)
		WriteFiles(ctx context.Context, id, at string, r io.Reader) error
	}
	// RestRooted is a runtime whose instances have files while they are
	// stopped. The caller ensures that the instance stays stopped, and closes
	// the root.
	RestRooted interface {
		RestRoot(ctx context.Context, id, image string) (*os.File, error)
	}
	// PortHolder is a runtime whose instances have their ports published by another
	// program, which closes them when an instance stops.
	PortHolder interface {
		// HoldPorts makes new clients of the published ports of an instance wait, until
		// ReleasePorts, or until a run of it listens. For the first client it calls wake,
		// unless that is nil. wake must not wait. The error is ErrNoPorts if it publishes
		// none. A call in place of an earlier one keeps those that wait.
		HoldPorts(ctx context.Context, id, image string, wake func(reason string)) error
		ReleasePorts(id string)
	}
	// ConsoleKeeper is a runtime whose instances have a kernel console,
	// separate from the program's output. Console updates its file and returns
	// the path; PATH.1 holds older output. Neither file needs to exist.
	ConsoleKeeper interface {
		Console(ctx context.Context, id string) (path string, err error)
	}
	// ImageKeeper keeps files that instances were made of. RemoveImage refuses
	// one that is in use as the keeper knows it.
	ImageKeeper interface {
		Images(ctx context.Context) ([]Image, error)
		RemoveImage(ctx context.Context, id string) error
	}
	// Cloner is a runtime that can create a hibernated run of l.ID from another
	// hibernated instance, which stays hibernated; Adopt finds the new run.
	// saved is its size on disk in bytes, without what both share. Of l only
	// the fields that name the run and its log are used, and its workspace:
	// without one the clone has no workspace either.
	Cloner interface {
		Clone(ctx context.Context, from string, l Launch) (saved int64, err error)
	}
	// Sizer is a runtime that knows how much memory of this machine an instance
	// may take, in bytes (0 if unknown), and whether it is slow to boot and to
	// restore.
	Sizer interface {
		Size(s *Spec) (memory int64, slow bool)
	}
	// Identifier is a runtime that can tell which instance a process belongs
	// to; an error means none of its own.
	Identifier interface {
		Identify(pid int) (id string, err error)
	}
	// Toiler is a workload that reports whether it is working while none of its
	// clients moves a byte: a thread that runs, or waits for a processor or a
	// disk, may be preparing an answer. It is not called for a frozen workload.
	Toiler interface {
		AtWork() (bool, error)
	}
	// Dialer is a workload with a separate network, into which the relay
	// connects with Dial. target is host:port as the workload sees it.
	Dialer interface {
		Dial(ctx context.Context, target string) (net.Conn, error)
	}
	// Troubled is a workload that can report what keeps it from working
	// although its run continues; "" for nothing. Trouble does not block.
	Troubled interface{ Trouble() string }
	// Scheduled is a workload in which something may run at certain times, such as a
	// cron. Timers reads afresh when that is; nil if there is nothing of the kind.
	// An error means that there is, and that its times are unknown. It may block
	// for as long as a file system does.
	Scheduled interface{ Timers() (Timers, error) }
	// Timers are the times at which something in a workload has to run. They do
	// not change.
	Timers interface {
		// Next returns the first time after t, zero for never, and whose it is.
		Next(t time.Time) (at time.Time, by string)
		Working() string // describes what runs at present; "" for nothing
	}
	// Flusher is a workload that can write out data that must not be lost
	// before it is frozen for long. This may take seconds, during which the
	// workload serves.
	Flusher interface {
		Flush(ctx context.Context)
	}
	// Hibernator is a workload that can be saved to disk while it is frozen.
	// Thaw restores it; when that is impossible its error is a
	// *SnapshotError, and the workload is still there to be killed.
	Hibernator interface {
		Hibernated() bool // whether it is on disk only
		// Hibernate returns once everything is durable, with how many bytes
		// that is. On an error the workload is frozen as before.
		Hibernate(ctx context.Context) (saved int64, err error)
	}
)

// LogQuery selects lines of an instance's output.
type LogQuery struct {
	Tail   int       // the last of the selected lines, all if negative
	Follow bool      // and new ones until the caller leaves
	Since  time.Time // zero is no bound
	Until  time.Time
	Times  bool // RFC 3339 and a space before each line

	Console bool // select the output of the instance's kernel instead
}

// Image is something that is kept of an image, or of a guest.
type Image struct {
	ID     string    `json:"id"`
	Kind   string    `json:"kind" doc:"unpacked: its files; disk: the guest disk built from them, rebuilt if missing; guest: the files of a guest"`
	Source string    `json:"source" doc:"Source it was created from; empty if unknown"`
	Bytes  int64     `json:"bytes" doc:"On disk"`
	MadeAt time.Time `json:"made_at"`
	UsedAt time.Time `json:"used_at" doc:"When a run was last created from it; if never, when it was created"`
	InUse  bool      `json:"in_use" doc:"A run is based on it"`
}

// Errors of Runtime.Start with a Launch.Handoff.
var (
	// ErrNoHandoff says that sockets cannot be handed to this program. Nothing
	// runs, and a start without Handoff may succeed.
	ErrNoHandoff = errors.New("sockets cannot be handed over")
	// ErrStartAgain says that the start was lost with the supervisor. Nothing
	// runs, and the next start may succeed.
	ErrStartAgain = errors.New("the supervisor was replaced while the program began")
)

// WithinGroup begins the reason of a wake by another member of the same group, such as
// one that closes its connections because it is stopped.
const WithinGroup = "from its own group: "

// ErrNoPorts says that no published port can wake an instance.
var ErrNoPorts = errors.New("it publishes no port, so no client could start it again")

// ErrUnanswered marks a failed Freeze that another daemon was requested to do,
// and that can still take effect.
var ErrUnanswered = errors.New("the request can still take effect")

// SnapshotError means that a hibernated workload cannot be restored: the
// configuration has changed since it was saved, or its files are damaged.
// Nothing was changed; the instance must be booted.
type SnapshotError struct{ Reason string }

func (e *SnapshotError) Error() string { return "cannot restore it: " + e.Reason }

// Workload is one run. The daemon serialises its calls, except Sample.
type Workload interface {
	Identity() Identity
	// Freeze returns nil only once every task is still; on an error all of it
	// runs again.
	Freeze(ctx context.Context) error
	Thaw() error
	Still() (bool, error) // whether it is frozen now, by lull or otherwise
	// Exiting reports whether it can exit when it is thawed, because it was asked
	// to while it was frozen.
	Exiting() (bool, error)
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

// Explainer is implemented by workloads that can learn why their run ended
// until Kill clears it away.
type Explainer interface {
	Explain(e Exit) Exit
}

// Guard watches a frozen workload's sockets.
type Guard interface {
	Pending() string // what waits right now, "" for nothing
	// Close gives every duplicate back. Nothing is thawed before it: a
	// duplicate that outlives the freeze swallows the end of connections.
	Close()
}
