package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/why"
)

// HostReport describes the instances of a host: all of them, or those that
// changed since the previous report. Times are those of the host's clock; the
// server converts them to ages relative to At.
type HostReport struct {
	Host     string    `json:"host"`           // name of the host
	At       time.Time `json:"at"`             // when the report was sent
	Sequence uint64    `json:"sequence"`       // counts reports since StartedAt, from 1
	After    uint64    `json:"after"`          // sequence of the report that this one adds to; 0 for a full report
	More     bool      `json:"more,omitempty"` // more parts follow immediately

	StartedAt time.Time      `json:"started_at"`
	Version   string         `json:"version"`
	BuildDate string         `json:"build_date,omitempty"`
	Interval  idle.Duration  `json:"interval_seconds"` // maximum time until the next report
	Halted    bool           `json:"halted"`
	Halt      *idle.HaltedBy `json:"halt,omitempty"` // the host's halt: by whom, since when, until when and why
	Counts    map[string]int `json:"counts"`         // number of instances by state
	Memory    HostMemory     `json:"memory"`
	Faults    []string       `json:"faults"` // problems of the host
	// Commands reports whether the host carries out commands from the server.
	Commands bool `json:"commands,omitempty"`
	// LeftOut is the number of instances beyond MaxHostInstances, which are not
	// included.
	LeftOut int `json:"left_out,omitempty"`

	Instances []HostInstance `json:"instances"`
	Gone      []string       `json:"gone"` // ids of removed instances
}

// HostMemory is a host's memory budget for instances of known size.
type HostMemory struct {
	Limit   int64 `json:"limit_bytes"` // 0 means unlimited
	Free    int64 `json:"free_bytes"`
	Waiting int   `json:"waiting"` // starts and wakes waiting for memory
}

// HostInstance is an instance as reported by its host. Its command and
// environment are not sent, because they may contain secrets.
type HostInstance struct {
	ID             string               `json:"id"`
	Name           string               `json:"name"`
	State          string               `json:"state" doc:"unknown while the host does not report; then last_state is its last reported state"`
	LastState      string               `json:"last_state,omitempty"`
	StateSince     *time.Time           `json:"state_since"`
	StatusReason   string               `json:"status_reason"`
	Enabled        bool                 `json:"enabled"`
	Runtime        string               `json:"runtime"`
	Image          string               `json:"image,omitempty"`
	CreatedAt      time.Time            `json:"created_at"`
	LastActivityAt *time.Time           `json:"last_activity_at"`
	LastPausedAt   *time.Time           `json:"last_paused_at"`
	LastPausedBy   string               `json:"last_paused_by"`
	LastResumedAt  *time.Time           `json:"last_resumed_at"`
	LastResumedBy  string               `json:"last_resumed_by"`
	SnoozeUntil    *time.Time           `json:"snooze_until" doc:"Not paused automatically before; null if not snoozed"`
	IdleFor        float64              `json:"idle_for" doc:"Seconds"`
	PauseAt        *time.Time           `json:"pause_at" doc:"When it will be paused without further activity; null if a block has no known end"`
	NextStep       string               `json:"next_step" doc:"State that a sleeping instance goes to next; empty for none"`
	NextStepAt     *time.Time           `json:"next_step_at"`
	PauseAfter     float64              `json:"pause_after" doc:"Seconds; 0 is never"`
	StopAfter      float64              `json:"stop_after" doc:"Seconds; 0 is never"`
	Connections    int                  `json:"connections"`
	Leases         []idle.Lease         `json:"leases"`
	Endpoints      []instance.Endpoint  `json:"endpoints"`
	Blocks         []idle.Block         `json:"blocks"`
	Memory         int64                `json:"memory_bytes" doc:"0 if unknown or none"`
	MemoryLimit    int64                `json:"memory_limit"`
	Reclaimed      int64                `json:"reclaimed_bytes" doc:"Memory freed by its last reclaim"`
	PauseCount     uint64               `json:"pause_count"`
	WakeCount      uint64               `json:"wake_count"`
	RestartCount   int                  `json:"restart_count"`
	ExitCode       *int                 `json:"exit_code"`
	CrashLooping   bool                 `json:"crash_looping"`
	Waiting        *HostInstanceWaiting `json:"waiting" doc:"Waiting for room to start or wake; null if not waiting"`
}

// HostInstanceWaiting is a start or wake that waits for memory on its host.
type HostInstanceWaiting struct {
	Reason string    `json:"reason"`
	Place  int       `json:"place"`
	Until  time.Time `json:"until"`
}

