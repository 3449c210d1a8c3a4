package power

import (
	"fmt"
	"strings"
)

// Worker is the status of a fleet's worker (spec, section 2.3).
type Worker string

// The statuses of a worker.
const (
	WorkerPending      Worker = "PENDING"
	WorkerProvisioning Worker = "PROVISIONING"
	WorkerStarting     Worker = "STARTING"
	WorkerRunning      Worker = "RUNNING"
	WorkerDraining     Worker = "DRAINING"
	WorkerStopping     Worker = "STOPPING"
	WorkerStopped      Worker = "STOPPED"
	WorkerTerminating  Worker = "TERMINATING"
	WorkerTerminated   Worker = "TERMINATED"
	WorkerFailed       Worker = "FAILED"
	WorkerUnknown      Worker = "UNKNOWN"
)

const fleetOwner = "controller, the worker's one owner by lease"

// WorkerTable is the one list of a worker's legal transitions. A worker that
// is created begins as PENDING, one that is imported as UNKNOWN until its
// first observation.
var WorkerTable = &Table[Worker]{
	Name:    "worker",
	Initial: []Worker{WorkerPending, WorkerUnknown},
	States: []State[Worker]{
		{Name: WorkerPending, Kind: Transitional, Doc: "Recorded; no EC2 instance yet.",
			Deadline: Deadline[Worker]{"PROVISIONING_TIMEOUT_SECONDS", fleetOwner, "look by client token and tag, then fail with the cause", []Worker{WorkerFailed}}},
		{Name: WorkerProvisioning, Kind: Transitional, Doc: "Launched; EC2 has not reported running.",
			Deadline: Deadline[Worker]{"PROVISIONING_TIMEOUT_SECONDS", fleetOwner, "fail with the cause; the instance is kept for a person", []Worker{WorkerFailed}}},
		{Name: WorkerStarting, Kind: Transitional, Doc: "Started or restarted; its address is not confirmed.",
			Deadline: Deadline[Worker]{"PROVISIONING_TIMEOUT_SECONDS", fleetOwner, "fail with the cause; the instance is kept for a person", []Worker{WorkerFailed}}},
		{Name: WorkerRunning, Kind: Resting, Doc: "Fully in service."},
		{Name: WorkerDraining, Kind: Transitional, Doc: "Takes no new work; what runs may end.",
			Deadline: Deadline[Worker]{"DRAIN_TIMEOUT_SECONDS", fleetOwner,
				"stop if a person drained it or all readings are quiet, otherwise return to service", []Worker{WorkerStopping, WorkerRunning}}},
		{Name: WorkerStopping, Kind: Transitional, Doc: "Stop or hibernate called; EC2 has not reported stopped.",
			Deadline: Deadline[Worker]{"stop_timeout", fleetOwner, "call again, then by force; fail with the cause when EC2 refuses", []Worker{WorkerFailed}}},
		{Name: WorkerStopped, Kind: Resting, Doc: "Stopped; its volumes are kept and paid for."},
		{Name: WorkerTerminating, Kind: Transitional, Doc: "Terminate called; EC2 has not reported terminated.",
			Deadline: Deadline[Worker]{"terminate_timeout", fleetOwner, "call again; fail with the cause when EC2 refuses", []Worker{WorkerFailed}}},
		{Name: WorkerTerminated, Kind: Final, Doc: "Gone for good."},
		{Name: WorkerFailed, Kind: Resting, Doc: "Needs a person: retry or clean up; its cause is kept."},
		{Name: WorkerUnknown, Kind: Transitional, Doc: "EC2 reports a state that lull does not know, or nothing was observed yet.",
			Deadline: Deadline[Worker]{"unknown_timeout", fleetOwner, "raise the alarm and fail with what was reported; it is still observed", []Worker{WorkerFailed}}},
	},
	Transitions: workerTransitions,
}

