package power

// EC2 is the state of an instance as EC2 names it.
type EC2 string

// The states that EC2 documents for an instance.
const (
	EC2Pending      EC2 = "pending"
	EC2Running      EC2 = "running"
	EC2Stopping     EC2 = "stopping"
	EC2Stopped      EC2 = "stopped"
	EC2ShuttingDown EC2 = "shutting-down"
	EC2Terminated   EC2 = "terminated"
)

// Observation is one reading of EC2. "No such instance" is none: whoever has
// confirmed it twice, in the right region and account, passes EC2Terminated.
type Observation struct {
	State     EC2  // empty when nothing was read, which changes nothing
	Changed   bool // State differs from the one last recorded for the worker
	Addressed bool // its address is confirmed
}

// Observe returns the status of a worker after an observation; every change is
// a transition of WorkerTable that is open to Observed. Three rules bend the
// plain map: a start passes through STARTING whoever asked for it, an own call
// that has not taken effect yet is left to its deadline, and a FAILED worker
// moves only on a change from outside, so that it is never retried by itself.
func Observe(w Worker, o Observation) Worker {
	switch {
	case o.State == "", w == WorkerPending, w == WorkerTerminated:
		return w
	case o.State == EC2Terminated:
		return WorkerTerminated
	case w == WorkerTerminating, w == WorkerFailed && !o.Changed:
		return w
	}
	switch o.State {
	case EC2ShuttingDown:
		return WorkerTerminating
	case EC2Pending:
		if w == WorkerProvisioning {
			return w
		}
		return WorkerStarting
	case EC2Running:
		return observeRunning(w, o.Addressed)
	case EC2Stopping:
		return WorkerStopping
	case EC2Stopped:
		if w == WorkerStarting && !o.Changed {
			return w // the start has not taken effect yet
		}
		return WorkerStopped
	}
	if w == WorkerFailed {
		return w // it keeps its cause
	}
	return WorkerUnknown
}

func observeRunning(w Worker, addressed bool) Worker {
	switch w {
	case WorkerRunning, WorkerDraining, WorkerStopping:
		return w
	case WorkerStarting:
		if addressed {
			return WorkerRunning
		}
	}
	return WorkerStarting
}
