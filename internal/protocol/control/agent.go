package control

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/lib/httpx"
)

// AgentReport is an agent's report to a server. Its times are those of the
// agent's clock, so the server uses them only as ages relative to At.
type AgentReport struct {
	At         time.Time      `json:"at"`       // when it was sent
	Sequence   uint64         `json:"sequence"` // increases with every report since StartedAt
	StartedAt  time.Time      `json:"started_at"`
	BootID     string         `json:"boot_id"`
	InstanceID string         `json:"instance_id,omitempty"`
	Region     string         `json:"aws_region,omitempty"`
	Version    string         `json:"version"`
	BuildDate  string         `json:"build_date,omitempty"`
	Interval   idle.Duration  `json:"interval_seconds"` // maximum time until the next report
	Readings   []idle.Reading `json:"readings"`
	LastUse    time.Time      `json:"last_use"`              // newest use of any signal; the agent's start counts as use
	LastUseBy  string         `json:"last_use_by,omitempty"` // the signal that showed it; empty if it is the start
	Idle       float64        `json:"idle_minutes"`
	Holder     string         `json:"pause_holder"` // who decides, according to the agent
	// Holds are leases, a snooze, a veto or a halt that users and hooks set on
	// the machine itself. They also block a pause by the controller.
	Holds  []idle.Block `json:"holds,omitempty"`
	Alarms []AgentAlarm `json:"alarms,omitempty"`
	// HookSeconds is how long the pre-stop hook may take; 0 means that there is
	// none.
	HookSeconds float64      `json:"hook_seconds,omitempty"`
	Ordered     *AgentDone   `json:"ordered,omitempty"` // the last order
	Action      *AgentAction `json:"action,omitempty"`  // the agent's own action, in progress or last
	// Judged holds the input of the agent's verdict besides its readings. It is
	// nil in reports of an earlier version.
	Judged *AgentJudged `json:"judged,omitempty"`
}

// AgentJudged holds the input of an agent's verdict besides its readings. The
// server stores it to answer questions later.
type AgentJudged struct {
	Policy       idle.Policy  `json:"policy"`
	ResumedAt    time.Time    `json:"last_resumed_at,omitzero"`
	SnoozedUntil time.Time    `json:"snoozed_until,omitzero"`
	WarnedAt     time.Time    `json:"warning_sent_at,omitzero"`
	Leases       []idle.Lease `json:"leases,omitempty"`
	Guards       []idle.Block `json:"guards,omitempty"`
	// NotAsked lists relevant signals that were not read because others are
	// active.
	NotAsked []string `json:"not_asked,omitempty"`
	// Peaks are the highest values of signals since the previous report.
	Peaks map[string]float64 `json:"peaks,omitempty"`
}

// AgentAlarm is a problem that requires a user's attention.
type AgentAlarm struct {
	Code     string `json:"code"`
	Sentence string `json:"sentence"`
}

// AgentAction is an action of the agent itself. With phase intent the agent asks
// for permission, and acts only if the answer contains no refusal.
type AgentAction struct {
	Generation uint64 `json:"generation"`
	Action     string `json:"action"` // stop, hibernate
	Reason     string `json:"reason"` // idle_timeout, ttl, completion
	Phase      string `json:"phase"`  // intent, or a phase of agentctl.Outcome
	Detail     string `json:"detail,omitempty"`
	// At is when the action began. It is zero in reports of an earlier version.
	At time.Time `json:"at,omitzero"`
}

// AgentDone is the result of an order.
type AgentDone struct {
	Generation int64  `json:"generation"`
	Done       bool   `json:"done"` // the hook has ended and everything was read again
	ExitCode   int    `json:"exit_code"`
	TimedOut   bool   `json:"timed_out,omitempty"`
	Answer     string `json:"answer,omitempty"` // proceed, veto, defer
	Error      string `json:"error,omitempty"`
}

// AgentOrder tells an agent that does not decide itself to prepare for a stop by
// the controller. The agent runs the pre-stop hook once, reads every signal
// again, and reports immediately while the order is pending.
type AgentOrder struct {
	Generation int64  `json:"generation"`
	Action     string `json:"action"`
	Reason     string `json:"reason"`
	Forced     bool   `json:"forced,omitempty"` // the hook cannot refuse
	Sent       bool   `json:"sent,omitempty"`   // the stop has been sent; nothing is left to prepare
}

// AgentWarning tells an agent to warn users, once per ID.
type AgentWarning struct {
	ID      string  `json:"id"`
	Seconds float64 `json:"in_seconds"` // seconds until the action
	Action  string  `json:"action"`
}

