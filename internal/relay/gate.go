package relay

import (
	"sync/atomic"
	"time"
)

// The layout of a gate's word. Counts and flags share one word, so that counting an
// arrival and reading the flags is one atomic step, and Activity is one load.
const (
	insideOne  uint64 = 1
	waitingOne uint64 = 1 << 22
	movingOne  uint64 = 1 << 42
	heldFlag   uint64 = 1 << 62
	asleepFlag uint64 = 1 << 63

	insideMask  = waitingOne - 1
	waitingMask = movingOne/waitingOne - 1
	movingMask  = heldFlag/movingOne - 1
)

// gate holds the state of an instance that the fence depends on. The zero value is
// open and awake.
type gate struct {
	word        atomic.Uint64
	moves       atomic.Uint64
	lastByte    atomic.Int64 // unix nanoseconds
	lastArrival atomic.Int64 // unix nanoseconds
	ignored     atomic.Int64
}

// Activity is the state of an instance's connections at one instant, for the fence
// and for the idle engine.
type Activity struct {
	Held   bool // Hold was called, and neither Release nor Sleep afterwards
	Asleep bool // Sleep was called, and not Release afterwards

	// Open counts connections and HTTP requests that reach the backend or are being
	// dialed. Each keeps the instance awake, unless OpenSince reports it as quiet.
	Open int
	// Waiting counts everything that waits for the gate or for a wake: arrivals,
	// and open connections with unread bytes or an unread close.
	Waiting int
	// Moving counts connections that are sending bytes to the backend right now.
	Moving int
	// Ignored counts open connections that are not in Open because of a noise rule.
	Ignored int

	// Moves grows whenever bytes have been sent to the backend. If it is unchanged
	// and Moving is zero, none have been sent in between.
	Moves uint64

	LastByte    time.Time // zero: never
	LastArrival time.Time // zero: never
}

// Stirred reports whether anything is waiting or being sent. If so, a fence must
// thaw, however it treats quiet connections.
func (a Activity) Stirred() bool { return a.Waiting > 0 || a.Moving > 0 }

func (g *gate) activity() Activity {
	// Load the word first. The counters read afterwards include all bytes that were
	// sent before this load.
	w := g.word.Load()
	return Activity{
		Held:        w&heldFlag != 0,
		Asleep:      w&asleepFlag != 0,
		Open:        int(w & insideMask),
		Waiting:     int(w / waitingOne & waitingMask),
		Moving:      int(w / movingOne & movingMask),
		Ignored:     int(g.ignored.Load()),
		Moves:       g.moves.Load(),
		LastByte:    stamp(g.lastByte.Load()),
		LastArrival: stamp(g.lastArrival.Load()),
	}
}

func stamp(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns)
}

func (g *gate) sub(n uint64) { g.word.Add(^(n - 1)) }

// enter counts an arrival as inside. If the gate is held, it counts the arrival as
// waiting instead and returns false.
func (g *gate) enter() bool {
	if g.word.Add(insideOne)&heldFlag == 0 {
		return true
	}
	g.word.Add(waitingOne - insideOne)
	return false
}

// reenter is enter for an arrival that is already counted as waiting.
func (g *gate) reenter() bool {
	if g.word.Add(^(waitingOne-insideOne-1))&heldFlag == 0 {
		return true
	}
	g.word.Add(waitingOne - insideOne)
	return false
}

func (g *gate) insideToWaiting() { g.word.Add(waitingOne - insideOne) }
func (g *gate) leaveInside()     { g.sub(insideOne) }
func (g *gate) leaveWaiting()    { g.sub(waitingOne) }

// begin starts a section in which the caller may send bytes to the backend; the
// caller must call end. If the gate is held or the backend asleep, begin counts the
// caller as waiting and returns false.
func (g *gate) begin() bool {
	if g.word.Add(movingOne)&(heldFlag|asleepFlag) == 0 {
		return true
	}
	g.word.Add(^(movingOne - waitingOne - 1))
	return false
}

// end ends the section. It records the sent bytes before it reduces the count, so
// that a fence sees one or the other.
func (g *gate) end(moved bool, now int64) {
	if moved {
		g.lastByte.Store(now)
		g.moves.Add(1)
	}
	g.sub(movingOne)
}

func (g *gate) shut() bool { return g.word.Load()&(heldFlag|asleepFlag) != 0 }
func (g *gate) held() bool { return g.word.Load()&heldFlag != 0 }

func (g *gate) setHeld() { g.word.Or(heldFlag) }

// setAsleep and setAwake change both flags in one step.
func (g *gate) setAsleep() {
	for {
		w := g.word.Load()
		if g.word.CompareAndSwap(w, w&^heldFlag|asleepFlag) {
			return
		}
	}
}

func (g *gate) setAwake() { g.word.And(^(heldFlag | asleepFlag)) }