var workerTransitions = []Transition[Worker]{
	{WorkerPending, WorkerProvisioning, []Cause{Controller}, "RunInstances answered"},
	{WorkerPending, WorkerFailed, []Cause{Controller, Timeout}, "no template, no region config, launch refused"},
	{WorkerPending, WorkerTerminating, []Cause{Command}, "an earlier launch is looked for first"},

	{WorkerProvisioning, WorkerStarting, []Cause{Observed}, "running"},
	{WorkerProvisioning, WorkerFailed, []Cause{Controller, Timeout}, ""},
	{WorkerProvisioning, WorkerStopping, []Cause{Observed}, "external"},
	{WorkerProvisioning, WorkerStopped, []Cause{Observed}, "external"},
	{WorkerProvisioning, WorkerTerminating, []Cause{Command, Observed}, ""},
	{WorkerProvisioning, WorkerTerminated, []Cause{Observed}, "launch ended by EC2, or external"},
	{WorkerProvisioning, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerStarting, WorkerRunning, []Cause{Observed}, "running, address confirmed"},
	{WorkerStarting, WorkerFailed, []Cause{Controller, Timeout}, "start refused"},
	{WorkerStarting, WorkerStopping, []Cause{Command, Controller, Observed}, ""},
	{WorkerStarting, WorkerStopped, []Cause{Observed}, "fell back, or external"},
	{WorkerStarting, WorkerTerminating, []Cause{Command, Controller, Observed}, ""},
	{WorkerStarting, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerStarting, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerRunning, WorkerStarting, []Cause{Observed}, "restarted from outside"},
	{WorkerRunning, WorkerDraining, []Cause{Command, Controller}, "scale-down or a person"},
	{WorkerRunning, WorkerStopping, []Cause{Command, Controller, Observed}, "idle, schedule, ttl, a person, external"},
	{WorkerRunning, WorkerStopped, []Cause{Observed}, "external"},
	{WorkerRunning, WorkerTerminating, []Cause{Command, Controller, Observed}, "ttl, a person, external; never idleness"},
	{WorkerRunning, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerRunning, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerDraining, WorkerRunning, []Cause{Command, Controller, Timeout}, "cancel-drain; in use again"},
	{WorkerDraining, WorkerStarting, []Cause{Observed}, "restarted from outside"},
	{WorkerDraining, WorkerStopping, []Cause{Command, Controller, Observed, Timeout}, "drained"},
	{WorkerDraining, WorkerStopped, []Cause{Observed}, "external"},
	{WorkerDraining, WorkerTerminating, []Cause{Command, Controller, Observed}, ""},
	{WorkerDraining, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerDraining, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerStopping, WorkerStopped, []Cause{Observed}, "stopped"},
	{WorkerStopping, WorkerRunning, []Cause{Controller}, "EC2 refused the stop; the intent is withdrawn"},
	{WorkerStopping, WorkerStarting, []Cause{Observed}, "started from outside"},
	{WorkerStopping, WorkerFailed, []Cause{Timeout}, ""},
	{WorkerStopping, WorkerTerminating, []Cause{Command, Controller, Observed}, ""},
	{WorkerStopping, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerStopping, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerStopped, WorkerStarting, []Cause{Command, Controller, Observed}, "resume: a person, wake, schedule, external"},
	{WorkerStopped, WorkerStopping, []Cause{Observed}, "started and stopped from outside"},
	{WorkerStopped, WorkerTerminating, []Cause{Command, Controller, Observed}, ""},
	{WorkerStopped, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerStopped, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerTerminating, WorkerTerminated, []Cause{Observed, Controller}, "terminated, or proved that nothing was launched"},
	{WorkerTerminating, WorkerFailed, []Cause{Controller, Timeout}, "EC2 refused"},

	{WorkerFailed, WorkerPending, []Cause{Command}, "retry, proved that nothing was launched; generation rises"},
	{WorkerFailed, WorkerStarting, []Cause{Command, Observed}, "retry with its instance, or started from outside"},
	{WorkerFailed, WorkerStopping, []Cause{Command, Observed}, ""},
	{WorkerFailed, WorkerStopped, []Cause{Observed}, "external"},
	{WorkerFailed, WorkerTerminating, []Cause{Command, Observed}, "clean-up"},
	{WorkerFailed, WorkerTerminated, []Cause{Observed}, "external"},

	{WorkerUnknown, WorkerStarting, []Cause{Observed}, "pending or running"},
	{WorkerUnknown, WorkerStopping, []Cause{Observed}, "stopping"},
	{WorkerUnknown, WorkerStopped, []Cause{Observed}, "stopped"},
	{WorkerUnknown, WorkerTerminating, []Cause{Command, Observed}, "shutting-down"},
	{WorkerUnknown, WorkerTerminated, []Cause{Observed}, "terminated"},
	{WorkerUnknown, WorkerFailed, []Cause{Timeout}, ""},
}

// Verb is what a person or a client asks of a worker.
type Verb string

// The verbs that change a worker's status. Pause and stop are one here: the
// reason is in the record.
const (
	VerbStart       Verb = "start"        // also resume
	VerbStop        Verb = "stop"         // also pause and hibernate
	VerbDrain       Verb = "drain"        //
	VerbCancelDrain Verb = "cancel-drain" //
	VerbTerminate   Verb = "terminate"    //
	VerbRelaunch    Verb = "relaunch"     // retry of a failed launch that left nothing
)

// verbs says where each verb leads from where. Every entry is a transition of
// WorkerTable that is open to Command.
var verbs = map[Verb]map[Worker]Worker{
	VerbStart:       {WorkerStopped: WorkerStarting, WorkerFailed: WorkerStarting},
	VerbStop:        {WorkerRunning: WorkerStopping, WorkerStarting: WorkerStopping, WorkerDraining: WorkerStopping, WorkerFailed: WorkerStopping},
	VerbDrain:       {WorkerRunning: WorkerDraining},
	VerbCancelDrain: {WorkerDraining: WorkerRunning},
	VerbRelaunch:    {WorkerFailed: WorkerPending},
	VerbTerminate: {WorkerPending: WorkerTerminating, WorkerProvisioning: WorkerTerminating, WorkerStarting: WorkerTerminating,
		WorkerRunning: WorkerTerminating, WorkerDraining: WorkerTerminating, WorkerStopping: WorkerTerminating,
		WorkerStopped: WorkerTerminating, WorkerFailed: WorkerTerminating, WorkerUnknown: WorkerTerminating},
}

// After returns the status that a verb leads to, or an error that says from
// which statuses it is open.
func (w Worker) After(v Verb) (Worker, error) {
	to, ok := verbs[v][w]
	if ok {
		return to, nil
	}
	var from []string
	for _, s := range WorkerTable.All() {
		if _, ok := verbs[v][s]; ok {
			from = append(from, string(s))
		}
	}
	return "", fmt.Errorf("cannot %s a worker that is %s: only one that is %s", v, w, strings.Join(from, " or "))
}
