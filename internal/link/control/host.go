package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"time"

	"lull/internal/base/httpx"
	"lull/internal/evidence"
	"lull/internal/idle"
	"lull/internal/instance"
)

// HostReport is what a host tells a server of its instances: of all of them, or
// of those that changed since the report before. Its times are those of the
// host's clock; the server uses them as ages against At.
type HostReport struct {
	Host     string    `json:"host"`           // the one that speaks
	At       time.Time `json:"at"`             // when it was sent
	Sequence uint64    `json:"sequence"`       // rises with every report since StartedAt, from 1
	After    uint64    `json:"after"`          // the report that this one adds to; 0 begins anew
	More     bool      `json:"more,omitempty"` // the rest of what this one begins follows at once

	StartedAt time.Time      `json:"started_at"`
	Version   string         `json:"version"`
	BuildDate string         `json:"build_date,omitempty"`
	Interval  idle.Duration  `json:"interval_seconds"` // the next report comes within it
	Halted    bool           `json:"halted"`
	Halt      *idle.HaltedBy `json:"halt,omitempty"` // who halted it, since when, until when and why
	Counts    map[string]int `json:"counts"`         // of all instances, by state
	Memory    HostMemory     `json:"memory"`
	Faults    []string       `json:"faults"` // what is wrong with the host
	// LeftOut counts instances that are not told of, since there are more than
	// MaxHostInstances.
	LeftOut int `json:"left_out,omitempty"`

	Instances []HostInstance `json:"instances"`
	Gone      []string       `json:"gone"` // ids of instances that are no more
}

// HostMemory is what instances of a known size may hold together on a host.
type HostMemory struct {
	Limit   int64 `json:"limit_bytes"` // 0 is not bounded
	Free    int64 `json:"free_bytes"`
	Waiting int   `json:"waiting"` // starts and wakes that wait for room
}

// HostInstance is an instance as its host tells of it. Its command and its
// environment stay on the host: they may hold secrets.
type HostInstance struct {
	ID             string               `json:"id"`
	Name           string               `json:"name"`
	State          string               `json:"state" doc:"unknown where the host is not heard of; then last_state is what it was"`
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
	IdleFor        float64              `json:"idle_for" doc:"Seconds"`
	PauseAt        *time.Time           `json:"pause_at" doc:"When it is paused if nothing happens; null when a block has no known end"`
	NextStep       string               `json:"next_step" doc:"State that a sleeping instance goes to next; empty for none"`
	NextStepAt     *time.Time           `json:"next_step_at"`
	PauseAfter     float64              `json:"pause_after" doc:"Seconds; 0 is never"`
	StopAfter      float64              `json:"stop_after" doc:"Seconds; 0 is never"`
	Connections    int                  `json:"connections"`
	Leases         []idle.Lease         `json:"leases"`
	Endpoints      []instance.Endpoint  `json:"endpoints"`
	Blocks         []idle.Block         `json:"blocks"`
	Memory         int64                `json:"memory_bytes" doc:"0 is not known, or none"`
	MemoryLimit    int64                `json:"memory_limit"`
	PauseCount     uint64               `json:"pause_count"`
	WakeCount      uint64               `json:"wake_count"`
	RestartCount   int                  `json:"restart_count"`
	ExitCode       *int                 `json:"exit_code"`
	CrashLooping   bool                 `json:"crash_looping"`
	Waiting        *HostInstanceWaiting `json:"waiting" doc:"For room to start or wake; null when it does not"`
}

// HostInstanceWaiting is a start or wake that a host has no room for yet.
type HostInstanceWaiting struct {
	Reason string    `json:"reason"`
	Place  int       `json:"place"`
	Until  time.Time `json:"until"`
}

// HostAnswer is what a server says to a report.
type HostAnswer struct {
	// Resend: nothing was taken, since the report adds to one that this server
	// does not have. The next one begins anew.
	Resend bool `json:"resend"`
}

// HostQuestion asks a host why an instance is as it is; At is zero for now.
type HostQuestion struct {
	ID       string    `json:"id"`
	Instance string    `json:"instance"`
	At       time.Time `json:"at,omitzero"`
}

// HostReply answers a question: with a Why, or with the status and the sentence
// of a refusal.
type HostReply struct {
	ID     string   `json:"id"`
	Why    *HostWhy `json:"why,omitempty"`
	Status int      `json:"status,omitempty"`
	Detail string   `json:"detail,omitempty"`
}

// HostTurn is a host's turn in the conversation: its answers, and how long it
// then waits for questions.
type HostTurn struct {
	Answers []HostReply `json:"answers"`
	Wait    float64     `json:"wait_seconds" minimum:"0" maximum:"60"`
}

// HostQuestions is the server's turn.
type HostQuestions struct {
	Questions []HostQuestion `json:"questions"`
}

