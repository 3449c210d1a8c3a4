// Package control is the protocol between a client and a server of a fleet: the
// objects of the HTTP API that are not the fleet's own records, and a client of
// the whole API.
//
// Workers, templates, settings and audit entries are those of package fleet.
// Field names are a contract. The server handles authorization.
package control

import (
	"encoding/json"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/savings"
	"lull/internal/core/why"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
)

// List is one page of a listing. Next is the cursor of the next page, for
// ?after=; it is empty on the last page.
type List[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next,omitempty"`
	// Total is the number of selected items on all pages. It is nil if it is not
	// known without reading them.
	Total *int `json:"total,omitempty"`
}

// ListDiscovered lists the discovered instances. Scan is the last scan; nil if no
// scan has finished.
type ListDiscovered struct {
	List[fleet.Discovered]
	Scan *fleet.Scan `json:"scan,omitempty"`
}

// Why explains why a worker is running, or why and by whom it was stopped.
type Why struct {
	why.Account
	WorkerID   string `json:"worker_id"`
	WorkerName string `json:"worker_name"`
	Status     string `json:"status"`
	// Standing is the worker's current standing in the overview; empty for a
	// past time.
	Standing   Standing          `json:"standing,omitempty"`
	IdleStatus worker.IdleStatus `json:"idle_status"`
	// ActivitySourcesReason is why an imported worker has its activity sources;
	// empty if a user chose them.
	ActivitySourcesReason string `json:"activity_sources_reason,omitempty"`
	// Last lists the newest audit entries about the worker up to the requested
	// time, newest first.
	Last []audit.Entry `json:"last"`
	// Readings is the origin of the readings: "live", "recorded" or "unknown".
	Readings string `json:"readings" enum:"live,recorded,unknown"`
	// Halted reports whether all automatic actions are halted now.
	Halted bool `json:"halted"`
	// Halt describes who halted them and when; absent without a halt.
	Halt *halt.Halt `json:"halt,omitempty"`
	// Policy is the current effective policy, with schedule, overrides and
	// budgets; absent for a past time.
	Policy *WorkerPolicy `json:"policy,omitempty" doc:"Current effective policy; absent for a past time"`
	// PolicyThen is the policy in effect at a past time, or when the worker was
	// stopped.
	PolicyThen *idle.Policy `json:"policy_then,omitempty" doc:"Policy at a past time, or when it was stopped; absent if not recorded"`
}

// Timeline contains a worker's signals over a time range. The number of points is
// limited: of several points in an interval, the most active one is kept.
type Timeline struct {
	WorkerID string           `json:"worker_id"`
	From     time.Time        `json:"from"`
	To       time.Time        `json:"to"`
	Signals  []TimelineSignal `json:"signals"`
	// Verdicts are the engine's verdicts, in order. In a time that none of them
	// covers the worker did not run, unless the time is listed in Missing.
	Verdicts []TimelineVerdict `json:"verdicts"`
	// Power lists the worker's statuses over the whole range, in order.
	Power   []TimelinePower    `json:"power"`
	Changes []TimelineChange   `json:"changes"`
	Missing []evidence.Missing `json:"missing"`
	// USDPerHour is the current price per hour of the worker's instance type
	// while running. It is null if the price is unknown or the machine is no
	// worker.
	USDPerHour *float64 `json:"usd_per_hour"`
}

// TimelineSignal is one signal over a time range.
type TimelineSignal struct {
	Signal    string          `json:"signal"`
	Unit      string          `json:"unit,omitempty"`
	Threshold float64         `json:"threshold" doc:"Threshold at or above which the signal is active, as last recorded"`
	Points    []TimelinePoint `json:"points"`
}

// TimelinePoint is one reading. It applies until the next point, or until Until
// if no later check followed.
type TimelinePoint struct {
	At    time.Time  `json:"at"`
	Until time.Time  `json:"until"`
	State idle.State `json:"state" doc:"unknown, quiet, active or absent"`
	Value *float64   `json:"value" doc:"Null if unknown or if there is no source"`
}

