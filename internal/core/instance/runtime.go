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

// Runtime starts the runs of one kind of instance, and finds them again. Its
// methods are safe for concurrent use.
type Runtime interface {
	Start(ctx context.Context, l Launch) (Workload, error)
	// Adopt finds a run after a restart of the daemon. An identity with only Run
	// set means that the daemon died before it could record the rest. The error
	// is a *GoneError if that run is over.
	Adopt(ctx context.Context, id string, ident Identity) (Workload, error)
	Capabilities() power.Capabilities
}

// Optional abilities of runtimes and workloads. The host checks for them with
// these interfaces.
type (
	// SpecChecker is a runtime with rules for a Spec that its capabilities do not
	// express.
	SpecChecker interface{ CheckSpec(s *Spec) error }
	// Execer is a runtime that can run a command beside an instance. Exec returns
	// the command's exit code once all its output was written, or a *CommandError
	// if the command could not be started. When ctx ends the command is killed.
	Execer interface {
		Exec(ctx context.Context, id string, c Command, s Streams) (code int, err error)
	}
	// Forgetter is a runtime that keeps data of an instance across its runs.
	// Forget deletes the data when the instance is removed.
	Forgetter interface {
		Forget(ctx context.Context, id string) error
	}
	// Ender is a runtime that can end a run that it cannot adopt because the run
	// does not answer. End returns nil only when nothing of the run is left.
	Ender interface {
		End(ctx context.Context, id string) error
	}
	// LogReader is a runtime whose instances' output is stored elsewhere. Logs
	// writes the lines that q selects to w.
	LogReader interface {
		Logs(ctx context.Context, id string, w io.Writer, q LogQuery) error
	}
	// Rooted is a runtime whose programs have their own root directory. Root
	// opens it, which requires that the instance runs or is frozen. The caller
	// closes it.
	Rooted interface {
		Root(id string) (*os.File, error)
	}
	// FileKeeper is a runtime that copies files itself. Trees are tar streams in
	// the format of package tartree. WriteFiles unpacks a stream into the
	// directory at, or, if at does not exist, under that name in its parent. The
	// error for a missing path is tartree.ErrNoPath, for a path that is neither
	// file nor directory tartree.ErrIrregular.
	FileKeeper interface {
		FilesAwake() bool // whether the instance must run for access to its files
		ReadFiles(ctx context.Context, id, at string, w io.Writer) (begun bool, err error)
		WriteFiles(ctx context.Context, id, at string, r io.Reader) error
	}
	// RestRooted is a runtime whose instances have files even while stopped.
	// RestRoot opens their root. The caller closes it, and ensures that the
	// instance stays stopped until then.
	RestRooted interface {
		RestRoot(ctx context.Context, id, image string) (*os.File, error)
	}
	// PortHolder is a runtime whose instances' ports are published by another
	// program, which closes them when an instance stops.
	PortHolder interface {
		// HoldPorts makes new clients of the instance's published ports wait
		// until ReleasePorts, or until a new run of the instance listens. For the
		// first client it calls wake, unless wake is nil. wake must not block.
		// The error is ErrNoPorts if the instance publishes no port. After any
		// other error, clients may wait nevertheless, until ReleasePorts. A second
		// call replaces the first; clients that already wait continue to wait.
		HoldPorts(ctx context.Context, id, image string, wake func(reason string)) error
		ReleasePorts(id string)
	}
	// ConsoleKeeper is a runtime whose instances have a kernel console, separate
	// from the program's output. Console updates the console's file and returns
	// its path; PATH.1 contains older output. Either file may be missing.
	ConsoleKeeper interface {
		Console(ctx context.Context, id string) (path string, err error)
	}
	// ImageKeeper stores files from which instances were made. RemoveImage
	// returns an error for an image that the keeper knows to be in use.
	ImageKeeper interface {
		Images(ctx context.Context) ([]Image, error)
		RemoveImage(ctx context.Context, id string) error
	}
	// Cloner is a runtime that can create a hibernated run of l.ID from another
	// hibernated instance, which stays hibernated. Adopt finds the new run. saved
	// is the clone's size on disk in bytes, without what it shares with the
	// original. Of l, only the fields that name the run and its log are used, and
	// Workspace: without one the clone has no workspace either.
	Cloner interface {
		Clone(ctx context.Context, from string, l Launch) (saved int64, err error)
	}
	// Sizer is a runtime that can estimate the cost of an instance: how much of
	// this machine's memory it may take, in bytes (0 if unknown), and whether its
	// boot and restore are slow.
	Sizer interface {
		Size(s *Spec) (memory int64, slow bool)
	}
	// Identifier is a runtime that can find the instance to which a process
	// belongs. An error means that it belongs to none of the runtime's instances.
	Identifier interface {
		Identify(pid int) (id string, err error)
	}
	// Toiler is a workload that can report whether it is working although no byte
	// moves on its clients' connections. A thread that runs, or that waits for a
	// processor or a disk, may be preparing an answer. AtWork is not called for a
	// frozen workload.
	Toiler interface {
		AtWork() (bool, error)
	}
	// Dialer is a workload with its own network. The relay connects into it with
	// Dial. target is host:port as seen from inside.
	Dialer interface {
		Dial(ctx context.Context, target string) (net.Conn, error)
	}
	// Troubled is a workload that can report what keeps it from working although
	// its run continues. Trouble returns "" for nothing. It does not block.
	Troubled interface{ Trouble() string }
	// Scheduled is a workload in which something may run at certain times, such
	// as a cron daemon. Timers reads those times afresh and returns nil if there
	// is no such daemon. An error means that there is one whose times are
	// unknown. Timers may block as long as file access does.
	Scheduled interface{ Timers() (Timers, error) }
	// Timers are the times at which something in a workload has to run. A Timers
	// is immutable.
	Timers interface {
		// Next returns the first time after t, and what runs then. The zero time
		// means never.
		Next(t time.Time) (at time.Time, by string)
		Working() string // describes what is running now; "" for nothing
	}
	// Flusher is a workload that can write out unsaved data before it is frozen
	// for long. Flush may take seconds; the workload continues to serve
	// meanwhile.
	Flusher interface {
		Flush(ctx context.Context)
	}
	// Hibernator is a workload that can be saved to disk while it is frozen. Thaw
	// restores it. If that is impossible, Thaw's error is a *SnapshotError, and
	// the workload can still be killed.
	Hibernator interface {
		Hibernated() bool // whether it exists only on disk
		// Hibernate saves the workload and returns the size on disk in bytes once
		// all of it is durable. On an error the workload is still frozen in
		// memory.
		Hibernate(ctx context.Context) (saved int64, err error)
	}
)