// HostWhy answers why an instance of a host is as it is.
type HostWhy struct {
	evidence.Account
	Host string `json:"host"`
	// Readings says where they are from: "live" from the host just now,
	// "recorded" from what it kept, or "unknown" where it cannot be asked.
	Readings string `json:"readings" enum:"live,recorded,unknown"`
	// Unheard says why the host could not be asked; empty where it was.
	Unheard string `json:"unheard,omitempty"`
	// Instance is as it was told of last; null where nothing is known of it.
	Instance *HostInstance `json:"instance"`
}

// HostSummary is a host in a listing.
type HostSummary struct {
	Name string `json:"name"`
	// Heard is false for a host that missed three reports, or that no server
	// that can be asked hears: what it does now is not known.
	Heard bool `json:"heard"`
	// HeardAt is when it was last heard of; null if no server that runs has
	// heard of it. UnheardSince is the same for one that is not heard.
	HeardAt      *time.Time `json:"heard_at"`
	UnheardSince *time.Time `json:"unheard_since"`
	// Unheard says why it is not heard, for people.
	Unheard    string  `json:"unheard,omitempty"`
	AgeSeconds float64 `json:"age_seconds"`
	Interval   float64 `json:"interval_seconds" doc:"It promised a report within it"`
	Server     string  `json:"server" doc:"The server that it reports to; empty if none is known"`

	Version   string         `json:"version"`
	Outdated  bool           `json:"outdated"`
	StartedAt *time.Time     `json:"started_at"`
	Halted    bool           `json:"halted"`
	Halt      *idle.HaltedBy `json:"halt,omitempty" doc:"Who halted it, since when, until when and why; absent without a halt"`
	Total     int            `json:"instances_total"`
	LeftOut   int            `json:"left_out" doc:"Instances that it has beside those"`
	Counts    map[string]int `json:"counts" doc:"Instances by state, as last heard"`
	Memory    HostMemory     `json:"memory"`
	Held      int64          `json:"held_bytes" doc:"Memory of its instances, as far as it is known"`
	Faults    []string       `json:"faults"`
	// ClockOffset is how far its clock was ahead of the server's, in seconds,
	// the time that the report took included.
	ClockOffset float64 `json:"clock_offset_seconds"`
}

// Later tells whether s is better news of a host than t: from who hears it or,
// where neither does, newer.
func (s *HostSummary) Later(t *HostSummary) bool {
	switch {
	case s.Heard != t.Heard:
		return s.Heard
	case s.HeardAt == nil || t.HeardAt == nil:
		return t.HeardAt == nil && s.HeardAt != nil
	}
	return s.HeardAt.After(*t.HeardAt)
}

// HostView is a host with its instances, by name, or one page of them.
type HostView struct {
	HostSummary
	Instances []HostInstance `json:"instances"`
	Next      string         `json:"next,omitempty"`
}

// Bounds of what a host says. A report of more instances than fit is sent in
// parts.
const (
	MaxHostReport    = 128 << 10 // bytes of one report
	MaxHostInstances = 10_000    // of one host
	MaxHostText      = 512       // bytes of any text
	maxHostEach      = 64        // leases, blocks and endpoints of one instance
	maxHostPart      = 1000      // instances of one report
	MaxHostAnswers   = 32
)

// Stale is how long a host may be silent: three of its intervals.
func (r *HostReport) Stale() time.Duration { return 3 * time.Duration(r.Interval) }

var (
	hostName  = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$`)
	hostWord  = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,31}$`)
	hostIdent = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
)

// ValidHost tells what is wrong with the name of a host.
func ValidHost(name string) error {
	if !hostName.MatchString(name) {
		return fmt.Errorf("cannot use %.40q as the name of a host: want 1 to 128 of letters, digits, '.', '_' and '-', beginning and ending with a letter or digit", name)
	}
	return nil
}

// ReadHostReport reads a report of host, and refuses whatever is not one: the
// error names the fields. Lists in it are never nil.
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

