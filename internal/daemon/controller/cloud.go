package controller

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"lull/internal/fleet"
)

// Kind says what sort of failure a call to the cloud was. The names are those
// of edge/ec2.
type Kind string

// The kinds that the controller tells apart; any other is tried again.
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

// CallError is what the adapters of an edge make of its errors.
type CallError struct {
	Kind Kind
	Err  error
}

func (e *CallError) Error() string { return e.Err.Error() }
func (e *CallError) Unwrap() error { return e.Err }

// KindOf is the kind of the CallError in err, or Unreachable.
func KindOf(err error) Kind {
	if e, ok := errors.AsType[*CallError](err); ok {
		return e.Kind
	}
	return Unreachable
}

// hopeless tells whether the same call can never succeed.
func hopeless(k Kind) bool {
	return k == Unauthorized || k == Mismatch || k == Invalid || k == NoImage
}

// Cause is who brought an instance into its state, by EC2's StateReason.
type Cause string

// The causes.
const (
	CauseUser     Cause = "user"
	CauseInstance Cause = "instance"
	CauseServer   Cause = "server"
	CauseUnknown  Cause = "unknown"
)

// Instance is what EC2 tells about one instance.
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
	Volumes     []string // ids of those that are attached
}

// Search selects instances: those with all the tags, with the client token,
// or with an image whose name matches.
type Search struct {
	Tags        map[string]string
	ClientToken string
	ImageName   string
}

// Observer reads one region of one account. An answer is complete or an
// error.
type Observer interface {
	// States reads the state of every instance by id.
	States(ctx context.Context) (map[string]string, error)
	// Instances describes ids; those EC2 does not know are missing.
	Instances(ctx context.Context, ids []string) (found map[string]Instance, missing []string, err error)
	Find(ctx context.Context, q Search) ([]Instance, error)
}

// Stopped is an accepted stop. Fallback says why a plain stop was made where
// hibernation was asked for.
type Stopped struct {
	Hibernating bool
	Fallback    string
}

// Mover moves instances. Accepted is not done.
type Mover interface {
	Start(ctx context.Context, id string) error
	Stop(ctx context.Context, id string, hibernate bool) (Stopped, error)
	Terminate(ctx context.Context, id string) error
}

// Launcher launches instances. Run with the same launch gives the instance
// that the first call made.
type Launcher interface {
	NewestImage(ctx context.Context, pattern string) (id string, err error)
	Run(ctx context.Context, l fleet.Launch) (Instance, error)
}

// Machine is what an image makes of an instance type.
type Machine struct {
	Hibernates bool
	Why        string // it does not hibernate
	MemoryMiB  int
	RootDevice string // empty if it is not an EBS volume
	RootGB     int
}

// Cataloger describes what a launch would make.
type Cataloger interface {
	Machine(ctx context.Context, imageID, instanceType string) (Machine, error)
}

// Inspector looks at what speaks against a stop. Found are preflight codes;
// an error is unknown, and blocks.
type Inspector interface {
	Preflight(ctx context.Context, id string) (found []string, err error)
}

// Tagger writes tags.
type Tagger interface {
	CreateTags(ctx context.Context, ids []string, tags map[string]string) error
	DeleteTags(ctx context.Context, ids []string, keys []string) error
}

// Sizer reads the volumes of many instances in few calls. Those that EC2 does
// not know are missing.
type Sizer interface {
	Volumes(ctx context.Context, ids []string) (map[string]fleet.Volume, error)
}

// Load is the utilization of an instance in percent; nil is missing.
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

// LoadReader reads the load of many instances in few calls. It reads at least
// the windows that ended after since.
type LoadReader interface {
	Load(ctx context.Context, ids []string, since time.Time) map[string]Load
}

// Cloud is one region of one account. Load, Check, Tag and Size may be nil.
type Cloud struct {
	Look   Observer
	Move   Mover
	Launch Launcher
	Check  Inspector
	Tag    Tagger
	Load   LoadReader
	Size   Sizer
	// Parts says what images and types are made of; nil launches with the image's
	// own root volume and without hibernation.
	Parts Cataloger
}

// Telemetry is one reading of a worker's CML history.
type Telemetry struct {
	CheckedAt  time.Time // when the answer had been read completely
	Unknown    string    // why it says nothing about quiet; empty if it does
	Newest     time.Time // newest relevant activity by our clock; zero for none
	Recent     []fleet.Event
	Seen       json.RawMessage // to be handed to the next reading
	Future     int64           // future-dated events met
	Malformed  int64
	Categories map[string]int64 // unknown ones
}

// System is what CML tells about itself. A nil count is not known.
type System struct {
	Version string
	Ready   bool
	Labs    *int
	Nodes   *int
	Running *int // labs that run
	Info    json.RawMessage
}

// Console is the CML of one worker.
type Console interface {
	Telemetry(ctx context.Context, seen json.RawMessage) Telemetry
	System(ctx context.Context) (System, error)
	RunningLabs(ctx context.Context) (int, error)
}

// LicenseState is where a CML license stands.
type LicenseState struct {
	Done, Failed bool // neither: still under way
	None         bool // or nothing is under way: it is not registered
	Seat         bool // CML is registered, in compliance or not, or being registered
	Detail       string
	// CML's own words, such as COMPLETED and IN_COMPLIANCE.
	Registration, Authorization string
}

// ErrRefused is in an error of a Licenser that is CML's own word: it will not
// do what it was asked. After any other error nobody knows whether it did.
var ErrRefused = errors.New("CML refuses")

// Licenser works on the license of a worker's CML. Register returning means
// accepted, never done. Both Register and Deregister may be asked twice.
type Licenser interface {
	Register(ctx context.Context, token string, reregister bool) error
	State(ctx context.Context) (LicenseState, error)
	// Deregister returns local when Smart Licensing could not be told.
	Deregister(ctx context.Context) (local bool, err error)
}

// Warner tells the users of a worker that it goes down, in its CML's own
// pages. A Console may implement it.
type Warner interface {
	// Warn shows a warning, in place of any that lull showed before, and
	// returns its id.
	Warn(ctx context.Context, x fleet.Warning) (id string, err error)
	// Withdraw takes a warning away; an empty id is whatever lull shows. One
	// that is gone is no error.
	Withdraw(ctx context.Context, id string) error
}
