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

	"lull/internal/daemon/host/hosttest"
)

// The orders of three actors are far too many to be walked one by one, and most
// of them meet in the same places. A place is the complete state of a world in
// which everybody stands at a point or is blocked: every field of the instance,
// of the simulated machine and of its relay that anything reads, the clock, and
// where everybody stands, with what they carry along. From equal places the same
// follows, so each is left once in every direction.
//
// What is left out is what nothing reads to decide: texts, events, counters for
// people, deadlines (nobody serves them here) and the record on the disk. What is
// left out by mistake shows: walks at random come to places that are not known,
// and the number of orders is not the one that walking each of them gives.
//
// Between two points more than one may run: who lets the lock go and who gets it.
// Once in some hundred thousand runs the machine decides there otherwise than
// before; such a run is made again.
type place [sha256.Size]byte

// routine is somebody who has been at a point and has not come to an end.
type routine struct {
	point   string
	calls   uint64 // the calls that led there
	own     func(b []byte, since time.Time) []byte
	carries []byte // what it remembers from before
	attempt *attempt
	resumed int    // when it was let go on from there; 0 while it stands there
	from    []byte // what it can have learned when it went on
}

// seats are where actors sit: who passes a point is told by the seat among the
// calls that led there.
var seats = [...]func(func()){func(f func()) { f() }, func(f func()) { f() }, func(f func()) { f() }, func(f func()) { f() }, func(f func()) { f() }}

// seatOf is the seat of a call.
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

// who is the calling goroutine, and calls stands for those that led here, apart
// from the seat.
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

// number is what the runtime calls the calling goroutine; slow.
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

// stand appends where somebody stands or what it was let go on from.
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

// state appends everything but where everybody stands.
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
	written := i.h.saver.written[i.id]
	ended := -1
	if e := i.ended.Load(); e != nil {
		ended = int(e.run)<<8 + e.exit.Code
	}
	b = hosttest.Append(b, len(i.lock), yes(i.wanted.Load() != nil), yes(i.observe.Load() != nil), ended,
		yes(i.up.Load()), yes(i.deleted.Load()), yes(i.interrupt.Load() != nil), int(i.h.illegal.Load()))
	b = hosttest.Append(b, yes(i.queued.Load()), yes(i.ending.Load()))
	o := i.h.room
	o.mu.Lock()
	b = hosttest.Append(b, len(o.queue), o.taken, len(o.given), o.given[i], yes(o.making))
	for _, q := range o.queue {
		b = hosttest.Append(b, yes(q.leave != nil), since(q.since), since(q.until))
	}
	o.mu.Unlock()
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
	if i.over != nil {
		select {
		case <-i.over:
			over = 1
		default:
			over = 0
		}
	}
	b = hosttest.Append(b, yes(i.work != nil), yes(i.guard != nil), yes(i.held != nil), yes(i.frozen), i.conns, yes(i.block != nil), len(i.beside), i.busy,
		since(i.nextDue), since(i.restart), since(i.notBefore), since(i.settles), yes(i.inside), over)
	for _, s := range []struct {
		at  time.Time
		cpu time.Duration
		net uint64
	}{{i.base.At, i.base.CPU, i.base.NetBytes}, {i.last.At, i.last.CPU, i.last.NetBytes}} {
		b = hosttest.Append(b, since(s.at), int(s.cpu), int(s.net))
	}
	for _, r := range i.readings {
		b = hosttest.Append(append(b, r.Signal...), int(r.State))
	}
	return b
}

// order sorts who stands at a point so that equal places offer the same choices
// in the same order. The caller holds mu.
func (w *world) order() int {
	for _, p := range w.parked {
		p.stand = p.r.stand(p.stand[:0], w.began)
	}
	slices.SortStableFunc(w.parked, func(a, b *parking) int { return bytes.Compare(a.stand, b.stand) })
	return len(w.parked)
}

// place is where the world is. The caller holds mu and has called order.
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
	slices.SortFunc(blocked, func(a, b *routine) int { return a.resumed - b.resumed }) // in that order they get the lock
	for _, r := range blocked {
		b = append(r.stand(b, w.began), 2)
	}
	w.buf = b
	return sha256.Sum256(b)
}

// space is the places of a scene that are known.
type space struct {
	known  map[place]*big.Int // how many orders lead on from there; nil while it is not known
	runs   int
	orders *big.Int // of the whole scene
}

// turning is a place on the way of the present run.
type turning struct {
	at      place
	choices []choice
	next    int
	orders  *big.Int
}

// choice is one of those who stand at a point, and how many stand there alike.
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

// explore leaves every place that can be reached once in every direction and
// stops at the first fault. where tells places apart.
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
				return s, "the same steps lead to other places", tr
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
				return s, "somebody can go round in circles", tr
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

// wander walks one order at random and says where it came to a place that is not
// known.
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
			continue // the same way once more
		}
		if lost {
			faults = append(faults, "it came to a place that nobody had found")
		}
		return strings.Join(faults, "; "), tr
	}
}
