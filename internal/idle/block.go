package idle

import "time"

// Code names a reason that prevents a pause. The set is the contract of spec,
// section 1; the preflight codes of section 2.4 and the host's come as Guards.
type Code string

// Codes of blocks, and IdleTimeoutExceeded for a verdict without any.
const (
	RecentActivity      Code = "recent_activity"
	NotIdleYet          Code = "not_idle_yet"
	InSnoozePeriod      Code = "in_snooze_period"
	AutoPauseDisabled   Code = "auto_pause_disabled"
	DetectionDisabled   Code = "detection_disabled"
	StatusNotRunning    Code = "status_not_running"
	SignalUnknown       Code = "signal_unknown"
	ConnectionOpen      Code = "connection_open"
	LeaseHeld           Code = "lease_held"
	WarningPending      Code = "warning_pending"
	MinWorkers          Code = "min_workers"
	Cooldown            Code = "cooldown"
	Schedule            Code = "schedule"
	Budget              Code = "budget"
	HookVeto            Code = "hook_veto"
	Shadow              Code = "shadow"
	Halted              Code = "halted"
	ClockInFuture       Code = "clock_in_future"
	IdleTimeoutExceeded Code = "idle_timeout_exceeded"
)

// Block is one reason that prevents a pause right now.
type Block struct {
	Code     Code       `json:"code"`
	Sentence string     `json:"sentence"`         // for people
	Signal   string     `json:"signal,omitempty"` // of signal_unknown and recent_activity
	Holder   string     `json:"holder,omitempty"` // of lease_held
	Until    *time.Time `json:"until,omitempty"`  // when it ends by itself; nil for no known end
}
