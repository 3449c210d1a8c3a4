package host

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"math/big"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/host/hosttest"
)

// Three actors can pass their points in far too many orders to walk each one, but
// most orders pass through the same places. A place is the complete state of a
// world in which every goroutine is parked at a point or blocked: every field of
// the instance, of the simulated machine and of its relay that anything reads, the
// clock, and the position of each goroutine with its local data. Equal places have
// equal futures, so each place is left only once in every direction.
//
// Fields that no decision reads are left out: texts, events, counters for users,
// deadlines (none are served here) and the record on disk. If a field is left out
// by mistake, random walks reach unknown places, and the computed number of orders
// differs from that of walking each.
//
// Between two points more than one goroutine may run: the one that releases the
// lock, and the one that gets it. Once in some hundred thousand runs, the scheduler
// decides differently than before. Such a run is repeated. If it was the run that
// found a place, that place cannot be reached again; the place to which the same
// choices usually lead is explored instead.
type place [sha256.Size]byte

// routine is a goroutine that has reached a point and has not finished.
type routine struct {
	point   string
	calls   uint64 // identifies the calls that led to the point
	own     func(b []byte, since time.Time) []byte
	carries []byte // what it remembers of earlier steps
	attempt *attempt
	resumed int    // when it was resumed from the point; 0 while it is parked
	from    []byte // what it can have read when it was resumed
}

// seats are different functions that run the actors. By the seat in its call stack,
// a goroutine at a point is recognized as that actor's.
var seats = [...]func(func()){func(f func()) { f() }, func(f func()) { f() }, func(f func()) { f() }, func(f func()) { f() }, func(f func()) { f() }}

// seatOf maps the return address of a call to its seat.
var seatOf = sync.OnceValue(func() map[uintptr]uint64 {
	of := map[uintptr]uint64{}
	for n, sit := range seats {
		sit(func() {
			var pc [1]uintptr
			runtime.Callers(2, pc[:])
			of[pc[0]] = uint64(n + 1)
		})
	}
	return of
})

// who returns the ID of the calling goroutine, and a hash of the calls that led
// here, without the seat.
func who() (id, calls uint64) {
	var pcs [64]uintptr
	of := seatOf()
	calls = 14695981039346656037
	n := runtime.Callers(2, pcs[:])
	for d, pc := range pcs[:n] {
		if d > n-8 {
			if seat := of[pc]; seat > 0 {
				id = seat
				continue
			}
		}
		calls = (calls ^ uint64(pc)) * 1099511628211
	}
	if id == 0 {
		id = number()
	}
	return id, calls
}

// number returns the Go runtime's number of the calling goroutine. It is slow.
func number() (n uint64) {
	var buf [40]byte
	b := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	for _, c := range b {
		if c < '0' || c > '9' {
			break
		}
		n = n*10 + uint64(c-'0')
	}
	return n + uint64(len(seats))
}

// stand appends the position at which a goroutine is parked or from which it was
// resumed.
func (r *routine) stand(b []byte, since time.Time) []byte {
	b = append(b, r.point...)
	b = binary.LittleEndian.AppendUint64(append(b, 0), r.calls)
	if r.own != nil {
		b = r.own(b, since)
	}
	if a := r.attempt; a != nil {
		b = hosttest.Append(append(append(b, 1), a.by...), yes(a.force), yes(a.adopted), yes(a.guard != nil), yes(a.frozen), int(a.saved))
	}
	return append(append(append(b, 0), r.carries...), r.from...)
}

func yes(on bool) int {
	if on {
		return 1
	}
	return 0
}

