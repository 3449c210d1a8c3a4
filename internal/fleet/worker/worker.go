// Package worker holds the record of a cloud machine, how each command and
// observation changes it, and how it is judged. It does no I/O.
package worker

import (
	"encoding/json"
	"maps"
	"slices"
	"time"
	"unique"

	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
	"lull/internal/store"
)

// ByReadings reports whether active or unknown readings cancel the intent.
func (i *Intent) ByReadings() bool {
	return i.Reason.ByIdleness() || i.Reason == power.ReasonSchedule && !i.Force
}

// Origin is how a start came about.
type Origin string

// The origins of a start. A first launch has none.
const (
	OriginNone     Origin = ""
	OriginManual   Origin = "manual"
	OriginAuto     Origin = "auto" // a wake token, a schedule, a repair
	OriginExternal Origin = "external"
)

// Pause actions, and values of PauseHolder.
const (
	ActionStop      = "stop"
	ActionHibernate = "hibernate"
	ActionAuto      = "auto"

	HolderController = "controller"
	HolderAgent      = "agent"
)

// Activity sources.
const (
	SourceCML        = "cml"
	SourceAgent      = "agent"
	SourceCloudWatch = "cloudwatch"
)

// License statuses and operations.
const (
	// LicenseUnknown means that the state was never read from CML.
	LicenseUnknown       = "unknown"
	LicenseUnregistered  = "unregistered"
	LicenseRegistering   = "registering"
	LicenseRegistered    = "registered"
	LicenseDeregistering = "deregistering"
	LicenseDeregistered  = "deregistered"
	LicenseFailed        = "failed"

	OperationRegister   = "register"
	OperationDeregister = "deregister"
)

// License is the state of a worker's CML license: CML's last report, and the
// pending operation.
type License struct {
	Status string `json:"status"`
	// Registration and Authorization are CML's own terms, such as COMPLETED and
	// IN_COMPLIANCE; empty until CML was read.
	Registration  string `json:"registration,omitempty"`
	Authorization string `json:"authorization,omitempty"`
	// Seat means that CML was registered, or being registered, when it was last read.
	// It then holds a seat with Smart Licensing.
	Seat             bool   `json:"seat,omitempty"`
	PendingOperation string `json:"pending_operation,omitempty"`
	// OperationInProgress is when CML was first asked for the pending operation.
	// A controller that finds it set resumes the operation.
	OperationInProgress *time.Time `json:"operation_in_progress,omitempty"`
	LastError           string     `json:"last_error,omitempty"`
	// FailedOperation is the operation that LastError is about; empty if the error
	// was read from CML.
	FailedOperation string        `json:"failed_operation,omitempty"`
	Token           sealed.Secret `json:"token,omitempty"`
	Reregister      bool          `json:"reregister,omitempty"`
	// LocalOnly means that CML deregistered itself but could not inform Smart
	// Licensing.
	LocalOnly bool `json:"local_only,omitempty"`
}

// MayHoldSeat reports whether, by the record, a termination must release a seat. It
// returns false if the license was never read.
func (l *License) MayHoldSeat() bool {
	switch l.Status {
	case LicenseRegistered, LicenseRegistering, LicenseDeregistering:
		return true
	}
	return l.Seat
}

// Ask records that an operation is about to be requested from CML.
func (l *License) Ask(op string, now time.Time) {
	if op != l.PendingOperation {
		l.DropOperation()
	}
	l.PendingOperation, l.OperationInProgress, l.Status = op, &now, LicenseRegistering
	if op == OperationDeregister {
		l.Status = LicenseDeregistering
	}
}

// Finish records the outcome of an operation. why is the cause of a failure.
// local means that Smart Licensing could not be informed.
func (l *License) Finish(op, status, why string, local bool) {
	l.DropOperation()
	l.Status, l.LastError, l.LocalOnly, l.FailedOperation = status, why, local, ""
	switch status {
	case LicenseFailed:
		l.FailedOperation = op
	case LicenseDeregistered:
		l.Registration, l.Authorization, l.Seat = "", "", false
	}
}

