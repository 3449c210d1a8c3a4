package power

// EC2 is the state of an EC2 instance, as EC2 names it.
type EC2 string

// The instance states that EC2 documents.
const (
	EC2Pending      EC2 = "pending"
	EC2Running      EC2 = "running"
	EC2Stopping     EC2 = "stopping"
	EC2Stopped      EC2 = "stopped"
	EC2ShuttingDown EC2 = "shutting-down"
	EC2Terminated   EC2 = "terminated"
)

// Observation is one reading of an instance's state in EC2. The answer that no
// such instance exists is not an observation: the caller passes EC2Terminated
// only after confirming it twice, in the right region and account.
type Observation struct {
	State     EC2  // empty if the state could not be read; Observe then changes nothing
	Changed   bool // State differs from the last one recorded
	Addressed bool // the worker's address is confirmed
}

// Observe returns the status of a worker after an observation. Every change is a
// transition of WorkerTable that is open to Observed. Three rules refine the
// plain mapping. A start always passes through STARTING. A call by lull that has
// not taken effect yet is left to its deadline. A FAILED worker changes only if
// EC2's state has changed, so that it is never retried automatically.
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
		return w // keep the recorded cause
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
