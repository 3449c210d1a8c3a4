// Package agentctl is the protocol between the command line and an agent over the
// agent's unix socket: the objects, a client, and the server side as an
// http.Handler over Agent.
//
// Requests and answers are JSON over HTTP; a request has at most 1 MiB. An error
// is a problem document (RFC 9457), here a *httpx.Problem. Field names are a
// contract. Times are RFC 3339 or null, durations are seconds in names that end
// in _seconds.
//
// The socket's mode and the server that uses Handler control who may connect.
// That server passes the name of the connected user with WithCaller.
package agentctl

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/tags"
)

// Agent answers requests. Each method is safe for concurrent use. An error that
// is a *httpx.Problem is sent as it is.
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

// Stage is one of the three stages of a check: 1 checks for a connected user, 2
// for work in the background, 3 for sustained quiet.
type Stage struct {
	Number   int    `json:"number"`
	Name     string `json:"name"`
	Answer   string `json:"answer"` // idle, not_idle, unknown, not_asked
	Sentence string `json:"sentence"`
}

// Config is one source of the policy, with the result of reading it.
type Config struct {
	Source string       `json:"source"`          // tags, cache, file
	State  string       `json:"state"`           // read, absent, unreadable, cached, replaced
	Detail string       `json:"detail"`          // why it is unreadable
	ReadAt *time.Time   `json:"read_at"`         // when the values in effect were read
	Faults []tags.Fault `json:"faults"`          // the parts that cannot be used
	Values []Setting    `json:"values,omitzero"` // its settings
}

// Setting is one value in effect, with its origin.
type Setting struct {
	Name   string `json:"name"`
	Value  string `json:"value"`  // of a command only the program, of an address only the host
	Source string `json:"source"` // default, tags, cache, file, extended
}

// Outcome is an action and its result.
type Outcome struct {
	Generation uint64     `json:"generation"`
	Action     string     `json:"action"` // stop, hibernate, terminate, poweroff
	Reason     string     `json:"reason"` // idle_timeout, ttl, completion, manual
	Phase      string     `json:"phase"`  // intent, hook, settling, calling, accepted, done, cancelled, failed
	Detail     string     `json:"detail"`
	InUse      []string   `json:"in_use"` // signals that were active when a TTL or completion acted
	StartedAt  time.Time  `json:"started_at"`
	EndedAt    *time.Time `json:"ended_at"`
	Hook       *Hook      `json:"hook"`                  // pre-stop; nil if it did not run
	PostCancel *Hook      `json:"post_cancel,omitempty"` // set if the action was canceled after pre-stop
}

// Hook is one run of the pre-stop or post-cancel hook.
type Hook struct {
	Command  string        `json:"command"` // the program without its arguments
	User     string        `json:"user"`
	ExitCode int           `json:"exit_code"` // -1 if it did not exit by itself
	TimedOut bool          `json:"timed_out"`
	Took     idle.Duration `json:"took_seconds"`
	Output   string        `json:"output"` // the last 4 KiB
	Answer   string        `json:"answer"` // proceed, veto, defer
	Error    string        `json:"error"`
}

// Outcome describes how the hook ended, as in "ended with code 3 after 2s".
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

// LastLine returns the last line that the hook printed, at most 200 bytes.
func (h *Hook) LastLine() string {
	lines := strings.FieldsFunc(h.Output, func(r rune) bool { return r == '\n' || r == '\r' })
	for _, l := range slices.Backward(lines) {
		if l = strings.TrimSpace(l); l != "" {
			return strings.ToValidUTF8(l[:min(len(l), 200)], "")
		}
	}
	return ""
}

// Alarm is a problem that prevents the agent from doing its work and that a user
// must know about.
type Alarm struct {
	Code     string    `json:"code"`
	Sentence string    `json:"sentence"`
	Since    time.Time `json:"since"`
}

// Status is everything the agent knows now.
type Status struct {
	Version    string         `json:"version"`
	BuildDate  string         `json:"build_date"`
	InstanceID string         `json:"instance_id"`           // empty without a cloud, or while it is unknown
	Cloud      string         `json:"cloud"`                 // ec2, none
	CloudError string         `json:"cloud_error,omitempty"` // why instance_id is unknown
	Region     string         `json:"region"`
	BootID     string         `json:"boot_id"`
	StartedAt  time.Time      `json:"started_at"` // when the agent started
	BootedAt   time.Time      `json:"booted_at"`
	ResumedAt  *time.Time     `json:"resumed_at"`
	Halted     *idle.HaltedBy `json:"halted"`
	Stage      int            `json:"stage"` // the stage at which the last check decided
	Stages     []Stage        `json:"stages"`
	Verdict    idle.Verdict   `json:"verdict"`
	Readings   []idle.Reading `json:"readings"`
	NotAsked   []string       `json:"not_asked"` // signals not read because cheaper ones are active
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
	Upcoming   []Upcoming     `json:"upcoming"`   // upcoming actions, soonest first, if nothing changes
	Last       *Outcome       `json:"last_action"`
	Counters   Counters       `json:"counters"`
	Server     *ServerLink    `json:"server,omitempty"` // nil without a server
}

