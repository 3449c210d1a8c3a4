package process

import (
	"time"

	"lull/internal/core/instance"
	"lull/internal/platform/sockets"
)

// ackLimit is the longest time for which the kernel delays an acknowledgement.
const ackLimit = 200 * time.Millisecond

// talk is the state of a connection from which next determines who sent last.
type talk struct {
	base sockets.Traffic // traffic when the turn was last known; zero for the start of the connection
	turn instance.Turn   // the turn when it was last known
	now  sockets.Traffic // traffic at the newest sample
}

// turns holds the talk of each connection of a tree, by inode.
type turns map[uint64]talk

// next returns which end sent data last, and the state to keep. The kernel records
// the time of the last data in each direction in ticks of its clock (1 to 10 ms),
// so a request and a fast answer can have the same time. In that case the segments
// counted since the turn was last known decide.
//
// inbound reports whether the other end opened the connection. As a rule, that end
// speaks first.
func (t talk) next(o sockets.Socket, inbound bool) (instance.Turn, talk) {
	now := o.Traffic
	turn := instance.TurnUnclear
	switch in, out := now.DataSegsIn-t.base.DataSegsIn, now.DataSegsOut-t.base.DataSegsOut; {
	case !o.HasSegments():
		return turn, t
	case in == 0 && out == 0:
		turn = t.turn
	case in == 0:
		turn = instance.TurnLocal
	case out == 0:
		turn = instance.TurnRemote
	case now.LastReceived < now.LastSent:
		turn = instance.TurnRemote
	case now.LastSent < now.LastReceived:
		turn = instance.TurnLocal
	default:
		turn = t.tie(now, in, inbound)
	}
	t.now = now
	if turn != instance.TurnUnclear {
		t.base, t.turn = now, turn
	}
	return turn, t
}

// tie decides which end sent last if both did in the same tick. in is the number of
// data segments received since the turn was last known.
func (t talk) tie(now sockets.Traffic, in uint32, inbound bool) instance.Turn {
	quiet := now.LastReceived
	acksIn := now.SegsIn - now.DataSegsIn - (t.base.SegsIn - t.base.DataSegsIn)
	acksOut := now.SegsOut - now.DataSegsOut - (t.base.SegsOut - t.base.DataSegsOut)
	switch {
	case in == 1 && inbound && t.turn != instance.TurnRemote:
		return instance.TurnLocal // the only segment received was answered in the same tick
	case quiet < ackLimit:
	case acksIn == 0:
		return instance.TurnRemote // all our data was acknowledged by segments with data, so the other end sent last
	case acksOut == 0:
		return instance.TurnLocal // all received data was acknowledged by our segments with data, so we sent last
	case now.LastAck < quiet && quiet-now.LastAck <= ackLimit:
		return instance.TurnLocal // our data was acknowledged later than the received data arrived, so we sent last
	}
	return instance.TurnUnclear
}
