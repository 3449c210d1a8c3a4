package instance

import "fmt"

// GoneError means that a run is over. Exit describes how it ended; Exit.Lost is
// set if that is unknown.
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

// EndedError means that a start failed because the run was ended from outside
// before it was ready. It counts as the end of a run, and the restart rule
// applies.
type EndedError struct {
	Exit Exit
	Err  error
}

func (e *EndedError) Error() string { return e.Err.Error() }
func (e *EndedError) Unwrap() error { return e.Err }

// NoRoomError means that a change was refused before it began, because a file
// system of this machine has too little free space for it.
type NoRoomError struct {
	What        string // what would be written, for users
	Path        string // a path on the file system
	Needs, Free int64  // bytes
}

func (e *NoRoomError) Error() string {
	return fmt.Sprintf("there is no room for %s on the file system of %s: it may take %d bytes (%s), and %d (%s) are free",
		e.What, e.Path, e.Needs, Bytes(e.Needs), e.Free, Bytes(e.Free))
}

// Listener is a listening socket of an instance's processes.
type Listener struct {
	Network   string // tcp, udp or unix
	Addr      string // host:port as bound, with 0.0.0.0 or :: for all addresses; for unix, the path
	PID       int    // one of the processes that have it
	Watchable bool   // whether it can be duplicated while the instance is frozen
	Why       string // why it is not Watchable
	Private   bool   // on the loopback of a separate network, so only the workload itself can reach it
}
