// Package agentctl is the protocol between the command line and an agent over
// the agent's unix socket: the objects, a client, and the server side as an
// http.Handler over Agent.
//
// Requests and answers are JSON over HTTP, a request at most 1 MiB. An error is
// a problem document (RFC 9457), here a *httpx.Problem. Field names are a
// contract. Times are RFC 3339 or null, durations are seconds in names that end
// in _seconds.
//
// Authorization is left to the socket's mode and the caller of Handler, which
// passes the caller's name with WithCaller.
package agentctl

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/tags"
)

// Agent answers requests. Each method is safe for concurrent use, and an error
// that is a *httpx.Problem stays one on the wire.
type Agent interface {
	Status(ctx context.Context) (Status, error)
	Why(ctx context.Context, at time.Time) (Why, error) // zero for now
	Reload(ctx context.Context) (Reload, error)
	Snooze(ctx context.Context, r SnoozeRequest) (Status, error)
	Complete(ctx context.Context, r CompleteRequest) (Status, error)
	ExtendTTL(ctx context.Context, r ExtendRequest) (Status, error)
	HoldLease(ctx context.Context, r LeaseRequest) (idle.Lease, error)
	ReleaseLease(ctx context.Context, holder string) error
	Leases(ctx context.Context) ([]idle.Lease, error)
	History(ctx context.Context, q HistoryQuery) ([]Entry, error)
	Halt(ctx context.Context, r HaltRequest) (Status, error)
}

// Stage is one of the three stages of a check: 1 is a connected user, 2 is work
// in the background, 3 is sustained quiet.
type Stage struct {
	Number   int    `json:"number"`
	Name     string `json:"name"`
	Answer   string `json:"answer"` // idle, not_idle, unknown, not_asked
	Sentence string `json:"sentence"`
}

// Config is one source of the policy and how reading it went.
type Config struct {
	Source string       `json:"source"`          // tags, cache, file
	State  string       `json:"state"`           // read, absent, unreadable, cached, replaced
	Detail string       `json:"detail"`          // why it is unreadable
	ReadAt *time.Time   `json:"read_at"`         // of the values that hold
	Faults []tags.Fault `json:"faults"`          // what of it cannot be used
	Values []Setting    `json:"values,omitzero"` // what it says
}

// Setting is one value that holds and where it comes from.
type Setting struct {
	Name   string `json:"name"`
	Value  string `json:"value"`  // of a command its program, of an address its host
	Source string `json:"source"` // default, tags, cache, file, extended
}

// Outcome is an action and how it went.
type Outcome struct {
	Generation uint64     `json:"generation"`
	Action     string     `json:"action"` // stop, hibernate, terminate, poweroff
	Reason     string     `json:"reason"` // idle_timeout, ttl, completion, manual
	Phase      string     `json:"phase"`  // intent, hook, settling, calling, accepted, done, cancelled, failed
	Detail     string     `json:"detail"`
	InUse      []string   `json:"in_use"` // what was active when a TTL or completion acted
	StartedAt  time.Time  `json:"started_at"`
	EndedAt    *time.Time `json:"ended_at"`
	Hook       *Hook      `json:"hook"`                  // pre-stop; nil if it did not run
	PostCancel *Hook      `json:"post_cancel,omitempty"` // ran because the action was canceled after pre-stop
}

// Hook is a run of the pre-stop or the post-cancel hook.
type Hook struct {
	Command  string        `json:"command"` // the program only, without its arguments
	User     string        `json:"user"`
	ExitCode int           `json:"exit_code"` // -1 when it did not end by itself
	TimedOut bool          `json:"timed_out"`
	Took     idle.Duration `json:"took_seconds"`
	Output   string        `json:"output"` // the last 4 KiB
	Answer   string        `json:"answer"` // proceed, veto, defer
	Error    string        `json:"error"`
}

