package worker

import (
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/halt"
)

// DetectResult is the result of DetectWorkerIdle.
type DetectResult struct {
	WorkerID            string       `json:"worker_id"`
	CheckedAt           time.Time    `json:"checked_at"`
	TelemetryFetched    bool         `json:"telemetry_fetched"`
	ActivityUpdated     bool         `json:"activity_updated"`
	IdleCheckPerformed  bool         `json:"idle_check_performed"`
	AutoPauseTriggered  bool         `json:"auto_pause_triggered"`
	IsIdle              bool         `json:"is_idle"`
	IdleMinutes         float64      `json:"idle_minutes"`
	EligibleForPause    bool         `json:"eligible_for_pause"`
	InSnoozePeriod      bool         `json:"in_snooze_period"`
	Error               string       `json:"error,omitempty"`
	Action              Action       `json:"action"`
	Guard               string       `json:"guard,omitempty"` // the arbiter's audit name, if one failed
	Blocks              []idle.Block `json:"blocks"`
	WouldHavePaused     bool         `json:"would_have_paused,omitempty"` // in dry run
	TelemetryUnknownWhy string       `json:"telemetry_unknown,omitempty"`
}

// Fill copies the fields of a verdict to r.
func (r *DetectResult) Fill(v idle.Verdict) {
	r.IdleCheckPerformed = true
	r.IsIdle, r.IdleMinutes = v.IsIdle, v.IdleMinutes
	r.EligibleForPause, r.InSnoozePeriod = v.Eligible, v.InSnoozePeriod
	r.Blocks = v.Blocks
}

// IdleStatus is the verdict on a worker with its evidence.
type IdleStatus struct {
	WorkerID string `json:"worker_id"`
	idle.Verdict
	IdleDuration     float64        `json:"idle_duration"` // seconds
	TimeoutMinutes   float64        `json:"timeout_minutes"`
	AutoPauseEnabled bool           `json:"auto_pause_enabled"`
	CheckedAt        time.Time      `json:"checked_at"`
	PolicyName       string         `json:"policy_name"` // the policy whose timeout applies
	Readings         []idle.Reading `json:"readings"`
	// Expiry is the worker's expiry; absent if it has none. It is not part of the
	// verdict: target_pause_at is only about idleness and schedules.
	Expiry *why.Expiry `json:"expiry,omitempty"`
	// ReadingsUnknown means that no server with live readings answered.
	ReadingsUnknown bool `json:"readings_unknown,omitempty"`
	// Checking means that a signal is unknown only because the worker was just
	// started, or has not been checked yet by the server that observes it.
	Checking bool `json:"checking,omitempty"`
	// CPU is the last CPU reading, in percent; absent if unknown. It is set in
	// listings of all workers.
	CPU *float64 `json:"cpu_utilization,omitempty"`
	// CloudUnread is set if EC2 cannot be read in the worker's region.
	CloudUnread *Unread `json:"cloud_unread,omitempty"`
}

// Activity is the activity group of a worker, with the snooze.
type Activity struct {
	WorkerID               string       `json:"worker_id"`
	LastActivityAt         *time.Time   `json:"last_activity_at"`
	LastActivityCheckAt    *time.Time   `json:"last_activity_check_at"`
	RecentActivityEvents   []Event      `json:"recent_activity_events"`
	AutoPauseCount         int64        `json:"auto_pause_count"`
	ManualPauseCount       int64        `json:"manual_pause_count"`
	AutoResumeCount        int64        `json:"auto_resume_count"`
	ManualResumeCount      int64        `json:"manual_resume_count"`
	ExternalPauseCount     int64        `json:"external_pause_count"`
	ExternalResumeCount    int64        `json:"external_resume_count"`
	LastPausedAt           *time.Time   `json:"last_paused_at"`
	LastResumedAt          *time.Time   `json:"last_resumed_at"`
	LastPausedBy           string       `json:"last_paused_by"`
	LastResumedBy          string       `json:"last_resumed_by"`
	PauseReason            power.Reason `json:"pause_reason"`
	SnoozedUntil           *time.Time   `json:"snoozed_until"`
	SnoozedBy              string       `json:"snoozed_by"`
	InSnoozePeriod         bool         `json:"in_snooze_period"`
	SnoozeUntil            *time.Time   `json:"snooze_until"`
	NextIdleCheckAt        *time.Time   `json:"next_idle_check_at"`
	TargetPauseAt          *time.Time   `json:"target_pause_at"`
	IsIdleDetectionEnabled bool         `json:"is_idle_detection_enabled"`
}

// Filter selects workers; empty fields select all.
type Filter struct {
	Region, Template, Owner string
	Status                  power.Worker
	Tags                    map[string]string
	WithTerminated          bool
}

// Matches reports whether w is selected.
func (q Filter) Matches(w *Worker) bool {
	if q.Region != "" && w.AWSRegion != q.Region || q.Template != "" && w.TemplateName != q.Template ||
		q.Owner != "" && w.Owner != q.Owner || q.Status != "" && w.Status != q.Status ||
		w.Status == power.WorkerTerminated && !q.WithTerminated && q.Status != power.WorkerTerminated {
		return false
	}
	for k, v := range q.Tags {
		if got, ok := w.Tags[k]; !ok || v != "" && got != v {
			return false
		}
	}
	return true
}

// Page is one page of a listing, by ID. Next is empty at the end.
type Page struct {
	Workers []Worker `json:"workers"`
	Next    string   `json:"next,omitempty"`
}

// Standstill returns the blocks that prevent every automatic action on w: a halt, and
// dry run. Everything that judges w must use them.
func Standstill(w *Worker, r *policy.Resolved, h halt.Halt, shadow bool) []idle.Block {
	var out []idle.Block
	if h.On {
		out = append(out, h.Block())
	}
	switch {
	case !w.Armed:
		out = append(out, idle.Block{Code: idle.Shadow, Sentence: "It is in dry-run mode until it is armed: lull decides and records, but takes no action."})
	case r.Shadow:
		out = append(out, idle.Block{Code: idle.Shadow, Sentence: shadowed(r)})
	case shadow:
		out = append(out, idle.Block{Code: idle.Shadow, Sentence: "It is in dry-run mode: lull decides and records, but takes no action."})
	}
	return out
}

// shadowed returns the sentence for the block of a policy in dry run.
func shadowed(r *policy.Resolved) string {
	return "Its policy is in dry-run mode (" + r.From["shadow"].String() + "): lull decides and records, but takes no action."
}

// EC2State is EC2's state of a worker's instance.
type EC2State struct {
	State      string            `json:"state"`
	Tags       map[string]string `json:"tags"`
	LaunchTime *time.Time        `json:"launch_time"`
	ObservedAt *time.Time        `json:"observed_at,omitempty"`
}