// TimelineVerdict is a time range with one verdict of the engine.
type TimelineVerdict struct {
	From     time.Time   `json:"from"`
	To       time.Time   `json:"to"`
	IsIdle   bool        `json:"is_idle"`
	Eligible bool        `json:"eligible_for_pause"`
	Blocks   []idle.Code `json:"blocks"`
	Reason   string      `json:"reason" doc:"The first block's sentence when it began"`
}

// TimelinePower is a time range in which a worker had one status.
type TimelinePower struct {
	From   time.Time `json:"from"`
	To     time.Time `json:"to"`
	Status string    `json:"status" doc:"Empty if unknown: from before lull managed it"`
}

// TimelineChange is a change of the worker's power state.
type TimelineChange struct {
	At time.Time `json:"at"`
	evidence.Change
}

// SimulatedPolicy is a policy to simulate: a named policy, or values under a name
// of their own.
type SimulatedPolicy struct {
	Name           string `json:"name" minLength:"1" maxLength:"128"`
	TimeoutMinutes int    `json:"timeout_minutes,omitempty" minimum:"0" maximum:"525600" doc:"0 uses the named policy's value"`
	SnoozeMinutes  *int   `json:"snooze_minutes,omitempty" minimum:"0" maximum:"525600" doc:"0 for none; absent uses the named policy's value, or the recorded one"`
	Action         string `json:"action,omitempty" maxLength:"32"`
	// Policy is the named policy that provides the values not given here.
	Policy            string   `json:"policy,omitempty" maxLength:"128" doc:"Named policy that supplies missing values; absent uses the policy of that name, unless timeout_minutes is set"`
	WarnBeforeMinutes *int     `json:"warn_before_minutes,omitempty" minimum:"0" maximum:"1440" doc:"0 for none; absent uses the named policy's value, or the recorded one"`
	ActivitySources   []string `json:"activity_sources,omitempty" maxItems:"3" enum:"cml,agent,cloudwatch" doc:"Only these signals count; absent uses the recorded ones. Times at which one of them was not read are unknown"`
	// Signals and Thresholds apply to agents only.
	Signals    []string           `json:"signals,omitempty" maxItems:"32" doc:"For agents: only these signals count; absent uses the recorded ones. Times at which one of them was not read are unknown"`
	Thresholds map[string]float64 `json:"thresholds,omitempty" doc:"For agents: threshold at which a signal counts as active, in its unit (cpu and gpu in percent, network and disk in KB/min); absent uses what was in force"`
	Schedule   *string            `json:"schedule,omitempty" maxLength:"128" doc:"Schedule to follow, as if it had always applied; empty for none. Absent uses the policy's, or the recorded one"`
}

// Simulate requests a simulation of policies over a recorded time range.
type Simulate struct {
	Policies      []SimulatedPolicy `json:"policies,omitempty" maxItems:"8" doc:"Empty means all named policies with an idle timeout, at most 32"`
	From          string            `json:"from,omitempty" maxLength:"80" doc:"RFC 3339, how long before now (7d), 18:00, fri 18:00 or 2006-01-02 15:04, in UTC or with a zone behind it; default seven days before to"`
	To            string            `json:"to,omitempty" maxLength:"80" doc:"In the same format; default: now"`
	Of            string            `json:"of,omitempty" enum:"workers,agents" doc:"What to replay: workers as the server observed them, or machines as their agents observed them; default: workers"`
	WorkerIDs     []string          `json:"worker_ids,omitempty" maxItems:"1000" doc:"Default: all"`
	Machines      []string          `json:"machines,omitempty" maxItems:"1000" doc:"For agents; default: all"`
	Tags          map[string]string `json:"tags,omitempty"`
	Region        string            `json:"aws_region,omitempty" maxLength:"32"`
	WindowMinutes int               `json:"window_minutes,omitempty" minimum:"0" maximum:"1440" doc:"Use this soon after a pause makes it a false stop; 0 is 15"`
}

