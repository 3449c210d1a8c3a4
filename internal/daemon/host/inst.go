package host

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/evidence"
	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
	"lull/internal/power"
	"lull/internal/router"
)

// inst is one instance in memory.
type inst struct {
	h    *Host
	id   string
	set  atomic.Pointer[instance.Spec] // what a person asked for; Change puts another in its place
	rt   Runtime
	gate Gate  // nil when nothing relays to it
	size int64 // bytes that it may take, 0 where its runtime does not know; never changes
	slow bool  // booting and restoring it is; never changes

	// lock is held across one whole transition or one look. Everything that
	// changes the instance's power holds it.
	lock chan struct{}
	// wanted is why a wake was asked for while somebody else held the lock.
	// Whoever lets the lock go looks at it afterwards, so none is lost.
	wanted atomic.Pointer[string]
	// asked is since when somebody waits for it to run; nil when nobody does.
	asked atomic.Pointer[time.Time]
	// from is the state that the wake under way began in; the lock's holder has it.
	from power.Instance
	// again says that the stop under way is followed by a start; the lock's holder
	// has it.
	again bool
	// noHandoff is why its program cannot be handed sockets; nil when it can.
	noHandoff atomic.Pointer[string]
	// observe is why somebody wants the workload to be looked at, likewise.
	observe atomic.Pointer[string]
	// ended is the exit of the present run, noted before anybody has the lock.
	ended atomic.Pointer[ending]
	// reported is the exit that adoption falls back to; guarded by the instance's lock.
	reported *ending
	// up says that the application accepts: the relay reads it without a lock.
	up       atomic.Bool
	backends atomic.Pointer[[]router.Backend] // of the relayed endpoints, in order
	deleted  atomic.Bool
	// off is why a person wanted it not to run when they last stopped or removed
	// it: whatever was asked for before is not done after. Written under the room's
	// mu.
	off    atomic.Pointer[string]
	queued atomic.Bool // wakeLater is at it
	ending atomic.Bool // stopLater is at it
	lost   atomic.Bool // retryAdopt is at it
	// interrupt ends a start, or a repeated search for its run, that is under way.
	interrupt atomic.Pointer[context.CancelCauseFunc]

	dueAt    time.Time // owned by deadlines
	dueIndex int       // owned by deadlines

	// mu guards the rest. It is never held across anything that waits.
	mu       sync.Mutex
	rec      instance.Record
	work     Workload
	guard    Guard
	held     Guard // watches the kept sockets while stopped
	frozen   bool
	base     instance.Sample // the look that deltas are measured from
	last     instance.Sample // the newest look
	readings []idle.Reading
	conns    int
	verdict  idle.Verdict
	line     evidence.Line // of its decisions in the log
	unheard  bool          // nothing could wake it from outside
	block    *idle.Block   // of the runtime: it cannot be paused, and why
	beside   []*string     // commands that run beside it
	busy     int           // connections by which the workload says that it works
	nextDue  time.Time     // when the workload said that it wants to run again
	restart  time.Time     // when it is started again after it failed
	// refused is what was last told of as refused for want of room, and by whom.
	refused   string
	refusedAt time.Time
	// notBefore keeps a hibernation that failed from being tried again at once.
	notBefore time.Time
	missing   error         // why the run that its record speaks of is not known to this daemon
	trouble   string        // what keeps the workload from working, "" for nothing
	inside    bool          // a harness says that some program in it is in the middle of work
	settles   time.Time     // until then a pause from outside is what an earlier daemon had asked for
	over      chan struct{} // closed when the present run is known to be over
}

type ending struct {
	run  uint64
	exit instance.Exit
}

func newInst(h *Host, rec instance.Record, rt Runtime) *inst {
	spec := rec.Spec // a copy of its own: rec changes under mu
	i := &inst{h: h, id: rec.ID, rt: rt, rec: rec, lock: make(chan struct{}, 1), dueIndex: -1}
	i.set.Store(&spec)
	if s, ok := rt.(instance.Sizer); ok {
		i.size, i.slow = s.Size(&spec)
	}
	return i
}

func (i *inst) name() string { return i.spec().Name } // only RenamedOutside changes it

// spec is what a person asked for. Nobody changes what it returns.
func (i *inst) spec() *instance.Spec { return i.set.Load() }

// acquire takes the lock.
func (i *inst) acquire() { i.lock <- struct{}{} }

