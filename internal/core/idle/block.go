package idle

import "time"

// Code identifies a reason that prevents a pause. Scripts rely on the codes.
// Codes of preflight checks and of the host reach the engine as Guards.
type Code string

// Codes of blocks, and IdleTimeoutExceeded for a verdict without any.
const (
	RecentActivity      Code = "recent_activity"
	SignalActive        Code = "signal_active"     // the last reading of a signal was active
	SignalIncomplete    Code = "signal_incomplete" // quiet, but not for the whole idle time
	NotIdleYet          Code = "not_idle_yet"
	InSnoozePeriod      Code = "in_snooze_period"
	AutoPauseDisabled   Code = "auto_pause_disabled"
	DetectionDisabled   Code = "detection_disabled"
	StatusNotRunning    Code = "status_not_running"
	StopIntended        Code = "stop_intended" // it runs although a stop of it is pending
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
	Sentence string     `json:"sentence"`         // for users
	Signal   string     `json:"signal,omitempty"` // for recent_activity and signal_*
	Holder   string     `json:"holder,omitempty"` // for lease_held
	Until    *time.Time `json:"until,omitempty"`  // when the block ends by itself; nil if unknown
}