// HostAnswer is a server's response to a report.
type HostAnswer struct {
	// Resend means that nothing was accepted, because this server does not have
	// the report that this one adds to. The next report must be full.
	Resend bool `json:"resend"`
}

// HostQuestion asks a host to explain an instance. A zero At means now.
type HostQuestion struct {
	ID       string    `json:"id"`
	Instance string    `json:"instance"`
	At       time.Time `json:"at,omitzero"`
}

// HostReply is a host's reply: to a question with Why, to a command with Done, to
// either with the status, code and message of an error.
type HostReply struct {
	ID     string    `json:"id"`
	Why    *HostWhy  `json:"why,omitempty"`
	Done   *HostDone `json:"done,omitempty"`
	Status int       `json:"status,omitempty"`
	Code   string    `json:"code,omitempty"` // one of the constants; only for a command
	Detail string    `json:"detail,omitempty"`
}

// HostTurn is one request of a host in the exchange of questions and commands. It
// carries the host's replies, and says how long the host waits for new questions
// and commands. A turn that does not wait gets none.
type HostTurn struct {
	Answers []HostReply `json:"answers"`
	Wait    float64     `json:"wait_seconds" minimum:"0" maximum:"60"`
}

// HostQuestions is the server's response to a HostTurn.
type HostQuestions struct {
	Questions []HostQuestion `json:"questions"`
	Commands  []HostCommand  `json:"commands,omitempty"`
	// Waited is how long the server held the request. The remaining duration of
	// the request bounds the age of the response.
	Waited idle.Duration `json:"waited_seconds"`
}

// HostWhy explains an instance of a host.
type HostWhy struct {
	why.Account
	Host string `json:"host"`
	// Readings is "live" if the host answered now, "recorded" if they are from
	// the last report, or "unknown" if the host cannot be asked.
	Readings string `json:"readings" enum:"live,recorded,unknown"`
	// Unheard is why the host could not be asked; empty if it could.
	Unheard string `json:"unheard,omitempty"`
	// Instance is the instance as last reported; null if unknown.
	Instance *HostInstance `json:"instance"`
	// Events lists the instance's latest events, oldest first, if the host
	// answered.
	Events []HostEvent `json:"events"`
}

// HostEvent is something that happened to an instance.
type HostEvent struct {
	Time   time.Time `json:"time"`
	Type   string    `json:"type"`
	State  string    `json:"state" doc:"Afterwards"`
	By     string    `json:"by"`
	Reason string    `json:"reason"`
}

// HostSummary is a host in a listing.
type HostSummary struct {
	Name string `json:"name"`
	// Heard is false if the host missed three reports, or if no reachable server
	// receives its reports. The host's current state is then unknown.
	Heard bool `json:"heard"`
	// HeardAt is when a running server last received a report of the host; null
	// if none has.
	HeardAt      *time.Time `json:"heard_at"`
	UnheardSince *time.Time `json:"unheard_since"`
	// Unheard is why the host's reports do not arrive, for users.
	Unheard    string  `json:"unheard,omitempty"`
	AgeSeconds float64 `json:"age_seconds"`
	Interval   float64 `json:"interval_seconds" doc:"Time within which it promised its next report"`
	Server     string  `json:"server" doc:"Server it reports to; empty if unknown"`

	Version   string         `json:"version"`
	Outdated  bool           `json:"outdated"`
	StartedAt *time.Time     `json:"started_at"`
	Halted    bool           `json:"halted"`
	Halt      *idle.HaltedBy `json:"halt,omitempty" doc:"Who halted it, since when, until when and why; absent if not halted"`
	Total     int            `json:"instances_total"`
	LeftOut   int            `json:"left_out" doc:"Number of further instances"`
	Commands  bool           `json:"accepts_commands" doc:"Whether it carries out commands from the server (lull host --server-commands)"`
	Counts    map[string]int `json:"counts" doc:"Instances by state, as last heard"`
	Memory    HostMemory     `json:"memory"`
	Held      int64          `json:"held_bytes" doc:"Memory of its instances, as far as known"`
	Faults    []string       `json:"faults"`
	// ClockOffset is how far the host's clock is ahead of the server's, in
	// seconds. It includes the transit time of the report.
	ClockOffset float64 `json:"clock_offset_seconds"`
}

// Later reports whether s is more current than t. A summary of a server to which
// the host reports is more current than others; otherwise the newer one is.
func (s *HostSummary) Later(t *HostSummary) bool {
	switch {
	case s.Heard != t.Heard:
		return s.Heard
	case s.HeardAt == nil || t.HeardAt == nil:
		return t.HeardAt == nil && s.HeardAt != nil
	}
	return s.HeardAt.After(*t.HeardAt)
}

