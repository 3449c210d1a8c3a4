package power

import (
	"fmt"
	"strings"
)

// Worker is the status of a fleet's worker.
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

const fleetOwner = "controller that holds the worker's lease"

// WorkerTable lists a worker's legal transitions. A created worker begins as
// PENDING; an imported one is UNKNOWN until its first observation.
var WorkerTable = &Table[Worker]{
	Name:    "worker",
	Initial: []Worker{WorkerPending, WorkerUnknown},
	States: []State[Worker]{
		{Name: WorkerPending, Kind: Transitional, Doc: "Recorded; no EC2 instance yet.",
			Deadline: Deadline[Worker]{"PROVISIONING_TIMEOUT_SECONDS", fleetOwner, "search by client token and tag, then fail with the cause", []Worker{WorkerFailed}}},
		{Name: WorkerProvisioning, Kind: Transitional, Doc: "Launched; EC2 has not reported it running yet.",
			Deadline: Deadline[Worker]{"PROVISIONING_TIMEOUT_SECONDS", fleetOwner, "fail with the cause; the instance is kept for inspection", []Worker{WorkerFailed}}},
		{Name: WorkerStarting, Kind: Transitional, Doc: "Started or restarted; the address is not confirmed yet.",
			Deadline: Deadline[Worker]{"PROVISIONING_TIMEOUT_SECONDS", fleetOwner, "fail with the cause; the instance is kept for inspection", []Worker{WorkerFailed}}},
		{Name: WorkerRunning, Kind: Resting, Doc: "In service."},
		{Name: WorkerDraining, Kind: Transitional, Doc: "Takes no new work; running work may finish.",
			Deadline: Deadline[Worker]{"DRAIN_TIMEOUT_SECONDS", fleetOwner,
				"stop if a user requested the drain or all readings are quiet, otherwise return to service", []Worker{WorkerStopping, WorkerRunning}}},
		{Name: WorkerStopping, Kind: Transitional, Doc: "Stop or hibernate called; EC2 has not reported it stopped yet.",
			Deadline: Deadline[Worker]{"stop_timeout", fleetOwner, "retry, then force; fail with the cause if EC2 rejects it", []Worker{WorkerFailed}}},
		{Name: WorkerStopped, Kind: Resting, Doc: "Stopped; its volumes are kept and billed."},
		{Name: WorkerTerminating, Kind: Transitional, Doc: "Terminate called; EC2 has not reported it terminated yet.",
			Deadline: Deadline[Worker]{"terminate_timeout", fleetOwner, "retry; fail with the cause if EC2 rejects it", []Worker{WorkerFailed}}},
		{Name: WorkerTerminated, Kind: Final, Doc: "Permanently gone."},
		{Name: WorkerFailed, Kind: Resting, Doc: "Needs a retry or cleanup by a user; the cause is kept."},
		{Name: WorkerUnknown, Kind: Transitional, Doc: "EC2 reports an unfamiliar state, or nothing has been observed yet.",
			Deadline: Deadline[Worker]{"unknown_timeout", fleetOwner, "raise an alarm and fail with the reported state; observation continues", []Worker{WorkerFailed}}},
	},
	Transitions: workerTransitions,
}