// Ended records that the machine no longer exists. Nothing is pending anymore, and a
// seat that was not released stays with Smart Licensing.
func (l *License) Ended() {
	if l.MayHoldSeat() && l.FailedOperation != OperationDeregister {
		l.Finish(OperationDeregister, LicenseFailed, "not known to be released before the instance ended", false)
		l.Seat = true
	}
	l.DropOperation()
}

// DropOperation forgets the pending operation and its token.
func (l *License) DropOperation() {
	l.PendingOperation, l.OperationInProgress, l.Token, l.Reregister = "", nil, "", false
}

// Event is one relevant telemetry event.
type Event struct {
	Category  string          `json:"category"`
	Timestamp time.Time       `json:"timestamp"`
	Data      json.RawMessage `json:"data,omitempty"`
}

// Intent is a durable decision to pause, drain or terminate that is not carried out
// yet.
type Intent struct {
	Reason     power.Reason `json:"reason"`
	By         string       `json:"by"`
	At         time.Time    `json:"at"`
	Generation int64        `json:"generation"`
	Drain      bool         `json:"drain,omitempty"`
	Force      bool         `json:"force,omitempty"` // set by a schedule that does not wait for quiet
	// SentAt is when the call was sent. It is written before the call, so that after
	// a crash it is known that the call may have been sent.
	SentAt *time.Time `json:"sent_at,omitempty"`
	// Hibernate means that the stop must hibernate the instance. It is written
	// together with SentAt.
	Hibernate bool `json:"hibernate,omitempty"`
	// AgentGeneration is the number of an intent by the agent, assigned by the agent.
	AgentGeneration uint64 `json:"agent_generation,omitempty"`
	// Before is the last pause before this one, to be restored if this one does not
	// happen; nil if unknown.
	Before *LastPause `json:"before,omitempty"`
}

// Launch contains all parameters of a launch. It is durable before the call; a retry
// sends exactly the same parameters.
type Launch struct {
	Token              string            `json:"token"` // worker ID and generation
	Generation         int64             `json:"generation"`
	AMIID              string            `json:"ami_id"`
	InstanceType       string            `json:"instance_type"`
	SubnetID           string            `json:"subnet_id,omitempty"`
	SecurityGroupIDs   []string          `json:"security_group_ids,omitempty"`
	KeyName            string            `json:"key_name,omitempty"`
	IAMInstanceProfile string            `json:"iam_instance_profile,omitempty"`
	UserData           string            `json:"user_data,omitempty"` // without the enrollment secret
	Agent              bool              `json:"agent,omitempty"`     // user data installs and enrolls the agent
	Tags               map[string]string `json:"tags,omitempty"`
	Hibernation        bool              `json:"hibernation,omitempty"`
	// HibernationOff is why the worker cannot hibernate although its policy may
	// hibernate; empty otherwise.
	HibernationOff string        `json:"hibernation_off,omitempty"`
	RootVolume     *LaunchVolume `json:"root_volume,omitempty"`
	ResolvedAt     time.Time     `json:"resolved_at"`
	SentAt         *time.Time    `json:"sent_at,omitempty"`
}

// LaunchVolume is the root volume that a launch requests.
type LaunchVolume struct {
	Device    string `json:"device"`
	GB        int    `json:"gb"`
	Type      string `json:"type,omitempty"` // EC2's name, such as gp3
	Encrypted bool   `json:"encrypted,omitempty"`
}

// Volume is an EBS volume of a worker's instance.
type Volume struct {
	ID   string `json:"id"`
	Type string `json:"type"` // EC2's name, such as gp3
	GB   int    `json:"size_gb"`
}