// Simulation is the result of a Simulate request. Recommended is the policy
// without false stops that saves the most money, or the most hours if the money
// saved by one of them is unknown. It is empty if every policy has false stops.
type Simulation struct {
	From          time.Time          `json:"from"`
	To            time.Time          `json:"to"`
	WindowMinutes int                `json:"window_minutes"`
	Policies      []SimulatedOutcome `json:"policies"`
	Recommended   string             `json:"recommended"`
	Workers       map[string]string  `json:"workers" doc:"Names of the workers or machines that would have been stopped, by id"`
	Missing       []evidence.Missing `json:"missing"`
}

// SimulateStep is a progress line of a simulation. The last one contains the
// result or an error.
type SimulateStep struct {
	Share      float64     `json:"share" minimum:"0" maximum:"1" doc:"Of the time that has been replayed"`
	Simulation *Simulation `json:"simulation,omitempty"`
	Fault      string      `json:"fault,omitempty"`
}

// SimulatedOutcome is the effect that one policy would have had.
type SimulatedOutcome struct {
	savings.Sum
	Name           string          `json:"name"`
	TimeoutMinutes float64         `json:"timeout_minutes"`
	Snooze         *float64        `json:"snooze_minutes,omitempty" doc:"Absent uses what was in force, as for the warning"`
	WarnBefore     *float64        `json:"warn_before_minutes,omitempty"`
	Schedule       string          `json:"schedule,omitempty" doc:"Schedule to follow; absent uses what was in force, or none"`
	Pauses         int             `json:"pauses"`
	FalseStops     int             `json:"false_stops" doc:"Pauses after which the user came back within the window"`
	UnknownHours   float64         `json:"unknown_hours" doc:"Time without records; no decision falls into it"`
	Stops          []evidence.Stop `json:"stops" doc:"False stops first, at most 200"`
}

// Savings contains what actual stops saved, and the idle time during which
// workers were not stopped.
type Savings struct {
	From   time.Time     `json:"from"`
	To     time.Time     `json:"to"`
	By     string        `json:"by"`
	Groups []savings.Sum `json:"groups"`
	Total  savings.Sum   `json:"total"`
	// Days is the part of the time range, in days, during which a worker
	// existed. Daily savings are averages over it.
	Days float64 `json:"days"`
	// Periods contains the same figures for each day, week or month; empty unless
	// requested.
	Periods []SavingsPeriod `json:"periods,omitempty"`
	// NotAvoided is the number of hours for which workers ran idle, by what kept
	// them running: the code of a block, about_to_be_paused or not_recorded.
	NotAvoided map[string]float64 `json:"idle_hours_not_avoided"`
	// IdleByHour is the same hours by hour of the week in the time zone, starting
	// on Sunday at midnight.
	IdleByHour []float64 `json:"idle_by_hour_of_week"`
	// Idle contains the same for each group of idle_by that was idle. Groups with
	// a price come first, costliest first; then the others, most idle first.
	// IdleGroups is the number of groups without the limit idle_limit.
	Idle       []IdlePattern      `json:"idle,omitempty"`
	IdleGroups int                `json:"idle_groups,omitempty"`
	Missing    []evidence.Missing `json:"missing"`
	// MissingPrices lists rows that the server's price table lacks.
	MissingPrices []savings.MissingPrice `json:"missing_prices" doc:"Prices that these workers need and that the server's price table lacks"`
}

// The sources of a price.
const (
	PriceBuiltIn   = "built-in"
	PriceRefreshed = "refreshed"
	PriceOfFile    = "file"
)

// Price is one row of a server's price table.
type Price struct {
	Kind   string  `json:"kind" enum:"instance,storage"`
	Region string  `json:"region"`
	Name   string  `json:"name" doc:"Instance type or volume type"`
	USD    float64 `json:"usd" doc:"An hour of an instance; a GB-month of storage"`
	AsOf   string  `json:"as_of" format:"date"`
	Source string  `json:"source" enum:"built-in,refreshed,file"`
}

// Prices is a server's price table, sorted by region, kind and name.
type Prices struct {
	Items       []Price    `json:"items"`
	RefreshedAt *time.Time `json:"refreshed_at" doc:"Null if prices were never refreshed"`
	RefreshedBy string     `json:"refreshed_by,omitempty"`
}

