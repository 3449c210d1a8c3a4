package instance

import "fmt"

// GoneError means that a run is over. Exit is how it ended; its Lost is set if
// that is unknown.
type GoneError struct {
	ID   string
	Exit Exit
}

func (e *GoneError) Error() string {
	if e.Exit.Lost {
		return fmt.Sprintf("cannot find the run of %s: it has ended with an unknown exit status", e.ID)
	}
	return fmt.Sprintf("cannot find the run of %s: it ended with code %d", e.ID, e.Exit.Code)
}

// EndedError is a failed start whose run was ended from outside before it was
// up. It counts as the end of a run, and the same rule restarts it.
type EndedError struct {
	Exit Exit
	Err  error
}

func (e *EndedError) Error() string { return e.Err.Error() }
func (e *EndedError) Unwrap() error { return e.Err }

// NoRoomError is a change that was refused before it began, because a file
// system of this machine has too little free space for it.
type NoRoomError struct {
	What        string // that would be written, for users
	Path        string // on the file system
	Needs, Free int64  // bytes
}

func (e *NoRoomError) Error() string {
	return fmt.Sprintf("there is no room for %s on the file system of %s: it may take %d bytes (%s), and %d (%s) are free",
		e.What, e.Path, e.Needs, Bytes(e.Needs), e.Free, Bytes(e.Free))
}

// Listener is a listening socket of an instance's processes.
type Listener struct {
	Network   string // tcp, udp or unix
	Addr      string // host:port as bound; a wildcard host is 0.0.0.0 or ::. For unix, the path
	PID       int    // one process that has it
	Watchable bool   // whether it can be duplicated while the instance is frozen
	Why       string // why not, empty when it can
	Private   bool   // only the workload itself can reach it: it is on the loopback of a separate network
}