// Worker is the record of one cloud machine.
type Worker struct {
	ID            string            `json:"id"`
	Name          string            `json:"name"`
	AWSRegion     string            `json:"aws_region"`
	Account       string            `json:"account,omitempty"`
	TemplateName  string            `json:"template_name,omitempty"`
	InstanceType  string            `json:"instance_type,omitempty"`
	AMIID         string            `json:"ami_id,omitempty"`
	Tags          map[string]string `json:"tags,omitempty"`
	Owner         string            `json:"owner,omitempty"`
	Contacts      []string          `json:"contacts,omitempty"`
	DesiredStatus power.Worker      `json:"desired_status"`

	LaunchGeneration int64   `json:"launch_generation"`
	Launch           *Launch `json:"launch,omitempty"`
	// RetryLook means that a user requested another launch, and that it must first be
	// proved that the earlier launch created no instance.
	RetryLook bool `json:"retry_look,omitempty"`

	IsIdleDetectionEnabled bool       `json:"is_idle_detection_enabled"`
	IdleTimeoutMinutes     *int       `json:"idle_timeout_minutes,omitempty"`
	SnoozeMinutes          *int       `json:"snooze_minutes,omitempty"`
	PauseAction            string     `json:"pause_action,omitempty"`
	PauseHolder            string     `json:"pause_holder"`
	TTLDeadline            *time.Time `json:"ttl_deadline,omitempty"`
	TTLAction              string     `json:"ttl_action,omitempty"`
	TTLFromTag             bool       `json:"ttl_from_tag,omitempty"` // TTLDeadline follows the instance's tag
	Schedule               string     `json:"schedule,omitempty"`
	Policy                 string     `json:"policy,omitempty"`
	PolicySince            *time.Time `json:"policy_since,omitempty"` // since when Policy and Schedule apply
	// Expiry is computed for answers, from TTLDeadline, and never stored.
	// TargetPauseAt may be earlier.
	Expiry *why.Expiry `json:"expiry,omitempty"`
	// PolicyTags are the tags written to the instance for its agent.
	PolicyTags      map[string]string `json:"policy_tags,omitempty"`
	ActivitySources []string          `json:"activity_sources,omitempty"`
	// ActivitySourcesReason is why lull chose ActivitySources at the import; empty if
	// a user chose them. DetectSources is set until they are chosen.
	ActivitySourcesReason string `json:"activity_sources_reason,omitempty"`
	DetectSources         bool   `json:"detect_sources,omitempty"`

	AcceptedRisks []string      `json:"accepted_risks,omitempty"` // preflight codes that do not block
	CMLUsername   string        `json:"cml_username,omitempty"`
	CMLPassword   sealed.Secret `json:"cml_password,omitempty"`
	TLSCA         string        `json:"tls_ca,omitempty"`
	TLSPin        string        `json:"tls_pin,omitempty"`
	TLSInsecure   bool          `json:"tls_insecure,omitempty"`

	// Armed is false for an imported or discovered worker until a user arms it. Until
	// then everything is decided and nothing is done (dry run).
	Armed    bool `json:"armed"`
	Imported bool `json:"imported,omitempty"`

	Status        power.Worker `json:"status"`
	StatusReason  string       `json:"status_reason,omitempty"`
	StatusSince   time.Time    `json:"status_since"`
	EC2InstanceID string       `json:"ec2_instance_id,omitempty"`
	EC2State      string       `json:"ec2_state,omitempty"` // as last recorded
	PublicIP      string       `json:"public_ip,omitempty"`
	PrivateIP     string       `json:"private_ip,omitempty"`
	HTTPSEndpoint string       `json:"https_endpoint,omitempty"`
	CMLVersion    string       `json:"cml_version,omitempty"`
	CMLReady      bool         `json:"cml_ready"`
	License       License      `json:"license"`
	CreatedAt     time.Time    `json:"created_at"`
	RunningSince  *time.Time   `json:"running_since"`
	Draining      bool         `json:"draining,omitempty"`

	LastActivityAt       *time.Time   `json:"last_activity_at"`
	LastActivityCheckAt  *time.Time   `json:"last_activity_check_at"`
	RecentActivityEvents []Event      `json:"recent_activity_events"`
	AutoPauseCount       int64        `json:"auto_pause_count"`
	ManualPauseCount     int64        `json:"manual_pause_count"`
	AutoResumeCount      int64        `json:"auto_resume_count"`
	ManualResumeCount    int64        `json:"manual_resume_count"`
	ExternalPauseCount   int64        `json:"external_pause_count"`
	ExternalResumeCount  int64        `json:"external_resume_count"`
	LastPausedAt         *time.Time   `json:"last_paused_at"`
	LastResumedAt        *time.Time   `json:"last_resumed_at"`
	SnoozedUntil         *time.Time   `json:"snoozed_until"`
	SnoozedBy            string       `json:"snoozed_by,omitempty"`
	LastPausedBy         string       `json:"last_paused_by,omitempty"`
	LastResumedBy        string       `json:"last_resumed_by,omitempty"`
	PauseReason          power.Reason `json:"pause_reason,omitempty"`
	// Volumes are the attached volumes, as last reported by EC2; empty means
	// unknown.
	Volumes         []Volume   `json:"volumes,omitempty"`
	PausePolicy     string     `json:"pause_policy,omitempty"` // policy that applied when lull last decided on a pause
	NextIdleCheckAt *time.Time `json:"next_idle_check_at"`
	TargetPauseAt   *time.Time `json:"target_pause_at"`
	// PauseNotBefore means that TargetPauseAt is only the earliest time, because
	// other workers may use the same budget first. It comes from the live verdict and
	// is never stored.
	PauseNotBefore bool       `json:"pause_not_before,omitempty"`
	WarningSentAt  *time.Time `json:"warning_sent_at,omitempty"`
	// WarningFor is ttl or schedule if the announced pause does not wait for quiet.
	// Activity does not end such a warning.
	WarningFor power.Reason `json:"warning_for,omitempty"`
	// CMLNotice is set from when a warning is recorded until CML's own pages no
	// longer show it.
	CMLNotice *Notice `json:"cml_notice,omitempty"`

	Intent          *Intent `json:"intent,omitempty"`
	PauseGeneration int64   `json:"pause_generation"`
	// TerminateFor is ttl or external if that, and not a user through lull, caused
	// the termination. TerminateBy is the user who requested it, if any.
	TerminateFor power.Reason `json:"terminate_for,omitempty"`
	TerminateBy  *audit.Actor `json:"terminate_by,omitempty"`
	// CancelledStopAt is when lull gave up a stop that may already have been sent. If
	// the worker then stops, that is a late action.
	CancelledStopAt *time.Time `json:"cancelled_stop_at,omitempty"`
	// StopCalledOff is the last requested stop, if it did not happen.
	StopCalledOff *CalledOff `json:"stop_called_off,omitempty"`
	// AgentCalledOff is the generation of the agent's last intent that was canceled.
	// The agent must not act on it.
	AgentCalledOff uint64     `json:"agent_called_off,omitempty"`
	StartOrigin    Origin     `json:"start_origin,omitempty"`
	StartBy        string     `json:"start_by,omitempty"`
	StartReason    string     `json:"start_reason,omitempty"` // as named in budgets
	StartAskedAt   *time.Time `json:"start_asked_at,omitempty"`
	StartSentAt    *time.Time `json:"start_sent_at,omitempty"`
	// StartWithdrawnAt is when the last requested start was withdrawn before the
	// worker ran, and StartWithdrawnBy by whom. Both are cleared by the next
	// requested start, and when the worker next runs.
	StartWithdrawnAt *time.Time `json:"start_withdrawn_at,omitempty"`
	StartWithdrawnBy string     `json:"start_withdrawn_by,omitempty"`
	Restarts         int        `json:"restarts,omitempty"` // number of restarts after stops by the cloud; reset once the worker has run for an hour
	MissingSince     *time.Time `json:"missing_since,omitempty"`
	HibernateNote    string     `json:"hibernate_note,omitempty"` // why the last pause was a plain stop although hibernation was requested
	LastGuard        string     `json:"last_guard,omitempty"`     // the arbiter's last guard, so that only changes are logged
	WakeTokenHash    string     `json:"wake_token_hash,omitempty"`
	LastWakeAt       *time.Time `json:"last_wake_at,omitempty"`

	revision int64
}

