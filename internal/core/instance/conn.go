package instance

import "time"

// Turn says which end of a connection sent data last.
type Turn uint8

// Who sent last. Unclear means that both did within one tick of the kernel's
// clock, and nothing tells in which order.
const (
	TurnNone   Turn = iota // no data has moved, or the source does not say
	TurnLocal              // the instance
	TurnRemote             // the other end
	TurnUnclear
)

// UnclearFor is how long an unclear turn counts as a request without an answer.
const UnclearFor = time.Minute

// Conn is an open connection of an instance.
type Conn struct {
	Local     string        // address and port on this machine
	Remote    string        // of the other end
	QuietFor  time.Duration // since a byte moved in either direction, by the kernel's account
	Turn      Turn          // who sent last
	Unread    uint32        // bytes the program has not read yet
	Accepted  bool          // false while it still waits in a listener's queue
	Loopback  bool          // both ends on this machine's loopback
	HalfClose bool          // the client has finished sending (CLOSE_WAIT)
}

// Owes reports whether the instance owes its client an answer on this inbound
// connection: the client sent last.
func (c Conn) Owes() bool {
	return c.Turn == TurnRemote || c.Turn == TurnUnclear && c.QuietFor < UnclearFor
}

// Awaits reports whether the instance waits for an answer on this connection that
// it opened: it sent last. An unclear turn does not count.
func (c Conn) Awaits() bool { return c.Turn == TurnLocal }