// Outcome says how the hook ended: "ended with code 3 after 2s".
func (h *Hook) Outcome() string {
	took := idle.Human(time.Duration(h.Took))
	switch {
	case h.TimedOut:
		return "was killed at its timeout, after " + took
	case h.Error != "":
		return "failed: " + h.Error
	}
	return fmt.Sprintf("ended with code %d after %s", h.ExitCode, took)
}

// LastLine returns the last line that the hook printed, at most 200 bytes of it.
func (h *Hook) LastLine() string {
	lines := strings.FieldsFunc(h.Output, func(r rune) bool { return r == '\n' || r == '\r' })
	for _, l := range slices.Backward(lines) {
		if l = strings.TrimSpace(l); l != "" {
			return strings.ToValidUTF8(l[:min(len(l), 200)], "")
		}
	}
	return ""
}

// Alarm is something that keeps the agent from doing its work and that a
// person has to know of.
type Alarm struct {
	Code     string    `json:"code"`
	Sentence string    `json:"sentence"`
	Since    time.Time `json:"since"`
}

// Status is everything the agent knows now.
type Status struct {
	Version    string         `json:"version"`
	BuildDate  string         `json:"build_date"`
	InstanceID string         `json:"instance_id"`           // empty without a cloud, or while it is not known
	Cloud      string         `json:"cloud"`                 // ec2, none
	CloudError string         `json:"cloud_error,omitempty"` // why instance_id is not known
	Region     string         `json:"region"`
	BootID     string         `json:"boot_id"`
	StartedAt  time.Time      `json:"started_at"` // of the agent
	BootedAt   time.Time      `json:"booted_at"`
	ResumedAt  *time.Time     `json:"resumed_at"`
	Halted     *idle.HaltedBy `json:"halted"`
	Stage      int            `json:"stage"` // which stage answered
	Stages     []Stage        `json:"stages"`
	Verdict    idle.Verdict   `json:"verdict"`
	Readings   []idle.Reading `json:"readings"`
	NotAsked   []string       `json:"not_asked"` // signals left out because cheaper ones are active
	Memory     *Memory        `json:"memory"`
	NextTimers []Timer        `json:"next_timers"`
	Leases     []idle.Lease   `json:"leases"`
	Policy     idle.Policy    `json:"policy"`
	Settings   []Setting      `json:"settings"`
	Config     []Config       `json:"config"`
	Alarms     []Alarm        `json:"alarms"`
	WarnedAt   *time.Time     `json:"warned_at"`
	TTL        *time.Time     `json:"ttl_deadline"`
	Completion string         `json:"completion"` // status of a completion signal; empty for none
	Upcoming   []Upcoming     `json:"upcoming"`   // what happens to the machine by itself, soonest first, if nothing changes
	Last       *Outcome       `json:"last_action"`
	Counters   Counters       `json:"counters"`
	Server     *ServerLink    `json:"server,omitempty"` // nil without one
}

// Upcoming is an action that the machine is heading for.
type Upcoming struct {
	Reason string    `json:"reason"`           // idle_timeout, ttl, completion
	Action string    `json:"action"`           // stop, hibernate, terminate
	At     time.Time `json:"at"`               // the earliest moment
	WarnAt time.Time `json:"warn_at,omitzero"` // when its warning goes out, or went
}

// ServerLink is the state of the connection between the agent and its server.
type ServerLink struct {
	WorkerID   string     `json:"worker_id"`    // empty: no worker is this machine
	Holder     string     `json:"pause_holder"` // agent, controller, or unknown until the server has said
	Halted     bool       `json:"halted"`
	Halt       string     `json:"halt,omitempty"` // the sentence of the server's halt
	ReportedAt *time.Time `json:"reported_at"`
	Error      string     `json:"error"` // why the last report did not arrive
}

// Memory is shown beside stage 2 and judges nothing.
type Memory struct {
	TotalBytes     uint64 `json:"total_bytes"`
	AvailableBytes uint64 `json:"available_bytes"`
}

// Timer is a pending systemd timer: what would have run next.
type Timer struct {
	Unit string    `json:"unit"`
	Next time.Time `json:"next"`
}