// LogQuery selects lines of an instance's output.
type LogQuery struct {
	Tail   int       // only the last Tail of the selected lines; all if negative
	Follow bool      // continue with new lines until ctx ends
	Since  time.Time // only lines from this time on; zero for all
	Until  time.Time
	Times  bool // prefix each line with its RFC 3339 time and a space

	Console bool // select the output of the instance's kernel instead
}

// Image is a stored image, or a stored file of a guest.
type Image struct {
	ID     string    `json:"id"`
	Kind   string    `json:"kind" doc:"unpacked: its files; disk: the guest disk built from them, rebuilt if missing; guest: the files of a guest"`
	Source string    `json:"source" doc:"Source it was created from; empty if unknown"`
	Bytes  int64     `json:"bytes" doc:"On disk"`
	MadeAt time.Time `json:"made_at"`
	UsedAt time.Time `json:"used_at" doc:"When a run was last created from it; if never, when it was created"`
	InUse  bool      `json:"in_use" doc:"A run is based on it"`
}

// Errors of Runtime.Start for a Launch with Handoff.
var (
	// ErrNoHandoff means that sockets cannot be handed to this program. The
	// program was not started; a start without Handoff may succeed.
	ErrNoHandoff = errors.New("sockets cannot be handed over")
	// ErrStartAgain means that the supervisor was replaced during the start. The
	// program was not started; another start may succeed.
	ErrStartAgain = errors.New("the supervisor was replaced while the program began")
)

// WithinGroup is the prefix of the reason for a wake by another member of the
// same group that was asked to exit or has exited.
const WithinGroup = "from its own group: "

// ErrNoPorts means that the instance publishes no port by which a client could
// wake it.
var ErrNoPorts = errors.New("it publishes no port, so no client could start it again")

// ErrUnanswered is wrapped by the error of a Freeze that another daemon was asked
// for and did not confirm, so that it can still take effect.
var ErrUnanswered = errors.New("the request can still take effect")

// SnapshotError means that a hibernated workload cannot be restored, because the
// configuration has changed since it was saved or its files are damaged. Nothing
// was changed; the instance must be booted.
type SnapshotError struct{ Reason string }

func (e *SnapshotError) Error() string { return "cannot restore it: " + e.Reason }

// Workload is one run. The daemon makes one call at a time, except Sample.
type Workload interface {
	Identity() Identity
	// Freeze returns nil only once every task has stopped. On an error all tasks
	// run again.
	Freeze(ctx context.Context) error
	Thaw() error
	Still() (bool, error) // whether it is frozen now, by lull or by something else
	// Exiting reports whether the workload can exit when it is thawed, because it
	// was told to exit while frozen.
	Exiting() (bool, error)
	// Guard duplicates the sockets of the frozen workload and calls wake as soon
	// as something happens on one of them. It may call wake from any goroutine;
	// wake must not block.
	Guard(ports []Endpoint, outbound bool, wake func(reason string)) (Guard, error)
	Sample(ports []Endpoint) Sample
	Listeners() ([]Listener, error)
	Signal(sig syscall.Signal) error
	Kill(ctx context.Context) error // nil only when no process is left
	Memory() (int64, error)
	Reclaim(ctx context.Context) (freed int64, err error)
}

// Explainer is a workload that can find out why its run ended, until Kill removes
// the evidence.
type Explainer interface {
	Explain(e Exit) Exit
}

// Guard watches a frozen workload's sockets.
type Guard interface {
	Pending() string // what is waiting right now; "" for nothing
	// Close closes every duplicate. It must be called before the workload is
	// thawed, because a duplicate that stays open hides the end of a connection
	// from its peer.
	Close()
}
