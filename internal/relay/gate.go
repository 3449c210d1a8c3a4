package relay

import (
	"sync/atomic"
	"time"
)

// The single word of a gate. Counts and flags share it, so that counting and
// then checking the flags is one atomic step and Activity is one load.
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

// gate is an instance's state for the fence. The zero value is open and awake.
type gate struct {
	word        atomic.Uint64
	moves       atomic.Uint64
	lastByte    atomic.Int64 // unix nanoseconds
	lastArrival atomic.Int64 // unix nanoseconds
	ignored     atomic.Int64
}

// Activity is the activity of an instance's connections, for the fence and for
// the idle engine.
type Activity struct {
	Held   bool // Hold was called, and neither Release nor Sleep since
	Asleep bool // Sleep was called, and Release has not been since

	// Open counts connections and HTTP requests that reach the backend or are
	// being dialed. Each of them holds, unless OpenSince reports it as quiet.
	Open int
	// Waiting counts arrivals, and open connections with unread bytes or a
	// close, that wait for the gate or for a wake.
	Waiting int
	// Moving counts connections that are transferring bytes to the backend right
	// now.
	Moving int
	// Ignored counts open connections that a noise rule took out of Open.
	Ignored int

	// Moves grows whenever bytes went to the backend. If it is unchanged and
	// Moving is zero, none went in between.
	Moves uint64

	LastByte    time.Time // zero: never
	LastArrival time.Time // zero: never
}

// Stirred reports whether something is waiting or in flight at this instant. A
// fence that sees it must thaw, however it treats quiet connections.
func (a Activity) Stirred() bool { return a.Waiting > 0 || a.Moving > 0 }

func (g *gate) activity() Activity {
	// Load the word first: bytes that were transferred before this load are in
	// the counters read after it.
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

// enter counts an arrival as inside. If the gate is held, it makes the arrival
// a waiting one and returns false. It is counted either way.
func (g *gate) enter() bool {
	if g.word.Add(insideOne)&heldFlag == 0 {
		return true
	}
	g.word.Add(waitingOne - insideOne)
	return false
}

// reenter is enter for an arrival that is counted as waiting.
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

// begin opens a section in which bytes go to the backend; end closes it. If the
// gate is held or the backend asleep, begin counts the caller as waiting and
// returns false.
func (g *gate) begin() bool {
	if g.word.Add(movingOne)&(heldFlag|asleepFlag) == 0 {
		return true
	}
	g.word.Add(^(movingOne - waitingOne - 1))
	return false
}

// end stores the transferred bytes before it reduces the count, so that a fence
// sees one or the other.
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

// setAsleep and setAwake each change both flags in one step.
func (g *gate) setAsleep() {
	for {
		w := g.word.Load()
		if g.word.CompareAndSwap(w, w&^heldFlag|asleepFlag) {
			return
		}
	}
}

func (g *gate) setAwake() { g.word.And(^(heldFlag | asleepFlag)) }