// HostView is a host with its instances sorted by name, or one page of them.
type HostView struct {
	HostSummary
	Instances []HostInstance `json:"instances"`
	Next      string         `json:"next,omitempty"`
}

// Limits of host reports. Reports with more instances are sent in parts.
const (
	MaxHostReport    = 128 << 10 // bytes per report
	MaxHostInstances = 10_000    // instances per host
	MaxHostText      = 512       // bytes per text
	maxHostEach      = 64        // leases, blocks and endpoints per instance
	maxHostPart      = 1000      // instances per report
	MaxHostAnswers   = 32
	MaxHostEvents    = 30 // per explanation
)

// Stale returns how long the host may be silent before its state is stale: three
// intervals.
func (r *HostReport) Stale() time.Duration { return 3 * time.Duration(r.Interval) }

var (
	hostName  = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$`)
	hostWord  = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,31}$`)
	hostIdent = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
)

// ValidHost returns an error if name cannot be the name of a host.
func ValidHost(name string) error {
	if !hostName.MatchString(name) {
		return fmt.Errorf("cannot use %.40q as the name of a host: want 1 to 128 of letters, digits, '.', '_' and '-', beginning and ending with a letter or digit", name)
	}
	return nil
}

// ReadHostReport parses and validates a report of host. The error names the
// invalid field. Lists in the result are never nil.
func ReadHostReport(host string, body []byte) (r HostReport, err error) {
	if len(body) > MaxHostReport {
		return r, fmt.Errorf("it is larger than %d KiB", MaxHostReport>>10)
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return r, err
	}
	fill(&r)
	return r, r.check(host)
}

// check validates a report of host.
func (r *HostReport) check(host string) error {
	errs := []error{plain(r)}
	fail := func(field, format string, a ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, a...)))
	}
	if r.Host != host {
		fail("host", "it is not %q, the host that sent the report", host)
	}
	if err := ValidHost(host); err != nil {
		errs = append(errs, err)
	}
	if r.At.IsZero() || r.StartedAt.IsZero() {
		fail("at", "both at and started_at are required")
	}
	if r.Sequence == 0 || r.After >= r.Sequence {
		fail("sequence", "must be at least 1 and larger than after")
	}
	if d := time.Duration(r.Interval); d < MinInterval || d > MaxInterval {
		fail("interval_seconds", "it must lie between %s and %s", MinInterval, MaxInterval)
	}
	if len(r.Counts) > 32 || len(r.Faults) > 64 || r.LeftOut < 0 || r.Memory.Limit < 0 || r.Memory.Free < 0 || r.Memory.Waiting < 0 {
		fail("counts", "there are more than 32, or more than 64 faults, or a number is negative")
	}
	for state, n := range r.Counts {
		if !hostWord.MatchString(state) || n < 0 {
			fail("counts", "want the names of states with the number of instances in each")
		}
	}
	if len(r.Instances) > maxHostPart || len(r.Gone) > MaxHostInstances {
		fail("instances", "%d instances and %d that are gone, the limits are %d and %d", len(r.Instances), len(r.Gone), maxHostPart, MaxHostInstances)
	}
	ids, names := map[string]bool{}, map[string]bool{}
	for n := range r.Instances {
		i, field := &r.Instances[n], fmt.Sprintf("instances[%d]", n)
		if err := i.check(); err != nil {
			fail(field, "%v", err)
		}
		if ids[i.ID] || names[i.Name] {
			fail(field, "another instance in the report has the same id or name")
		}
		ids[i.ID], names[i.Name] = true, true
	}
	for n, id := range r.Gone {
		if !hostIdent.MatchString(id) || ids[id] {
			fail(fmt.Sprintf("gone[%d]", n), "not an id, or the id of an instance in the report")
		}
	}
	return errors.Join(errs...)
}

func (i *HostInstance) check() error {
	switch {
	case !hostIdent.MatchString(i.ID):
		return errors.New("its id is not 1 to 64 of letters, digits, '.', '_' and '-'")
	case !hostWord.MatchString(i.State) || i.LastState != "" || i.NextStep != "" && !hostWord.MatchString(i.NextStep):
		return errors.New("its state is invalid")
	case !hostWord.MatchString(i.Runtime):
		return errors.New("its runtime is invalid")
	case len(i.Leases) > maxHostEach || len(i.Endpoints) > maxHostEach || len(i.Blocks) > maxHostEach:
		return fmt.Errorf("it has more than %d leases, endpoints or blocks", maxHostEach)
	case i.IdleFor < 0 || i.PauseAfter < 0 || i.StopAfter < 0 || i.Connections < 0 || i.Memory < 0 || i.MemoryLimit < 0 || i.RestartCount < 0:
		return errors.New("a negative number")
	}
	return instance.ValidName(i.Name)
}

