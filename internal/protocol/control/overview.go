package control

import (
	"time"

	"lull/internal/core/why"
	"lull/internal/fleet/halt"
)

// Standing is a worker's position on its way to a pause, for the overview. Each
// worker has exactly one.
type Standing string

// The standings. A worker whose state is uncertain is unknown.
const (
	StandingActive      Standing = "active"       // running and recently used
	StandingIdle        Standing = "idle"         // running and not recently used
	StandingPausingSoon Standing = "pausing_soon" // its pause is near, intended or in progress
	StandingBlocked     Standing = "blocked"      // idle, and something prevents its pause
	StandingUnknown     Standing = "unknown"      // running; whether it is in use is unknown
	StandingChecking    Standing = "checking"     // just imported or started; its first check is in progress
	StandingPaused      Standing = "paused"       // stopped
	StandingStarting    Standing = "starting"     // on its way to running
	StandingFailed      Standing = "failed"       // needs a user's attention
	StandingEnded       Standing = "ended"        // terminating or terminated
)

// WorkerRow is a worker as the overview lists it.
type WorkerRow struct {
	ID            string   `json:"id"`
	Name          string   `json:"name"`
	AWSRegion     string   `json:"aws_region"`
	InstanceType  string   `json:"instance_type,omitempty"`
	TemplateName  string   `json:"template_name,omitempty"`
	Owner         string   `json:"owner,omitempty"`
	Status        string   `json:"status"`
	DesiredStatus string   `json:"desired_status"`
	Standing      Standing `json:"standing" enum:"active,idle,pausing_soon,blocked,unknown,checking,paused,starting,failed,ended"`
	// Sentence is the reason for the standing, for users. Block is the code of
	// what prevents a pause; empty if nothing does.
	Sentence       string     `json:"sentence"`
	Block          string     `json:"block,omitempty"`
	Attention      bool       `json:"attention,omitempty" doc:"Needs attention by a user"`
	IdleMinutes    float64    `json:"idle_minutes"`
	TimeoutMinutes float64    `json:"timeout_minutes"`
	LastActivityAt *time.Time `json:"last_activity_at"`
	TargetPauseAt  *time.Time `json:"target_pause_at" doc:"Whichever comes first: its pause or its expiry"`
	// Expiry is the worker's expiry; absent if it has none.
	Expiry       *why.Expiry `json:"expiry,omitempty"`
	SnoozeUntil  *time.Time  `json:"snooze_until"`
	LastPausedAt *time.Time  `json:"last_paused_at"`
	PauseReason  string      `json:"pause_reason,omitempty"`
	Armed        bool        `json:"armed"`
	// USDPerHour is the hourly price of the worker's instance type; null if the
	// price table has none. CPU is the last CPU reading in percent; null if
	// unknown.
	USDPerHour    *float64 `json:"usd_per_hour"`
	CPU           *float64 `json:"cpu_utilization"`
	EC2InstanceID string   `json:"ec2_instance_id,omitempty"`
	HTTPSEndpoint string   `json:"https_endpoint,omitempty"`
	// Revision is the revision of the worker's record. A reader must not replace
	// a row by one with a lower revision.
	Revision int64 `json:"revision"`
}

// Overview is a summary of the fleet: counts, the workers that need attention
// most, and a part of the list.
type Overview struct {
	At time.Time `json:"at"`
	// Revision is the store revision up to which changes of workers are included.
	Revision int64 `json:"revision"`
	// Total is the number of all workers, Matched the number of workers that
	// match search and filters. Counts counts the latter by standing; the
	// requested standing does not affect it.
	Total     int              `json:"total"`
	Matched   int              `json:"matched"`
	Counts    map[Standing]int `json:"counts"`
	Attention []WorkerRow      `json:"attention" doc:"The most urgent workers, most urgent first"`
	Urgent    int              `json:"attention_total"`
	// Unarmed is the number of workers that are in dry-run mode until a user arms
	// them.
	Unarmed int         `json:"unarmed_total"`
	Regions []string    `json:"aws_regions"`
	Offset  int         `json:"offset"`
	Items   []WorkerRow `json:"items"`
	Halt    halt.Halt   `json:"halt"`
}