// PriceRefresh is the outcome of a refresh.
type PriceRefresh struct {
	At        time.Time              `json:"at"`
	Refreshed int                    `json:"refreshed" doc:"Prices read and kept"`
	Missing   []savings.MissingPrice `json:"missing_prices" doc:"Prices that the workers need and AWS does not list"`
}

// SavingsPeriod is a day, a week beginning on Monday, or a month of the time
// range, in the time zone. The first and the last may be incomplete.
type SavingsPeriod struct {
	From   time.Time     `json:"from"`
	To     time.Time     `json:"to"`
	Groups []savings.Sum `json:"groups"`
	Total  savings.Sum   `json:"total"`
}

// IdlePattern shows when the workers of a group ran idle, and their state in the
// other hours. Each list has 168 sums of hours, one for each hour of the week,
// beginning on Sunday at midnight.
type IdlePattern struct {
	Key     string    `json:"key"`
	Name    string    `json:"name,omitempty"`
	Hours   []float64 `json:"idle_by_hour_of_week" doc:"168 sums of hours, the first that of Sunday at midnight"`
	InUse   []float64 `json:"in_use_by_hour_of_week"`
	Stopped []float64 `json:"stopped_by_hour_of_week"`
	Unknown []float64 `json:"unknown_by_hour_of_week" doc:"Hours in which it existed and that are not recorded or whose signals are unknown"`
	// IdleUSD is the compute cost of the idle hours, except UnpricedHours. It is
	// null if no idle hour has a known price.
	IdleUSD       *float64 `json:"idle_usd"`
	UnpricedHours float64  `json:"unpriced_idle_hours"`
}

// Sample is one metric: a value with its time, or the reason why there is none.
type Sample struct {
	Value *float64   `json:"value"`
	At    *time.Time `json:"at"`
	Error string     `json:"error,omitempty"`
}

// Metrics are the metrics of a worker. Null means unknown; Samples contains the
// reasons.
type Metrics struct {
	WorkerID          string          `json:"worker_id"`
	CPUUtilization    *float64        `json:"cpu_utilization"`
	MemoryUtilization *float64        `json:"memory_utilization"`
	DiskUtilization   *float64        `json:"disk_utilization"`
	LabsCount         *int            `json:"labs_count"`
	NodesCount        *int            `json:"nodes_count"`
	SystemInfo        json.RawMessage `json:"system_info,omitempty"`
	CMLVersion        string          `json:"cml_version,omitempty"`
	CollectedAt       *time.Time      `json:"collected_at"`
	CMLError          string          `json:"cml_error,omitempty"`
	// Samples contains the utilizations with their times, by name.
	Samples map[string]Sample `json:"samples,omitempty"`
	// Readings is "live", or "unknown" if no server that observes the worker can
	// be reached. The answer then comes from the stored record.
	Readings string `json:"readings" enum:"live,unknown"`
}

// Observation is what the server that owns a worker knows about it and does not
// store. Nil parts are unknown.
type Observation struct {
	Status    *worker.IdleStatus `json:"idle_status,omitempty"`
	EC2       *worker.EC2State   `json:"ec2_state,omitempty"`
	Telemetry []worker.Event     `json:"telemetry_events,omitempty"`
	Metrics   *Metrics           `json:"metrics,omitempty"`
	Agent     *AgentView         `json:"agent,omitempty"`
}

// Confirmation names the worker to be terminated.
type Confirmation struct {
	Confirm string `json:"confirm" maxLength:"128" doc:"Name of the worker"`
}

// Snooze protects a worker until a time or for some minutes. If neither is set,
// it ends the protection.
type Snooze struct {
	Until   string `json:"until,omitempty" maxLength:"80" doc:"RFC 3339, 18:00, fri 18:00, tomorrow, 2006-01-02 15:04 or +2h, in UTC or with a zone such as Europe/Berlin behind it"`
	Minutes int    `json:"minutes,omitempty" minimum:"0" maximum:"43200"`
}