// Counters count since the agent started.
type Counters struct {
	Ticks     uint64 `json:"ticks"`
	Unknown   uint64 `json:"unknown_readings"`
	Warnings  uint64 `json:"warnings"`
	Actions   uint64 `json:"actions"`
	Cancelled uint64 `json:"cancelled"`
	Failed    uint64 `json:"failed"`
	Resumes   uint64 `json:"resumes"`
}

// Why answers why the machine runs, or what would end it.
type Why struct {
	evidence.Account
	Sentence string         `json:"sentence"` // the answer
	Readings []idle.Reading `json:"readings"`
	Last     *Outcome       `json:"last_action"`        // until then
	Upcoming []Upcoming     `json:"upcoming,omitempty"` // as in Status; absent at a past time
}

// Reload says what reading the configuration again changed.
type Reload struct {
	Changed []string     `json:"changed"` // names of settings
	Faults  []tags.Fault `json:"faults"`
	Config  []Config     `json:"config"`
}

// SnoozeRequest asks for no idle action until Until, or For from now; both
// empty ends a snooze.
type SnoozeRequest struct {
	For   idle.Duration `json:"for_seconds,omitzero"`
	Until time.Time     `json:"until,omitzero"`
}

// CompleteRequest signals that the work the machine was started for is done.
type CompleteRequest struct {
	Status  string `json:"status"` // success, failed, or any word; default success
	Message string `json:"message"`
	Undo    bool   `json:"undo,omitempty"` // take a completion back; the other fields are then ignored
}

// ExtendRequest moves the TTL For later: from its deadline, or from now if the
// deadline has passed. For must be above 0 and at most 30 days.
type ExtendRequest struct {
	For idle.Duration `json:"for_seconds"`
}

// LeaseRequest keeps the machine for TTL, at most 24 h, on behalf of Holder.
type LeaseRequest struct {
	Holder string        `json:"holder"` // default "default"
	Reason string        `json:"reason"`
	TTL    idle.Duration `json:"ttl_seconds"`
}

// HistoryQuery picks entries of [Since, Until), at most Limit of the newest;
// zero fields do not restrict.
type HistoryQuery struct {
	Since, Until time.Time
	Limit        int
}

// Entry is one line of the agent's history.
type Entry struct {
	At       time.Time      `json:"at"`
	Kind     string         `json:"kind"` // verdict, warning, withdrawal, action, hook, resume, config, snooze, lease, halt, completion, alarm, server, start, end
	Sentence string         `json:"sentence"`
	By       string         `json:"by,omitempty"`
	Verdict  *idle.Verdict  `json:"verdict,omitempty"`
	Readings []idle.Reading `json:"readings,omitempty"`
	Outcome  *Outcome       `json:"outcome,omitempty"`
	Slept    idle.Duration  `json:"slept_seconds,omitzero"` // of a resume: how long the machine was down
}

// HaltRequest switches all automatic actions off or on again.
type HaltRequest struct {
	On     bool       `json:"on"`
	Reason string     `json:"reason"`
	Until  *time.Time `json:"until,omitempty"` // it ends by itself then
}

// Codes of the problems of an agent.
const (
	CodeBadRequest = "bad_request"
	CodeNotFound   = "not_found"
	CodeRefused    = "refused" // understood, and the answer is no
)

var statuses = map[string]int{CodeBadRequest: http.StatusBadRequest, CodeNotFound: http.StatusNotFound, CodeRefused: http.StatusConflict}

// Refusal is an answer of no with one of the codes.
func Refusal(code, format string, args ...any) *httpx.Problem {
	return httpx.NewProblem(statuses[code], code, fmt.Sprintf(format, args...))
}

type callerKey struct{}

// WithCaller names who asks, for the record of what they did.
func WithCaller(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, callerKey{}, name)
}

// Caller returns the name in ctx, or a placeholder.
func Caller(ctx context.Context) string {
	if n, ok := ctx.Value(callerKey{}).(string); ok && n != "" {
		return n
	}
	return "somebody"
}
