package instance

import "time"

// Turn is which end of a connection sent data last.
type Turn uint8

// The values of Turn. TurnUnclear means that both ends sent within one tick of
// the kernel's clock, so that their order is unknown.
const (
	TurnNone   Turn = iota // no data was sent, or the source does not report it
	TurnLocal              // the instance
	TurnRemote             // the other end
	TurnUnclear
)

// UnclearFor is how long an unclear turn counts as an unanswered request.
const UnclearFor = time.Minute

// Conn is an open connection of an instance.
type Conn struct {
	Local     string        // address and port on this machine
	Remote    string        // of the other end
	QuietFor  time.Duration // since a byte moved in either direction, according to the kernel
	Turn      Turn          // who sent last
	Unread    uint32        // bytes the program has not read yet
	Accepted  bool          // false while it still waits in a listener's queue
	Loopback  bool          // both ends on this machine's loopback
	HalfClose bool          // the client has finished sending (CLOSE_WAIT)
}

// Owes reports whether the instance owes its client an answer on this inbound
// connection, because the client sent last.
func (c Conn) Owes() bool {
	return c.Turn == TurnRemote || c.Turn == TurnUnclear && c.QuietFor < UnclearFor
}

// Awaits reports whether the instance, which opened this connection, waits for an
// answer, because it sent last. An unclear turn does not count.
func (c Conn) Awaits() bool { return c.Turn == TurnLocal }