// Halting starts or ends a halt of all automatic actions.
type Halting struct {
	On     bool   `json:"on"`
	Reason string `json:"reason,omitempty" maxLength:"512" doc:"Shown with the halt everywhere"`
	Until  string `json:"until,omitempty" maxLength:"80" doc:"End of the halt; RFC 3339, 18:00, fri 18:00, tomorrow, 2006-01-02 15:04 or +2h, in UTC or followed by a time zone such as Europe/Berlin. Absent means until lifted"`
}

// LicenseRequest requests a registration.
type LicenseRequest struct {
	Token      string `json:"token" minLength:"1" maxLength:"4096" doc:"The token, or file:PATH or env:NAME on the server"`
	Reregister bool   `json:"reregister,omitempty"`
}

// ScaleUp requests one more worker.
type ScaleUp struct {
	Template  string `json:"template" minLength:"1" maxLength:"128"`
	AWSRegion string `json:"aws_region,omitempty" maxLength:"32"`
	Reason    string `json:"reason,omitempty" maxLength:"512"`
}

// Selector selects workers by common properties.
type Selector struct {
	WorkerIDs []string          `json:"worker_ids,omitempty" maxItems:"1000"`
	Tags      map[string]string `json:"tags,omitempty"`
	Region    string            `json:"aws_region,omitempty"`
	All       bool              `json:"all,omitempty"`
}

// Settings are all settings, each with its origin.
type Settings struct {
	Items    []settings.Setting `json:"items"`
	Revision int64              `json:"revision"`
}

// NewToken requests a token.
type NewToken struct {
	Name       string `json:"name" minLength:"1" maxLength:"128"`
	Role       string `json:"role" enum:"viewer,operator,admin,agent,host"`
	Machine    string `json:"machine,omitempty" maxLength:"128" doc:"Machine that an agent's or host's token is bound to"`
	TTLSeconds int64  `json:"ttl_seconds,omitempty" minimum:"0" maximum:"316224000" doc:"0 does not expire"`
}

// Token describes a token. Secret is set only when it is created.
type Token struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	Role      string     `json:"role"`
	Machine   string     `json:"machine,omitempty"`
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
	RevokedBy string     `json:"revoked_by,omitempty"`
	Secret    string     `json:"token,omitempty"`
}

// WakeToken is a worker's new wake token, shown once.
type WakeToken struct {
	WorkerID string `json:"worker_id"`
	Token    string `json:"token"`
	URL      string `json:"url" doc:"POST here with Authorization: Bearer and the token"`
}

// Machine is an agent or a host with its last report.
type Machine struct {
	Name       string          `json:"name"`
	Kind       string          `json:"kind" enum:"agent,host"`
	ReportedAt *time.Time      `json:"reported_at"`
	AgeSeconds float64         `json:"age_seconds"`
	Report     json.RawMessage `json:"report,omitempty"`
	// Server is the server to which the machine reports. If it is not the server
	// that answers, Report is empty and ReportedAt is when the machine last
	// reported something new.
	Server string `json:"server,omitempty"`
	// Set for agents only. WorkerID is the machine's worker. The others are the
	// agent's version, whether it is older than the server, and whether it has
	// not reported for twice its interval.
	WorkerID string `json:"worker_id,omitempty"`
	Version  string `json:"version,omitempty"`
	Outdated bool   `json:"outdated,omitempty"`
	Stale    bool   `json:"stale,omitempty"`
}

// Agent returns the report of an agent, or a zero report if m has none that can
// be decoded.
func (m Machine) Agent() (r AgentReport) {
	if m.Kind != "agent" || json.Unmarshal(m.Report, &r) != nil {
		return AgentReport{}
	}
	return r
}

// Health is the response of /healthz and /readyz. It lists what is wrong, by part
// of the server.
type Health struct {
	Status string            `json:"status" enum:"ok,starting,failing"`
	Parts  map[string]string `json:"parts,omitempty"`
}

// Shards lists the servers that share the fleet, and the shards that this server
// owns.
type Shards struct {
	Server       string   `json:"server" doc:"The server that answers"`
	Role         string   `json:"role"`
	Members      []Member `json:"members"`
	Held         []int    `json:"shards" doc:"Parts of the fleet that this server owns"`
	Total        int      `json:"total_shards"`
	LeaseSeconds float64  `json:"lease_remaining_seconds"`
}