// Upcoming is a pending action on the machine.
type Upcoming struct {
	Reason string    `json:"reason"`           // idle_timeout, ttl, completion
	Action string    `json:"action"`           // stop, hibernate, terminate
	At     time.Time `json:"at"`               // earliest time
	WarnAt time.Time `json:"warn_at,omitzero"` // when its warning is or was sent
}

// ServerLink is the state of the connection between the agent and its server.
type ServerLink struct {
	WorkerID   string     `json:"worker_id"`    // empty if the server knows no worker for this machine
	Holder     string     `json:"pause_holder"` // agent, controller, or unknown until the server reports it
	Halted     bool       `json:"halted"`
	Halt       string     `json:"halt,omitempty"` // a sentence about the fleet's halt
	ReportedAt *time.Time `json:"reported_at"`
	Error      string     `json:"error"` // why the last report failed
}

// Memory is the machine's memory use. It is shown beside stage 2 and does not
// affect the verdict.
type Memory struct {
	TotalBytes     uint64 `json:"total_bytes"`
	AvailableBytes uint64 `json:"available_bytes"`
}

// Timer is a systemd timer that would have run while the machine is stopped.
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

// Why explains why the machine is running, or what would end that.
type Why struct {
	why.Account
	Sentence string         `json:"sentence"` // the answer
	Readings []idle.Reading `json:"readings"`
	Last     *Outcome       `json:"last_action"`        // the last action before the requested time
	Upcoming []Upcoming     `json:"upcoming,omitempty"` // as in Status; absent for a past time
}

// Reload lists what changed when the configuration was read again.
type Reload struct {
	Changed []string     `json:"changed"` // names of settings
	Faults  []tags.Fault `json:"faults"`
	Config  []Config     `json:"config"`
}

// SnoozeRequest blocks idle actions until Until, or for the duration For from
// now. If both are empty it ends a snooze.
type SnoozeRequest struct {
	For   idle.Duration `json:"for_seconds,omitzero"`
	Until time.Time     `json:"until,omitzero"`
}

// CompleteRequest reports that the work for which the machine was started is
// done.
type CompleteRequest struct {
	Status  string `json:"status"` // success, failed, or any word; default success
	Message string `json:"message"`
	Undo    bool   `json:"undo,omitempty"` // revoke a completion; the other fields are then ignored
}

// ExtendRequest postpones the TTL by For: from its deadline, or from now if the
// deadline has passed. For must be above 0 and at most 30 days.
type ExtendRequest struct {
	For idle.Duration `json:"for_seconds"`
}

// LeaseRequest keeps the machine running for TTL, at most 24 h, on behalf of
// Holder.
type LeaseRequest struct {
	Holder string        `json:"holder"` // default "default"
	Reason string        `json:"reason"`
	TTL    idle.Duration `json:"ttl_seconds"`
}

// HistoryQuery selects entries in [Since, Until), at most the Limit newest.
// Zero fields do not restrict.
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
	Slept    idle.Duration  `json:"slept_seconds,omitzero"` // for a resume: how long the machine was down
}

// HaltRequest starts or ends a halt of all automatic actions.
type HaltRequest struct {
	On     bool       `json:"on"`
	Reason string     `json:"reason"`
	Until  *time.Time `json:"until,omitempty"` // when it expires
}

// Codes of the problems of an agent.
const (
	CodeBadRequest = "bad_request"
	CodeNotFound   = "not_found"
	CodeRefused    = "refused" // a valid request that was refused
)

var statuses = map[string]int{CodeBadRequest: http.StatusBadRequest, CodeNotFound: http.StatusNotFound, CodeRefused: http.StatusConflict}

// Refusal returns a problem that refuses a request with one of the codes.
func Refusal(code, format string, args ...any) *httpx.Problem {
	return httpx.NewProblem(statuses[code], code, fmt.Sprintf(format, args...))
}

type callerKey struct{}

// WithCaller returns ctx with the name of the caller, which the agent records.
func WithCaller(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, callerKey{}, name)
}

// Caller returns the name in ctx, or "an unknown user" without one.
func Caller(ctx context.Context) string {
	if n, ok := ctx.Value(callerKey{}).(string); ok && n != "" {
		return n
	}
	return "an unknown user"
}
