package host

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"runtime"
	"slices"
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
// people, deadlines (nobody serves them here) and the record on the disk. What
// was left out by mistake shows when one place is left in the same direction
// twice and leads to different ones: TestFencePlaces walks at random and looks
// for it.
type place [sha256.Size]byte

// routine is somebody who has been at a point and has not come to an end.
type routine struct {
	point   string
	calls   uint64 // the calls that led there
	own     func(b []byte, since time.Time) []byte
	resumed int    // when it was let go on from there; 0 while it stands there
	from    []byte // what it knew when it went on
}

// self is the number of the calling goroutine.
func self() uint64 {
	var buf [40]byte
	b := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	var n uint64
	for _, c := range b {
		if c < '0' || c > '9' {
			break
		}
		n = n*10 + uint64(c-'0')
	}
	return n
}

// calls stands for the calls that led here.
func calls() (h uint64) {
	var pcs [48]uintptr
	h = 14695981039346656037
	for _, pc := range pcs[:runtime.Callers(3, pcs[:])] {
		h = (h ^ uint64(pc)) * 1099511628211
	}
	return h
}

// stand appends where somebody stands or what it was let go on from.
func (r *routine) stand(b []byte, since time.Time) []byte {
	b = append(b, r.point...)
	b = binary.LittleEndian.AppendUint64(append(b, 0), r.calls)
	if r.own != nil {
		b = r.own(b, since)
	}
	return append(b, r.from...)
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
	for _, c := range w.clients {
		b = c.State(b, w.began)
	}
	b = w.gate.State(w.k.State(b, w.began))
	i := w.i
	written := i.h.saver.written[i.id]
	b = hosttest.Append(b, len(i.lock), yes(i.wanted.Load() != nil), yes(i.observe.Load() != nil), yes(i.ended.Load() != nil),
		yes(i.up.Load()), yes(i.deleted.Load()), yes(i.interrupt.Load() != nil), int(i.h.illegal.Load()))
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
	b = hosttest.Append(b, yes(i.work != nil), yes(i.guard != nil), yes(i.held != nil), yes(i.frozen), i.conns, yes(i.block != nil), i.execs, i.busy,
		since(i.nextDue), since(i.restart), since(i.notBefore), since(i.settles), yes(i.inside), yes(i.changed != nil), over)
	for _, s := range []struct {
		at  time.Time
		cpu time.Duration
		net uint64
	}{{i.base.At, i.base.CPU, i.base.NetBytes}, {i.last.At, i.last.CPU, i.last.NetBytes}} {
		b = hosttest.Append(b, since(s.at), int(s.cpu), int(s.net))
	}
	for _, r := range i.readings {
		b = append(append(b, r.Signal...), r.State...)
	}
	if a := w.attempt; a != nil && len(i.lock) > 0 {
		b = hosttest.Append(append(b, a.by...), yes(a.force), yes(a.adopted), yes(a.guard != nil), yes(a.frozen), int(a.saved))
	}
	return b
}

// place sorts who stands at a point so that equal places offer the same choices
// in the same order, and gives their number with the place. The caller holds mu.
func (w *world) place() place {
	for _, p := range w.parked {
		p.stand = p.r.stand(p.stand[:0], w.began)
	}
	slices.SortStableFunc(w.parked, func(a, b *parking) int { return bytes.Compare(a.stand, b.stand) })
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
	slices.SortFunc(blocked, func(a, b *routine) int { return a.resumed - b.resumed }) // that is the order in which they get the lock
	for _, r := range blocked {
		b = append(r.stand(b, w.began), 2)
	}
	w.buf = b
	return sha256.Sum256(b)
}