// ReadHostTurn parses and validates a host's turn.
func ReadHostTurn(body []byte) (t HostTurn, err error) {
	if err := json.Unmarshal(body, &t); err != nil {
		return t, err
	}
	if len(t.Answers) > MaxHostAnswers || t.Wait < 0 || t.Wait > 60 {
		return t, fmt.Errorf("answers: there are more than %d, or wait_seconds is not between 0 and 60", MaxHostAnswers)
	}
	fill(&t)
	if err := plain(&t); err != nil {
		return t, err
	}
	for n := range t.Answers {
		if err := t.Answers[n].check(); err != nil {
			return t, fmt.Errorf("answers[%d]%w", n, err)
		}
	}
	return t, nil
}

// check validates a reply. The error begins with the invalid field.
func (a *HostReply) check() error {
	var i *HostInstance
	field := ".why"
	switch {
	case a.Why != nil && a.Done == nil && a.Status == 0:
		i = a.Why.Instance
		if len(a.Why.Events) > MaxHostEvents {
			return fmt.Errorf(".why.events: there are more than %d", MaxHostEvents)
		}
	case a.Done != nil && a.Why == nil && a.Status == 0:
		i, field = a.Done.Instance, ".done"
		if len(a.Done.Log) > MaxHostLog {
			return fmt.Errorf(".done.log: it is larger than %d KiB", MaxHostLog>>10)
		}
	case a.Why == nil && a.Done == nil && a.Status >= 400 && a.Status <= 599:
		return nil
	}
	if i == nil {
		return errors.New(": it is neither an answer nor a refusal")
	}
	if err := i.check(); err != nil {
		return fmt.Errorf("%s.instance: %w", field, err)
	}
	return nil
}

// Fit truncates texts and lists to their limits and replaces nil lists.
func (r *HostReport) Fit() {
	for n := range r.Instances {
		r.Instances[n].fit()
	}
	r.Faults = r.Faults[:min(len(r.Faults), maxHostEach)]
	fill(r)
	shorten(r)
}

// Fit truncates texts and lists to their limits and replaces nil lists.
func (a *HostReply) Fit() {
	if a.Why != nil && a.Why.Instance != nil {
		a.Why.Instance.fit()
	}
	if a.Done != nil && a.Done.Instance != nil {
		a.Done.Instance.fit()
	}
	fill(a)
	shorten(a)
}

func (i *HostInstance) fit() {
	i.Leases = i.Leases[:min(len(i.Leases), maxHostEach)]
	i.Endpoints = i.Endpoints[:min(len(i.Endpoints), maxHostEach)]
	i.Blocks = i.Blocks[:min(len(i.Blocks), maxHostEach)]
}

func hostPath(name string, below ...string) string {
	p := "/hosts/" + url.PathEscape(name)
	for _, b := range below {
		p += "/" + url.PathEscape(b)
	}
	return p
}

// ReportHost sends a report of the host r.Host.
func (c *Client) ReportHost(ctx context.Context, r HostReport) (HostAnswer, error) {
	return tell[HostAnswer](ctx, c, hostPath(r.Host, "report"), r)
}

// HostTurn sends a host's replies and waits for new questions and commands.
func (c *Client) HostTurn(ctx context.Context, host string, t HostTurn) (HostQuestions, error) {
	return tell[HostQuestions](ctx, c, hostPath(host, "questions"), t)
}

// Hosts returns the hosts of the fleet.
func (c *Client) Hosts(ctx context.Context) ([]HostSummary, error) {
	return All[HostSummary](ctx, c, api+"/hosts", nil)
}

// Host returns a host with all of its instances.
func (c *Client) Host(ctx context.Context, name string) (v HostView, err error) {
	q := url.Values{"limit": {"1000"}}
	var all []HostInstance
	for {
		if v, err = get[HostView](ctx, c, api+hostPath(name)+"?"+q.Encode()); err != nil {
			return v, err
		}
		all = append(all, v.Instances...)
		if v.Next == "" {
			v.Instances = all
			return v, nil
		}
		q.Set("after", v.Next)
	}
}

// HostWhy explains an instance of a host at the given time. A zero at means now.
func (c *Client) HostWhy(ctx context.Context, host, inst string, at time.Time) (HostWhy, error) {
	path := api + hostPath(host, "instances", inst, "why")
	if !at.IsZero() {
		path += "?" + url.Values{"at": {at.UTC().Format(time.RFC3339Nano)}}.Encode()
	}
	return get[HostWhy](ctx, c, path)
}
