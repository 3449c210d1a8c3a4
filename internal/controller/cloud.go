package controller

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"lull/internal/fleet/sealed"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
)

// Kind is the kind of a failed cloud call. The names are those of platform/ec2.
type Kind string

// The kinds that the controller distinguishes. Any other is retried.
const (
	Throttled      Kind = "throttled"
	NotFound       Kind = "not_found"
	Unauthorized   Kind = "unauthorized"
	Capacity       Kind = "capacity"
	IncorrectState Kind = "incorrect_state"
	Protected      Kind = "protected"
	Mismatch       Kind = "mismatch"
	Unreachable    Kind = "unreachable" // the call may have had its effect
	Canceled       Kind = "canceled"    // the call may have had its effect
	Invalid        Kind = "invalid"
	NoImage        Kind = "no_image"
)

// CallError is the form to which the adapters convert errors.
type CallError struct {
	Kind Kind
	Err  error
}

func (e *CallError) Error() string { return e.Err.Error() }
func (e *CallError) Unwrap() error { return e.Err }

// KindOf returns the kind of the CallError in err, or Unreachable.
func KindOf(err error) Kind {
	if e, ok := errors.AsType[*CallError](err); ok {
		return e.Kind
	}
	return Unreachable
}

// hopeless reports whether the same call can never succeed.
func hopeless(k Kind) bool {
	return k == Unauthorized || k == Mismatch || k == Invalid || k == NoImage
}

// Cause is why an instance is in its state, derived from EC2's StateReason.
type Cause string

// The causes.
const (
	CauseUser     Cause = "user"
	CauseInstance Cause = "instance"
	CauseServer   Cause = "server"
	CauseUnknown  Cause = "unknown"
)

// Instance is EC2's description of one instance.
type Instance struct {
	ID          string
	State       string
	Cause       Cause
	Reason      string
	PublicIP    string
	PrivateIP   string
	Type        string
	ImageID     string
	Name        string
	LaunchTime  time.Time
	ClientToken string
	Tags        map[string]string
	Volumes     []string // IDs of those that are attached
}

// Search selects instances: those with all the tags, with the client token, or
// with an image whose name matches.
type Search struct {
	Tags        map[string]string
	ClientToken string
	ImageName   string
}

// Observer reads one region of one account. An answer is either complete or an
// error.
type Observer interface {
	// States returns the state of every instance by ID.
	States(ctx context.Context) (map[string]string, error)
	// Instances describes ids. Those unknown to EC2 are missing.
	Instances(ctx context.Context, ids []string) (found map[string]Instance, missing []string, err error)
	Find(ctx context.Context, q Search) ([]Instance, error)
}

// Stopped is the result of an accepted stop. Fallback is why EC2 was sent a plain
// stop although hibernation was requested; otherwise empty.
type Stopped struct {
	Hibernating bool
	Fallback    string
}

// Mover changes the power state of instances. A nil error means that EC2 accepted the
// request, not that it is done.
type Mover interface {
	Start(ctx context.Context, id string) error
	Stop(ctx context.Context, id string, hibernate bool) (Stopped, error)
	Terminate(ctx context.Context, id string) error
}

// Launcher launches instances. Repeating Run with the same launch returns the
// instance that the first call created.
type Launcher interface {
	NewestImage(ctx context.Context, pattern string) (id string, err error)
	Run(ctx context.Context, l worker.Launch) (Instance, error)
}

// Machine describes the instance that a launch of an image and an instance type would
// create.
type Machine struct {
	Hibernates bool
	Why        string // why it cannot hibernate
	MemoryMiB  int
	RootDevice string // empty if it is not an EBS volume
	RootGB     int
}

// Cataloger describes what a launch would create.
type Cataloger interface {
	Machine(ctx context.Context, imageID, instanceType string) (Machine, error)
}

// Inspector runs the preflight checks of a stop. found are the codes of its findings.
// After an error other than *UncheckedRisks nothing is known, and the stop is
// blocked. An *UncheckedRisks names the checks that could not be made; the stop is
// blocked unless all of those risks are accepted.
type Inspector interface {
	Preflight(ctx context.Context, id string) (found []string, err error)
}

// UncheckedRisks names preflight checks that could not be made.
type UncheckedRisks struct {
	Codes []string
	Err   error
}

func (e *UncheckedRisks) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *UncheckedRisks) Unwrap() error { return e.Err }

// Tagger writes tags.
type Tagger interface {
	CreateTags(ctx context.Context, ids []string, tags map[string]string) error
	DeleteTags(ctx context.Context, ids []string, keys []string) error
}

// Sizer reads the volumes of many instances in few calls. Those unknown to EC2
// are missing.
type Sizer interface {
	Volumes(ctx context.Context, ids []string) (map[string]worker.Volume, error)
}

// Load is the utilization of an instance in percent; nil means missing.
type Load struct {
	CPU, Memory, Disk *float64
	Period            time.Duration // length of each window
	Windows           []LoadWindow  // complete windows of CPU, oldest first
	Err               error
}

// LoadWindow is the average CPU utilization in the period before End, in percent.
type LoadWindow struct {
	End time.Time
	CPU float64
}

// LoadReader reads the load of many instances in few calls. It returns at least
// the windows that ended after since.
type LoadReader interface {
	Load(ctx context.Context, ids []string, since time.Time) map[string]Load
}

// Cloud is one region of one account. Load, Check, Tag and Size may be nil.
type Cloud struct {
	Observe Observer
	Move    Mover
	Launch  Launcher
	Check   Inspector
	Tag     Tagger
	Load    LoadReader
	Size    Sizer
	// Parts describes images and types. If nil, launches use the image's own root
	// volume and do not enable hibernation.
	Parts Cataloger
}

// System is CML's own status. A nil count is unknown.
type System struct {
	Version string
	Ready   bool
	Labs    *int
	Nodes   *int
	Running *int // running labs
	Info    json.RawMessage
}

// Console is the CML of one worker.
type Console interface {
	Telemetry(ctx context.Context, seen json.RawMessage) worker.Telemetry
	System(ctx context.Context) (System, error)
	RunningLabs(ctx context.Context) (int, error)
}

// LicenseState is the state of a CML license.
type LicenseState struct {
	Done, Failed bool // neither: still in progress
	None         bool // nothing is in progress: it is not registered
	Seat         bool // CML is registered, in compliance or not, or is being registered
	Detail       string
	// CML's own terms, such as COMPLETED and IN_COMPLIANCE.
	Registration, Authorization string
}

// ErrRefused is wrapped by an error of a Licenser if CML itself refused the
// request. After any other error the outcome is unknown.
var ErrRefused = errors.New("CML refuses")

// Licenser manages the license of a worker's CML. When Register returns, the
// request is accepted, not done. Register and Deregister may be repeated.
type Licenser interface {
	Register(ctx context.Context, token sealed.Plain, reregister bool) error
	State(ctx context.Context) (LicenseState, error)
	// Deregister releases the license. local is true if CML could not inform Smart
	// Licensing and deregistered only itself.
	Deregister(ctx context.Context) (local bool, err error)
}

// Warner warns the users of a worker, in its CML's own pages, that it will go
// down. A Console may implement it.
type Warner interface {
	// Warn shows a warning, replacing any earlier one of lull, and returns its
	// ID.
	Warn(ctx context.Context, x warning.Warning) (id string, err error)
	// Withdraw removes a warning. An empty ID removes whatever lull shows. A
	// warning that is gone is no error.
	Withdraw(ctx context.Context, id string) error
}