// Revision returns the store revision at which the record was read; it is the
// record's ETag.
func (w Worker) Revision() int64 { return w.revision }

// At returns w as it was written at a store revision.
func (w Worker) At(revision int64) Worker {
	w.revision = revision
	return w
}

// Counted reports whether w counts toward min_workers: it runs and is not intended to
// stop.
func (w *Worker) Counted() bool {
	return w.Status == power.WorkerRunning && w.DesiredStatus == power.WorkerRunning
}

// Public returns w without secrets and internal hashes, for the API and logs.
func (w Worker) Public() Worker {
	w.CMLPassword, w.License.Token, w.WakeTokenHash = "", "", ""
	if w.Launch != nil {
		l := *w.Launch
		l.UserData = ""
		w.Launch = &l
	}
	return w
}

// Clone returns a copy of w that can be changed independently.
func (w Worker) Clone() Worker {
	w.Tags, w.PolicyTags = maps.Clone(w.Tags), maps.Clone(w.PolicyTags)
	w.Contacts = slices.Clone(w.Contacts)
	w.ActivitySources = slices.Clone(w.ActivitySources)
	w.AcceptedRisks = slices.Clone(w.AcceptedRisks)
	w.RecentActivityEvents = slices.Clone(w.RecentActivityEvents)
	if w.Intent != nil {
		i := *w.Intent
		w.Intent = &i
	}
	if w.Launch != nil {
		l := *w.Launch
		w.Launch = &l
	}
	if w.CMLNotice != nil {
		n := *w.CMLNotice
		w.CMLNotice = &n
	}
	return w
}