// AgentAnswer is a server's answer to a report.
type AgentAnswer struct {
	WorkerID string `json:"worker_id,omitempty"`    // the worker of this machine; empty if it has none
	Holder   string `json:"pause_holder,omitempty"` // who decides about pauses of that worker
	Halted   bool   `json:"halted"`                 // the whole fleet is halted
	Halt     string `json:"halt,omitempty"`         // who halted the fleet, since when, until when and why
	// HaltLeft is the remaining time of the halt in seconds; 0 if the halt has no
	// end.
	HaltLeft float64 `json:"halt_left_seconds,omitempty"`
	// HaltedBy is the halt. It is nil while the fleet is not halted, and in
	// answers of an older server.
	HaltedBy *idle.HaltedBy `json:"halted_by,omitempty"`
	Refused  string         `json:"refused,omitempty"` // why the intent must not be carried out
	Order    *AgentOrder    `json:"order,omitempty"`
	Warning  *AgentWarning  `json:"warning,omitempty"`
	// AllClear means that no stop of the worker is announced or intended. It
	// withdraws an earlier warning by the server.
	AllClear bool `json:"all_clear,omitempty"`
	// TTLDeadline is the worker's expiry according to its record. TTLFromTag
	// means that the record takes it from the machine's tag and follows changes
	// of the tag.
	TTLDeadline *time.Time `json:"ttl_deadline,omitempty"`
	TTLAction   string     `json:"ttl_action,omitempty"`
	TTLFromTag  bool       `json:"ttl_from_tag,omitempty"`
}

// AgentView is an agent as a server sees it.
type AgentView struct {
	ReceivedAt time.Time   `json:"received_at"`
	Stale      bool        `json:"stale"` // no report for twice its interval
	Report     AgentReport `json:"report"`
}

// AgentWhy explains why an agent's machine is running, based on the agent's
// reports.
type AgentWhy struct {
	why.Account
	Machine  string `json:"machine"`
	WorkerID string `json:"worker_id,omitempty" doc:"The worker's id; absent if the machine is not a worker"`
	// Readings is "live" if the readings are from the last report, "recorded" if
	// a server had stored them, or "unknown" if the agent does not report.
	Readings string `json:"readings" enum:"live,recorded,unknown"`
	// Unheard is why there are no readings; empty if there are.
	Unheard string `json:"unheard,omitempty"`
	// Last lists the newest audit entries about the worker up to the requested
	// time, newest first. It is empty if the machine is no worker.
	Last []audit.Entry `json:"last"`
}

// Limits of a report.
const (
	maxReadings  = 64
	maxHolds     = 64
	MinInterval  = time.Second
	MaxInterval  = 15 * time.Minute
	maxAgentText = 512
)

// Check returns the faults of a report, each with its field.
func (r *AgentReport) Check() error {
	var errs []error
	fail := func(field, format string, a ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, a...)))
	}
	if r.At.IsZero() {
		fail("at", "it is missing")
	}
	if d := time.Duration(r.Interval); d < MinInterval || d > MaxInterval {
		fail("interval_seconds", "it must lie between %s and %s", MinInterval, MaxInterval)
	}
	if n := len(r.Readings); n > maxReadings {
		fail("readings", "there are %d, the limit is %d", n, maxReadings)
	}
	for i, x := range r.Readings {
		if x.Signal == "" || len(x.Signal) > 64 || len(x.Detail) > maxAgentText || x.At.IsZero() {
			fail(fmt.Sprintf("readings[%d]", i), "want a signal of at most 64 bytes, a detail of at most %d, and the time it was taken", maxAgentText)
		}
	}
	if n := len(r.Holds); n > maxHolds {
		fail("holds", "there are %d, the limit is %d", n, maxHolds)
	}
	for i, b := range r.Holds {
		if b.Code == "" || len(b.Code) > 64 || len(b.Sentence) > maxAgentText || len(b.Holder) > 128 {
			fail(fmt.Sprintf("holds[%d]", i), "want a code of at most 64 bytes and a sentence of at most %d", maxAgentText)
		}
	}
	for field, s := range map[string]string{"instance_id": r.InstanceID, "aws_region": r.Region, "boot_id": r.BootID, "version": r.Version, "build_date": r.BuildDate, "pause_holder": r.Holder} {
		if len(s) > 128 {
			fail(field, "it is longer than 128 bytes")
		}
	}
	if a := r.Action; a != nil && (len(a.Detail) > maxAgentText || len(a.Phase) > 32 || len(a.Reason) > 32) {
		fail("action", "a phase or reason is longer than 32 bytes, or the detail longer than %d", maxAgentText)
	}
	if len(r.Alarms) > 64 {
		fail("alarms", "there are %d, the limit is 64", len(r.Alarms))
	}
	if j := r.Judged; j != nil {
		if err := j.check(); err != nil {
			fail("judged", "%v", err)
		}
	}
	return errors.Join(errs...)
}

// maxJudged bounds the durations in a reported policy.
const maxJudged = 366 * 24 * time.Hour