// state appends the state of the world, except the positions of goroutines.
func (w *world) state(b []byte) []byte {
	since := func(t time.Time) int {
		if t.IsZero() {
			return -1
		}
		return int(t.Sub(w.began))
	}
	b = hosttest.Append(b, int(time.Since(w.began)), w.live, len(w.faults), yes(w.leased), yes(w.busied), yes(w.doomed))
	b = w.gate.State(w.k.State(b, w.began))
	i := w.i
	written := i.h.saver.Written(i.id)
	ended := -1
	if e := i.requests.ended.Load(); e != nil {
		ended = int(e.run)<<8 + e.exit.Code
	}
	b = hosttest.Append(b, len(i.lock), yes(i.requests.wanted.Load() != nil), yes(i.requests.observe.Load() != nil), ended,
		yes(i.ports.up.Load()), yes(i.requests.deleted.Load()), yes(i.requests.interrupt.Load() != nil), int(i.h.illegal.Load()))
	b = hosttest.Append(b, yes(i.loops.queued.Load()), yes(i.loops.ending.Load()))
	o := i.h.room.Snapshot()
	b = hosttest.Append(b, len(o.Waiting), o.Taken, len(o.Given), o.Given[i], yes(o.Making))
	for _, q := range o.Waiting {
		b = hosttest.Append(b, yes(q.Granted), since(q.Since), since(q.Until))
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	r := &i.rec
	b = append(append(append(b, r.State...), 0), r.PausedBy...)
	b = hosttest.Append(b, int(r.Generation-written), yes(r.Enabled), yes(r.CrashLooping), len(r.Crashes), len(r.Leases),
		since(r.LastActivityAt), since(r.LastPausedAt), since(r.LastResumedAt), since(r.StartedAt), since(r.SnoozedUntil), since(r.RestartAt),
		yes(r.Exit != nil), int(r.Freed), int(r.Saved))
	for _, l := range r.Leases {
		b = hosttest.Append(append(b, l.Holder...), since(l.ExpiresAt))
	}
	if r.Identity != nil {
		b = hosttest.Append(b, int(r.Identity.Run), r.Identity.PID)
	}
	over := -1
	if i.proc.over != nil {
		select {
		case <-i.proc.over:
			over = 1
		default:
			over = 0
		}
	}
	b = hosttest.Append(b, yes(i.proc.work != nil), yes(i.proc.guard != nil), yes(i.proc.held != nil), yes(i.proc.frozen), i.seen.conns, yes(i.seen.block != nil), len(i.says.beside), i.says.busy,
		since(i.says.wokenFor), since(i.rec.NextDue), since(i.rec.WakeAt), since(i.rec.TimersServed), since(i.retry.restart), since(i.retry.notBefore), since(i.proc.ownPauseUntil), yes(i.says.inside), over)
	seen := window{}
	if i.seen.window != nil {
		seen = *i.seen.window
	}
	for _, s := range []struct {
		at  time.Time
		cpu time.Duration
		net uint64
	}{{seen.base.At, seen.base.CPU, seen.base.NetBytes}, {seen.last.At, seen.last.CPU, seen.last.NetBytes}} {
		b = hosttest.Append(b, since(s.at), int(s.cpu), int(s.net))
	}
	for _, r := range i.seen.readings {
		b = hosttest.Append(append(b, r.Signal...), int(r.State))
	}
	return b
}

// order sorts the parked goroutines so that equal places offer the same choices in
// the same order, and returns their number. w.mu must be held.
func (w *world) order() int {
	for _, p := range w.parked {
		p.stand = p.r.stand(p.stand[:0], w.began)
	}
	slices.SortStableFunc(w.parked, func(a, b *parking) int { return bytes.Compare(a.stand, b.stand) })
	return len(w.parked)
}

// place returns the current place of the world. order must have been called, and
// w.mu must be held.
func (w *world) place() place {
	b := w.state(w.buf[:0])
	for _, p := range w.parked {
		b = append(append(b, p.stand...), 1)
	}
	var blocked []*routine
	for _, r := range w.routines {
		if r.resumed > 0 {
			blocked = append(blocked, r)
		}
	}
	slices.SortFunc(blocked, func(a, b *routine) int { return a.resumed - b.resumed }) // they will get the lock in this order
	for _, r := range blocked {
		b = append(r.stand(b, w.began), 2)
	}
	w.buf = b
	return sha256.Sum256(b)
}

// space holds the known places of a scene.
type space struct {
	known  map[place]*big.Int // number of orders from there to the end; nil while unknown
	runs   int
	left   int      // number of places that could not be reached again
	orders *big.Int // number of orders of the whole scene
}

// turning is a place on the path of the current run.
type turning struct {
	at      place
	choices []choice
	next    int
	orders  *big.Int
}

// choice is a parked goroutine, and the number of equivalent ones including itself.
type choice struct{ n, alike int }

func (w *world) choices() (out []choice) {
	for n, p := range w.parked {
		if n > 0 && bytes.Equal(p.stand, w.parked[n-1].stand) {
			out[len(out)-1].alike++
		} else {
			out = append(out, choice{n, 1})
		}
	}
	return out
}

// maxLeft limits the places of a scene that could not be reached again. One unusual
// decision of the scheduler can find as many as there are points after it.
const maxLeft = 100

// explore leaves every reachable place of a scene once in every direction, and
// stops at the first fault. where returns the place of a world.
func explore(steps *fence, sc scene, where func(*world) place) (s *space, fault, trace string) {
	s = &space{known: map[place]*big.Int{}}
	var way []turning
	again := 0
	for {
		d, strayed, before := 0, false, len(way)
		var met *place
		faults, tr := run(steps, sc, func(w *world) int {
			w.order()
			if d < len(way) {
				t := &way[d]
				if d++; d == len(way) {
					strayed = where(w) != t.at
				}
				w.here = t.at
				if n := t.choices[t.next].n; !strayed && n < len(w.parked) {
					return n
				}
				strayed = true
				return -1
			}
			w.here = where(w)
			if _, ok := s.known[w.here]; ok {
				met = &w.here
				return -1
			}
			s.known[w.here] = nil
			way = append(way, turning{at: w.here, choices: w.choices(), orders: new(big.Int)})
			d++
			return 0
		})
		if strayed {
			if way, again = way[:before], again+1; again > 20 {
				if s.left++; s.left > maxLeft {
					return s, "the same steps lead to other places", tr
				}
				delete(s.known, way[before-1].at)
				way, again = way[:before-1], 0
			}
			continue
		}
		s.runs++
		again = 0
		if len(faults) > 0 {
			return s, strings.Join(faults, "; "), tr
		}
		more := big.NewInt(1)
		if met != nil {
			if more = s.known[*met]; more == nil {
				return s, "an actor can loop forever", tr
			}
		}
		for {
			if len(way) == 0 {
				s.orders = more
				return s, "", ""
			}
			t := &way[len(way)-1]
			t.orders.Add(t.orders, new(big.Int).Mul(more, big.NewInt(int64(t.choices[t.next].alike))))
			if t.next++; t.next < len(t.choices) {
				break
			}
			more = t.orders
			s.known[t.at] = more
			way = way[:len(way)-1]
		}
	}
}

// wander walks one random order, and returns a fault if it reaches an unknown
// place.
func (s *space) wander(sc scene, pick func(n int) int) (fault, trace string) {
	var picks []int
	for again := 0; ; again++ {
		lost, d := false, 0
		faults, tr := run(nil, sc, func(w *world) int {
			n := w.order()
			w.here = w.place()
			if _, ok := s.known[w.here]; !ok {
				lost = true
			}
			if d == len(picks) {
				picks = append(picks, pick(n))
			}
			d++
			return min(picks[d-1], n-1)
		})
		if lost && again < 20 {
			continue // repeat this path
		}
		if lost {
			faults = append(faults, "it reached a state that no walk had found")
		}
		return strings.Join(faults, "; "), tr
	}
}
