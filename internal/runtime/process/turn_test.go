package process

import (
	"math/rand/v2"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/platform/sockets"
)

// wire simulates a connection with the kernel's accounting, independently of the
// code under test. Each message has a known sender.
type wire struct {
	now     time.Duration
	last    instance.Turn
	traffic sockets.Traffic
	in, out time.Duration // time of the last data
	ack     time.Duration
}

const tick = 4 * time.Millisecond

func (w *wire) floor() time.Duration { return w.now / tick * tick }

// send sends data from one end. The data also acknowledges what the other end has
// sent.
func (w *wire) send(from instance.Turn, segments uint32) {
	if w.last == from || w.last == instance.TurnNone {
		w.plain(from)
	}
	w.last = from
	if from == instance.TurnLocal {
		w.traffic.SegsOut += segments
		w.traffic.DataSegsOut += segments
		w.out = w.floor()
		return
	}
	w.traffic.SegsIn += segments
	w.traffic.DataSegsIn += segments
	w.in, w.ack = w.floor(), w.floor()
}

// plain makes the end that did not send last send an acknowledgement without data.
func (w *wire) plain(sender instance.Turn) {
	switch {
	case w.last == instance.TurnNone:
	case sender == instance.TurnLocal: // so the other end acknowledges
		w.traffic.SegsIn++
		w.ack = w.floor()
	default:
		w.traffic.SegsOut++
	}
}

// acknowledge sends the acknowledgement of the last data after a while.
func (w *wire) acknowledge(after, until time.Duration) {
	w.now += after
	w.plain(w.last)
	w.now += until - after
}

func (w *wire) socket() sockets.Socket {
	t := w.traffic
	t.LastSent, t.LastReceived, t.LastAck = w.floor()-w.out, w.floor()-w.in, w.floor()-w.ack
	return sockets.Socket{Inode: 1, Traffic: t, InfoSize: 240}
}

// TestTurnIsNeverWrong checks that the turn is never attributed to the wrong end,
// whatever both ends send and whenever it is sampled, unless an end sent more than
// one message in a tick.
func TestTurnIsNeverWrong(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	unclear, all := 0, 0
	for range 2000 {
		w, k := &wire{now: time.Hour}, talk{}
		from, inbound := instance.TurnRemote, r.IntN(2) == 0
		if !inbound {
			from = instance.TurnLocal
		}
		for range 1 + r.IntN(12) {
			w.send(from, 1+uint32(r.IntN(3)))
			if from == instance.TurnRemote {
				from = instance.TurnLocal
			} else {
				from = instance.TurnRemote
			}
			if r.IntN(2) == 0 { // the answer takes a while
				w.now += time.Duration(r.Int64N(int64(20 * time.Millisecond)))
			}
			if r.IntN(6) == 0 {
				w.acknowledge(time.Duration(r.Int64N(int64(50*time.Millisecond))), time.Second)
				got, next := k.next(w.socket(), inbound)
				all++
				if got == instance.TurnUnclear {
					unclear++
				} else if got != w.last {
					t.Fatalf("the turn is %d, want %d: %+v after %+v", got, w.last, w.socket().Traffic, k)
				}
				k = next
			}
		}
	}
	t.Logf("%d of %d were unclear", unclear, all)
}

func TestTurnOfAnOldKernel(t *testing.T) {
	if got, _ := (talk{}).next(sockets.Socket{InfoSize: 104}, true); got != instance.TurnUnclear {
		t.Errorf("without segments the turn is %d", got)
	}
}