// acquireCtx takes the lock unless ctx ends first.
func (i *inst) acquireCtx(ctx context.Context) error {
	select {
	case i.lock <- struct{}{}:
		if i.deleted.Load() {
			<-i.lock
			return &NotFoundError{Name: i.name()}
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("cannot reach %s: another change of it is still under way: %w", i.name(), context.Cause(ctx))
	}
}

func (i *inst) tryAcquire() bool {
	select {
	case i.lock <- struct{}{}:
		return true
	default:
		return false
	}
}

// release lets the lock go and serves what came in the meantime. Looking after
// the release is what closes the gap: whoever sets wanted tries the lock
// afterwards, so one of the two sees the other.
func (i *inst) release() {
	for {
		<-i.lock
		if i.wanted.Load() == nil && i.observe.Load() == nil && !i.endedNow() {
			return
		}
		if !i.tryAcquire() {
			return // its new holder will look
		}
		i.serve()
	}
}

// endedNow says whether the present run is known to be over and not handled.
func (i *inst) endedNow() bool { return i.ended.Load() != nil }

// serve handles, under the lock, what others left for its holder.
func (i *inst) serve() {
	if e := i.ended.Swap(nil); e != nil {
		i.handleEnding(e)
	}
	if why := i.wanted.Swap(nil); why != nil {
		i.serveWake(*why)
	}
	if why := i.observe.Swap(nil); why != nil {
		i.serveObserve(*why)
	}
}

// wantWake asks for a wake from anywhere and never waits.
func (i *inst) wantWake(why string) {
	i.ask()
	i.wanted.Store(&why)
	i.h.point("wake-wanted", i)
	if i.tryAcquire() {
		if i.rt.Capabilities().Network {
			// Its thaw asks the guest and may restore it, which takes longer than
			// whoever calls can wait.
			i.h.spawn(func() { i.serve(); i.release() })
			return
		}
		i.serve()
		i.release()
	}
}

// serveWake wakes the instance under the lock if it is asleep. An instance
// that runs needs nothing, and one that may not be woken stays as it is.
func (i *inst) serveWake(why string) {
	switch s := i.state(); {
	case i.pausedByOthers():
		i.asked.Store(nil)
	case s.Asleep() && s != power.Paused && i.rationed():
		i.wakeLater(byConnection, why)
	case s.Asleep():
		i.wakeNow(byConnection, why)
	case s == power.Stopped && i.unwakeable() == "":
		i.h.spawn(func() {
			if err := i.h.startFor(i.h.ctx, i, byConnection, why); err != nil && !fromRoom(err) {
				i.h.log.Error("cannot start for a connection", "instance", i.name(), "error", err)
			}
		})
	default: // it runs, or may not be woken
		i.asked.Store(nil)
	}
}

func (i *inst) state() power.Instance {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.rec.State
}

func (i *inst) enabled() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.rec.Enabled
}

// update changes the record in memory and returns a copy to be written. f runs
// under mu and must not wait.
func (i *inst) update(f func(r *instance.Record)) instance.Record {
	i.mu.Lock()
	defer i.mu.Unlock()
	before := i.rec.State
	f(&i.rec)
	if i.rec.State != before {
		if err := power.InstanceTable.Check(before, i.rec.State); err != nil {
			i.h.illegal.Add(1)
			i.h.log.Error("illegal transition", "instance", i.name(), "error", err)
		}
		i.rec.StateSince, i.rec.Unserved = i.h.now(), ""
		i.h.room.kick()
	}
	i.rec.Generation++
	return i.rec
}

// save changes the record durably: what f did is undone if it cannot be
// written.
func (i *inst) save(f func(r *instance.Record)) error {
	i.mu.Lock()
	old := i.rec
	i.mu.Unlock()
	rec := i.update(f)
	if err := i.h.saver.now(&rec); err != nil {
		i.mu.Lock()
		i.rec = old
		i.mu.Unlock()
		return fmt.Errorf("cannot record %s: %w", i.name(), err)
	}
	return nil
}

// note changes the record whether or not it can be written. It is for facts, such
// as the end of a program, and for what a user asked for that must not depend on
// the disk. What cannot be written is tried again until it is.
func (i *inst) note(f func(r *instance.Record)) {
	rec := i.update(f)
	if i.h.saver.now(&rec) != nil {
		i.h.saver.later(i)
	}
}

// saveOrNote is note for what a user asked for, and save for what lull decided.
func (i *inst) saveOrNote(asked bool, f func(r *instance.Record)) error {
	if asked {
		i.note(f)
		return nil
	}
	return i.save(f)
}

// byIDNow returns an instance; nil for none.
func (h *Host) byIDNow(id string) *inst {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.byID[id]
}

// Has reports whether there is an instance of that id.
func (h *Host) Has(id string) bool { return h.byIDNow(id) != nil }

// DiskUnwritable is the block of everything automatic while records cannot be
// written.
const DiskUnwritable idle.Code = "disk_unwritable"

// unwritable says why no record can be written; "" while they can.
func (h *Host) unwritable() string {
	err := h.saver.failing()
	if err == nil {
		return ""
	}
	return fmt.Sprintf("the host cannot record what it does: %v", err)
}

// recordsFail reports that records cannot be written any more, or with nil that
// they can again.
func (h *Host) recordsFail(i *inst, began error) {
	kind, why := "trouble_over", "the host can record what it does again"
	if began != nil {
		kind, why = "trouble", "the host cannot record what it does: "+began.Error()
		h.log.Error("cannot write records; automatic actions wait", "error", began)
	} else {
		h.log.Info("records can be written again")
	}
	if i != nil {
		i.emit(kind, "", why)
	}
}

// move is a change of state that must be legal.
func (i *inst) move(to power.Instance) error {
	return power.InstanceTable.Check(i.state(), to)
}

func (i *inst) emit(kind, by, reason string) {
	i.mu.Lock()
	s := i.rec.State
	i.mu.Unlock()
	i.h.happened(hostctl.Event{Time: i.h.now(), Type: kind, Instance: i.name(), ID: i.id, State: string(s), By: by, Reason: reason})
}