func (j *AgentJudged) check() error {
	for field, n := range map[string]int{"policy.signals": len(j.Policy.Signals), "leases": len(j.Leases), "guards": len(j.Guards), "not_asked": len(j.NotAsked), "peaks": len(j.Peaks)} {
		if n > maxReadings {
			return fmt.Errorf("%s: there are %d, the limit is %d", field, n, maxReadings)
		}
	}
	for field, d := range map[string]idle.Duration{"timeout_seconds": j.Policy.Timeout, "snooze_seconds": j.Policy.Snooze, "warn_before_seconds": j.Policy.WarnBefore, "check_interval_seconds": j.Policy.CheckInterval} {
		if d < 0 || time.Duration(d) > maxJudged {
			return fmt.Errorf("policy.%s: it must lie between 0 and %s", field, maxJudged)
		}
	}
	return plain(j)
}

// Fit truncates lists and texts to their limits and removes control characters.
func (j *AgentJudged) Fit() {
	j.Leases, j.Guards, j.NotAsked = j.Leases[:min(len(j.Leases), maxReadings)], j.Guards[:min(len(j.Guards), maxReadings)], j.NotAsked[:min(len(j.NotAsked), maxReadings)]
	for name := range j.Peaks {
		if len(j.Peaks) > maxReadings {
			delete(j.Peaks, name)
		}
	}
	shorten(j)
}

// Report sends a report of an agent.
func (c *Client) Report(ctx context.Context, machine string, r AgentReport) (AgentAnswer, error) {
	return tell[AgentAnswer](ctx, c, agentPath(machine, "report"), r)
}

// Enrollment identifies the machine that enrolls. The enrollment secret is sent
// as the bearer token.
type Enrollment struct {
	InstanceID string `json:"instance_id" minLength:"1" maxLength:"128" doc:"Instance ID of the machine, from its metadata service"`
}

// Enrolled is the result of an enrollment. The token is shown once.
type Enrolled struct {
	WorkerID string `json:"worker_id"`
	Machine  string `json:"machine" doc:"Machine that the token is bound to"`
	Token    string `json:"token"`
}

// Enroll exchanges the enrollment secret, which is c's token, for a token of
// the machine's agent.
func (c *Client) Enroll(ctx context.Context, e Enrollment) (Enrolled, error) {
	return tell[Enrolled](ctx, c, "/agents/enroll", e)
}

func agentPath(machine string, below ...string) string {
	return "/agents/" + strings.Join(append([]string{url.PathEscape(machine)}, below...), "/")
}

// AgentWhy explains why an agent's machine is running or was stopped, now or at a
// past time. A zero at means now.
func (c *Client) AgentWhy(ctx context.Context, machine string, at time.Time) (AgentWhy, error) {
	path := api + agentPath(machine, "why")
	if !at.IsZero() {
		path += "?" + url.Values{"at": {at.UTC().Format(time.RFC3339Nano)}}.Encode()
	}
	return get[AgentWhy](ctx, c, path)
}

// tell sends a machine's message to a path below /api/v1, without a retry. It has
// no idempotency key, because a repeated message has no further effect.
func tell[T any](ctx context.Context, c *Client, path string, in any) (out T, err error) {
	_, err = c.api.Do(ctx, httpx.Request{Method: http.MethodPost, Path: api + path, In: in, Once: true}, &out)
	return out, err
}

// Outdated reports whether an agent is older than the server, by version number
// or, if these cannot be compared, by build date. If neither can be compared, it
// returns false.
func Outdated(version, build, serverVersion, serverBuild string) bool {
	if version == serverVersion {
		return false
	}
	a, aok := numbers(version)
	b, bok := numbers(serverVersion)
	if aok && bok && a != b {
		for i := range a {
			if a[i] != b[i] {
				return a[i] < b[i]
			}
		}
	}
	mine, err1 := time.Parse(time.RFC3339, build)
	theirs, err2 := time.Parse(time.RFC3339, serverBuild)
	return err1 == nil && err2 == nil && mine.Before(theirs)
}

// numbers parses a version in the form that git describe prints: 1.2.3, v1.2.3 or
// v1.2.3-4-gabc.
func numbers(v string) (out [4]int, ok bool) {
	v, rest, _ := strings.Cut(strings.TrimPrefix(v, "v"), "-")
	parts := strings.Split(v, ".")
	if len(parts) != 3 {
		return out, false
	}
	for i, p := range parts {
		n, err := strconv.Atoi(p)
		if err != nil || n < 0 {
			return out, false
		}
		out[i] = n
	}
	if n, _, found := strings.Cut(rest, "-g"); found {
		// The number of commits since the tag; 0 for any other suffix.
		out[3], _ = strconv.Atoi(n)
	}
	return out, true
}