// check tells what is wrong with a report of host, naming the field.
func (r *HostReport) check(host string) error {
	errs := []error{plain(r)}
	fail := func(field, format string, a ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, a...)))
	}
	if r.Host != host {
		fail("host", "it is not %q, whose report this is", host)
	}
	if err := ValidHost(host); err != nil {
		errs = append(errs, err)
	}
	if r.At.IsZero() || r.StartedAt.IsZero() {
		fail("at", "it or started_at is missing")
	}
	if r.Sequence == 0 || r.After >= r.Sequence {
		fail("sequence", "it must be at least 1, and above after")
	}
	if d := time.Duration(r.Interval); d < MinInterval || d > MaxInterval {
		fail("interval_seconds", "it must lie between %s and %s", MinInterval, MaxInterval)
	}
	if len(r.Counts) > 32 || len(r.Faults) > 64 || r.LeftOut < 0 || r.Memory.Limit < 0 || r.Memory.Free < 0 || r.Memory.Waiting < 0 {
		fail("counts", "there are more than 32, or more than 64 faults, or a number is negative")
	}
	for state, n := range r.Counts {
		if !hostWord.MatchString(state) || n < 0 {
			fail("counts", "want names of states and how many there are")
		}
	}
	if len(r.Instances) > maxHostPart || len(r.Gone) > MaxHostInstances {
		fail("instances", "there are %d and %d that are gone, the limits are %d and %d", len(r.Instances), len(r.Gone), maxHostPart, MaxHostInstances)
	}
	ids, names := map[string]bool{}, map[string]bool{}
	for n := range r.Instances {
		i, field := &r.Instances[n], fmt.Sprintf("instances[%d]", n)
		if err := i.check(); err != nil {
			fail(field, "%v", err)
		}
		if ids[i.ID] || names[i.Name] {
			fail(field, "its id or name is there twice")
		}
		ids[i.ID], names[i.Name] = true, true
	}
	for n, id := range r.Gone {
		if !hostIdent.MatchString(id) || ids[id] {
			fail(fmt.Sprintf("gone[%d]", n), "it is no id, or that of an instance in the report")
		}
	}
	return errors.Join(errs...)
}

func (i *HostInstance) check() error {
	switch {
	case !hostIdent.MatchString(i.ID):
		return errors.New("its id is not 1 to 64 of letters, digits, '.', '_' and '-'")
	case !hostWord.MatchString(i.State) || i.LastState != "" || i.NextStep != "" && !hostWord.MatchString(i.NextStep):
		return errors.New("its state is none")
	case !hostWord.MatchString(i.Runtime):
		return errors.New("its runtime is none")
	case len(i.Leases) > maxHostEach || len(i.Endpoints) > maxHostEach || len(i.Blocks) > maxHostEach:
		return fmt.Errorf("it has more than %d leases, endpoints or blocks", maxHostEach)
	case i.IdleFor < 0 || i.PauseAfter < 0 || i.StopAfter < 0 || i.Connections < 0 || i.Memory < 0 || i.MemoryLimit < 0 || i.RestartCount < 0:
		return errors.New("a number of it is negative")
	}
	return instance.ValidName(i.Name)
}

// ReadHostTurn reads a host's turn, and refuses whatever is not one.
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
	for n, a := range t.Answers {
		switch {
		case a.Why == nil && (a.Status < 400 || a.Status > 599), a.Why != nil && a.Why.Instance == nil:
			return t, fmt.Errorf("answers[%d]: it is neither an answer nor a refusal", n)
		case a.Why == nil:
			continue
		}
		if err := a.Why.Instance.check(); err != nil {
			return t, fmt.Errorf("answers[%d].why.instance: %w", n, err)
		}
	}
	return t, nil
}

// Fit makes what a host says fit: texts are cut, lists too, and no list is nil.
func (r *HostReport) Fit() {
	for n := range r.Instances {
		r.Instances[n].fit()
	}
	r.Faults = r.Faults[:min(len(r.Faults), maxHostEach)]
	fill(r)
	shorten(r)
}

// Fit does the same for an answer.
func (a *HostReply) Fit() {
	if a.Why != nil && a.Why.Instance != nil {
		a.Why.Instance.fit()
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

// ReportHost sends a report of the host that it names.
func (c *Client) ReportHost(ctx context.Context, r HostReport) (HostAnswer, error) {
	return tell[HostAnswer](ctx, c, hostPath(r.Host, "report"), r)
}

// HostTurn answers questions about a host and waits for new ones.
func (c *Client) HostTurn(ctx context.Context, host string, t HostTurn) (HostQuestions, error) {
	return tell[HostQuestions](ctx, c, hostPath(host, "questions"), t)
}

// Hosts lists the hosts of the fleet.
func (c *Client) Hosts(ctx context.Context) ([]HostSummary, error) {
	return All[HostSummary](ctx, c, api+"/hosts", nil)
}

// Host is a host with all of its instances.
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

// HostWhy answers why an instance of a host is as it is, now or at a past
// time; zero is now.
func (c *Client) HostWhy(ctx context.Context, host, inst string, at time.Time) (HostWhy, error) {
	path := api + hostPath(host, "instances", inst, "why")
	if !at.IsZero() {
		path += "?" + url.Values{"at": {at.UTC().Format(time.RFC3339Nano)}}.Encode()
	}
	return get[HostWhy](ctx, c, path)
}

// Refusal is the answer of a host that was asked and says no.
func (a *HostReply) Refusal() error {
	return &httpx.Problem{Status: a.Status, Title: http.StatusText(a.Status), Detail: a.Detail}
}