// Keys of the records in the store.
const (
	prefix  = "workers/"
	PoolKey = "pool"
)

// Keys returns the keys of all worker records.
func Keys() store.Keys { return store.Prefix(prefix) }

func Key(id string) string { return prefix + id }

var codec = store.Codec[Worker]{Version: 1}

// Decode decodes a record from a watch or a listing.
func Decode(v store.Value) (Worker, error) {
	w, err := codec.Decode(v.Key, v.Data)
	w.revision = v.ModRevision
	w.share()
	return w, err
}

// Encode returns the data of w's record.
func (w *Worker) Encode() ([]byte, error) { return codec.Encode(Key(w.ID), *w) }

// share interns strings that many workers have in common, to save memory.
func (w *Worker) share() {
	for _, s := range []*string{&w.AWSRegion, &w.Account, &w.TemplateName, &w.InstanceType, &w.AMIID, &w.Owner, (*string)(&w.DesiredStatus), (*string)(&w.Status),
		&w.EC2State, &w.PauseHolder, &w.PauseAction, &w.CMLVersion, &w.CMLUsername, &w.License.Status, &w.Policy, &w.Schedule, &w.LastPausedBy, &w.LastResumedBy,
		(*string)(&w.PauseReason), &w.LastGuard, &w.TLSPin, &w.TLSCA} {
		if *s != "" {
			*s = unique.Make(*s).Value()
		}
	}
	for i, s := range w.AcceptedRisks {
		w.AcceptedRisks[i] = unique.Make(s).Value()
	}
}

// IDOf returns the ID in the key of a worker record.
func IDOf(key string) string { return key[len(prefix):] }

// Subject returns the properties of w that rules match against, without those of its
// template.
func (w *Worker) Subject() *policy.Subject {
	s := &policy.Subject{ID: w.ID, Region: w.AWSRegion, Tags: w.Tags, Policy: w.Policy, Own: policy.Values{
		IdleTimeoutMinutes: w.IdleTimeoutMinutes, SnoozeMinutes: w.SnoozeMinutes,
	}}
	if w.PauseAction != "" {
		s.Own.PauseAction = &w.PauseAction
	}
	if w.Schedule != "" {
		s.Own.Schedule = &w.Schedule
	}
	if len(w.ActivitySources) > 0 {
		s.Own.ActivitySources = w.ActivitySources
	}
	if len(w.AcceptedRisks) > 0 {
		s.Own.AcceptedRisks = w.AcceptedRisks
	}
	if w.PolicySince != nil {
		s.Since = *w.PolicySince
	}
	return s
}