var workerTransitions = []Transition[Worker]{
	{WorkerPending, WorkerProvisioning, []Cause{Controller}, "RunInstances answered"},
	{WorkerPending, WorkerFailed, []Cause{Controller, Timeout}, "template or region config missing, or launch rejected"},
	{WorkerPending, WorkerTerminating, []Cause{Command}, "after a search for an earlier launch"},

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

	{WorkerRunning, WorkerStarting, []Cause{Observed}, "restarted outside lull"},
	{WorkerRunning, WorkerDraining, []Cause{Command, Controller}, "scale-down or a user"},
	{WorkerRunning, WorkerStopping, []Cause{Command, Controller, Observed}, "idle, schedule, ttl, a user, external"},
	{WorkerRunning, WorkerStopped, []Cause{Observed}, "external"},
	{WorkerRunning, WorkerTerminating, []Cause{Command, Controller, Observed}, "ttl, a user, external; never idleness"},
	{WorkerRunning, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerRunning, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerDraining, WorkerRunning, []Cause{Command, Controller, Timeout}, "cancel-drain, or in use again"},
	{WorkerDraining, WorkerStarting, []Cause{Observed}, "restarted outside lull"},
	{WorkerDraining, WorkerStopping, []Cause{Command, Controller, Observed, Timeout}, "drained"},
	{WorkerDraining, WorkerStopped, []Cause{Observed}, "external"},
	{WorkerDraining, WorkerTerminating, []Cause{Command, Controller, Observed}, ""},
	{WorkerDraining, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerDraining, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerStopping, WorkerStopped, []Cause{Observed}, "stopped"},
	{WorkerStopping, WorkerRunning, []Cause{Controller}, "EC2 rejected the stop; the intent is withdrawn"},
	{WorkerStopping, WorkerStarting, []Cause{Observed}, "started outside lull"},
	{WorkerStopping, WorkerFailed, []Cause{Timeout}, ""},
	{WorkerStopping, WorkerTerminating, []Cause{Command, Controller, Observed}, ""},
	{WorkerStopping, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerStopping, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerStopped, WorkerStarting, []Cause{Command, Controller, Observed}, "resume: a user, wake, schedule, external"},
	{WorkerStopped, WorkerStopping, []Cause{Observed}, "started and stopped outside lull"},
	{WorkerStopped, WorkerTerminating, []Cause{Command, Controller, Observed}, ""},
	{WorkerStopped, WorkerTerminated, []Cause{Observed}, "external"},
	{WorkerStopped, WorkerUnknown, []Cause{Observed}, ""},

	{WorkerTerminating, WorkerTerminated, []Cause{Observed, Controller}, "terminated, or proven never to have launched"},
	{WorkerTerminating, WorkerFailed, []Cause{Controller, Timeout}, "EC2 refused"},

	{WorkerFailed, WorkerPending, []Cause{Command}, "retry after proof that nothing was launched; the generation rises"},
	{WorkerFailed, WorkerStarting, []Cause{Command, Observed}, "retry with its instance, or started outside lull"},
	{WorkerFailed, WorkerStopping, []Cause{Command, Controller, Observed}, "a user, ttl, external"},
	{WorkerFailed, WorkerStopped, []Cause{Observed}, "external"},
	{WorkerFailed, WorkerTerminating, []Cause{Command, Controller, Observed}, "clean-up, ttl"},
	{WorkerFailed, WorkerTerminated, []Cause{Observed}, "external"},

	{WorkerUnknown, WorkerStarting, []Cause{Observed}, "pending or running"},
	{WorkerUnknown, WorkerStopping, []Cause{Observed}, "stopping"},
	{WorkerUnknown, WorkerStopped, []Cause{Observed}, "stopped"},
	{WorkerUnknown, WorkerTerminating, []Cause{Command, Observed}, "shutting-down"},
	{WorkerUnknown, WorkerTerminated, []Cause{Observed}, "terminated"},
	{WorkerUnknown, WorkerFailed, []Cause{Timeout}, ""},
}

// Verb is a command that a user or client issues to a worker.
type Verb string

// The verbs that change a worker's status. Pause and stop share a verb; the
// record keeps the reason.
const (
	VerbStart       Verb = "start"        // also resume
	VerbStop        Verb = "stop"         // also pause and hibernate
	VerbDrain       Verb = "drain"        //
	VerbCancelDrain Verb = "cancel-drain" //
	VerbTerminate   Verb = "terminate"    //
	VerbRelaunch    Verb = "relaunch"     // retry of a failed launch that left no instance
)

// verbs maps each verb and current status to the status it leads to. Every
// entry is a transition of WorkerTable that is open to Command.
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

// After returns the status that v leads to from w, or an error that lists the
// statuses in which v is allowed.
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