// Member is one live server.
type Member struct {
	ID      string     `json:"id"`
	Address string     `json:"address,omitempty"`
	Since   *time.Time `json:"since,omitempty"`
}

// Session is the caller's identity, and the server's.
type Session struct {
	Name    string `json:"name"`
	Role    string `json:"role"`
	Fleet   string `json:"fleet"`
	Version string `json:"version"`
	Halted  bool   `json:"halted"`
	Shadow  bool   `json:"shadow"`
	Host    string `json:"host,omitempty" doc:"Name of the only host that this server shows, without a fleet; absent at a server of a fleet"`
}

// Auth describes how users can log in besides with tokens. Without an OIDC issuer
// all fields are empty.
type Auth struct {
	Issuer   string `json:"issuer,omitempty"`
	ClientID string `json:"client_id,omitempty"`
	Login    string `json:"login,omitempty" doc:"Start page for a browser"`
}

// Reset is sent in the event stream when events may be missing. The reader must
// then read the current state again.
type Reset struct {
	Reason string `json:"reason"`
}

// TemplateBody is a template in a request. Enabled defaults to true.
type TemplateBody struct {
	Name               string                `json:"name,omitempty" maxLength:"128" doc:"The name in the path"`
	Description        string                `json:"description,omitempty" maxLength:"1024"`
	InstanceType       string                `json:"instance_type" maxLength:"64"`
	AMINameFilter      string                `json:"ami_name_filter" maxLength:"255"`
	UserData           string                `json:"user_data,omitempty"`
	IAMInstanceProfile string                `json:"iam_instance_profile,omitempty" maxLength:"256"`
	Capacity           *launch.Capacity      `json:"capacity,omitempty"`
	Enabled            *bool                 `json:"enabled,omitempty"`
	IdleDetection      *launch.IdleDetection `json:"idle_detection,omitempty"`
	RootVolume         *launch.RootVolume    `json:"root_volume,omitempty"`
	Hibernation        string                `json:"hibernation,omitempty" enum:"auto,on,off" doc:"auto (the default): on if the effective policy may hibernate, and type and image allow it"`
	Agent              bool                  `json:"agent,omitempty" doc:"Install and enroll the agent through user data"`
	CMLUsername        string                `json:"cml_username,omitempty" maxLength:"256"`
	CMLPassword        *string               `json:"cml_password,omitempty" maxLength:"1024" doc:"file:PATH, env:NAME or the password itself; never returned. Absent keeps the one that is stored"`
	TLSCA              string                `json:"tls_ca,omitempty" maxLength:"65536"`
	TLSPin             string                `json:"tls_pin,omitempty" maxLength:"256"`
	TLSInsecure        bool                  `json:"tls_insecure,omitempty"`
	ActivitySources    []string              `json:"activity_sources,omitempty" enum:"cml,agent,cloudwatch"`
	AcceptedRisks      []string              `json:"accepted_risks,omitempty" enum:"instance_store,no_elastic_ip,asg_member,spot,stop_protected"`
}

// Template returns t as a record with the given name.
func (t TemplateBody) Template(name string) launch.Template {
	out := launch.Template{Name: name, Description: t.Description, InstanceType: t.InstanceType, AMINameFilter: t.AMINameFilter,
		UserData: t.UserData, IAMInstanceProfile: t.IAMInstanceProfile, Enabled: t.Enabled == nil || *t.Enabled, IdleDetection: t.IdleDetection,
		RootVolume: t.RootVolume, Hibernation: t.Hibernation, Agent: t.Agent, CMLUsername: t.CMLUsername, TLSCA: t.TLSCA, TLSPin: t.TLSPin, TLSInsecure: t.TLSInsecure,
		ActivitySources: t.ActivitySources, AcceptedRisks: t.AcceptedRisks}
	if t.Capacity != nil {
		out.Capacity = *t.Capacity
	}
	return out
}
