package host

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/deadlines"
	"lull/internal/host/records"
	"lull/internal/protocol/hostctl"
	"lull/internal/relay"
)

// inst is one instance in memory. Its fields are grouped by what guards them.
type inst struct {
	h    *Host
	id   string
	set  atomic.Pointer[instance.Spec] // the user's settings; Change replaces it
	rt   Runtime
	gate Gate                    // nil if it has no relay
	size int64                   // maximum memory in bytes, 0 if its runtime does not know; constant
	slow bool                    // booting and restoring it is slow; constant
	due  *deadlines.Entry[*inst] // when it is checked next; constant

	requests requests
	loops    loops
	ports    ports

	// lock is held across one whole transition or check. Every change of the
	// instance's power state requires it.
	lock chan struct{}
	turn turn
	// stir wakes the holder of the lock while it waits for the disk. It has room
	// for one.
	stir chan struct{}

	// mu guards the rest. It is never held across anything that blocks.
	mu     sync.Mutex
	rec    instance.Record
	proc   proc
	seen   seen
	custom custom
	says   says
	timed  timed
	retry  retry
}

// requests are left for the holder of the lock. No lock guards them.
type requests struct {
	// wanted is the reason for a wake that was requested while the lock was
	// taken. It is checked after each release of the lock, so no request is
	// lost.
	wanted atomic.Pointer[string]
	// asked is since when a caller has been waiting for the instance to run; nil
	// if none waits.
	asked atomic.Pointer[time.Time]
	// observe is the reason for a requested observation, handled like wanted.
	observe atomic.Pointer[string]
	// ended is the exit of the present run, set before the lock is taken.
	ended atomic.Pointer[ending]
	// interrupt cancels a start, or a repeated search for its run, that is in
	// progress.
	interrupt atomic.Pointer[context.CancelCauseFunc]
	// off is why a user last stopped or removed it. Requests made before that
	// are not carried out after it. Written under the lock of the room.
	off     atomic.Pointer[string]
	deleted atomic.Bool
	// found is set when what the next start attaches to runs already. If it has
	// ended meanwhile, it is not started.
	found atomic.Bool
}

// loops are set while a goroutine that retries something for the instance runs.
// No lock guards them.
type loops struct {
	queued   atomic.Bool // wakeLater
	awaiting atomic.Bool // wakeAfterDependencies
	ending   atomic.Bool // stopLater
	lost     atomic.Bool // retryAdopt
	holding  atomic.Bool // holdAtRest
}

// ports is how clients reach the program. No lock guards it: the relay reads it
// for each connection.
type ports struct {
	up        atomic.Bool                     // the application accepts
	backends  atomic.Pointer[[]relay.Backend] // of the relayed endpoints, in order
	kept      atomic.Bool                     // the sockets of the last launch, or of a unit, are kept for its program
	noHandoff atomic.Pointer[string]          // why its program cannot be given sockets; nil when it can
}

// turn has the data that one transition passes to its steps. Guarded by the
// instance's lock.
type turn struct {
	from     power.Instance // the state in which the current wake began
	again    bool           // a start follows the current stop
	reported *ending        // the exit that adoption falls back to
}

// proc is the present run. Guarded by mu.
type proc struct {
	work          Workload
	guard         Guard
	held          Guard // watches the kept sockets while stopped
	frozen        bool
	over          chan struct{} // closed when the run is known to be over
	missing       error         // why this daemon does not know the run that the record names
	ownPauseUntil time.Time     // until then, the first pause from outside is one that lull requested
}

// seen has the results of the last checks. Guarded by mu.
type seen struct {
	base     instance.Sample // the sample that deltas are measured from
	last     instance.Sample // the newest sample
	readings []idle.Reading
	conns    int
	unseen   time.Time   // until when a connection may have come and gone between samples, which is found out before a pause
	unheard  bool        // nothing outside could wake it
	due      time.Time   // when the workload next has to run, as it reports; zero for never
	dueBy    string      // what says so
	needed   *idle.Block // by one that depends on it
	grouped  *idle.Block // by a member of its group that is in use
	block    *idle.Block // from the runtime: why it cannot be paused
	trouble  string      // why the workload cannot work; "" if it can
	verdict  idle.Verdict
	line     evidence.Line // its decisions in the log
}

// says holds what programs report about themselves, and the commands that run
// inside. Guarded by mu.
type says struct {
	beside   []*string // commands that run inside it
	busy     int       // connections on which the workload reports work in progress
	inside   bool      // the guest agent reports that some program in it has work in progress
	wokenFor time.Time // the last timer that it was woken for
}

// retry holds the times of next attempts. Guarded by mu.
type retry struct {
	restart   time.Time // when it is restarted after a failure
	notBefore time.Time // the next attempt after a failed hibernation
	// refused is the last published refusal by admission, and its requester.
	refused   string
	refusedAt time.Time
}

type ending struct {
	run  uint64
	exit instance.Exit
}

func newInst(h *Host, rec instance.Record, rt Runtime) *inst {
	spec := rec.Spec // a separate copy: rec changes under mu
	i := &inst{h: h, id: rec.ID, rt: rt, rec: rec, lock: make(chan struct{}, 1), stir: make(chan struct{}, 1)}
	i.due = deadlines.NewEntry(i)
	i.set.Store(&spec)
	if s, ok := rt.(instance.Sizer); ok {
		i.size, i.slow = s.Size(&spec)
	}
	return i
}

func (i *inst) name() string { return i.spec().Name } // only rename changes it

// spec returns the user's settings. The result must not be modified.
func (i *inst) spec() *instance.Spec { return i.set.Load() }

// stirNow has the holder of the lock check for requests, if it waits for the
// disk while the instance is frozen.
func (i *inst) stirNow() {
	select {
	case i.stir <- struct{}{}:
	default: // it has not seen the last one yet
	}
}

// acquire takes the lock.
func (i *inst) acquire() { i.lock <- struct{}{} }

// acquireCtx takes the lock unless ctx ends first.
func (i *inst) acquireCtx(ctx context.Context) error {
	select {
	case i.lock <- struct{}{}:
		if i.requests.deleted.Load() {
			<-i.lock
			return &NotFoundError{Name: i.name()}
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("instance %s is busy: another operation is in progress: %w", i.name(), context.Cause(ctx))
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

// release releases the lock and serves requests that arrived in the meantime.
// The check after the release closes the gap: every requester sets wanted and
// then tries the lock, so one of the two sees the other.
func (i *inst) release() {
	for {
		<-i.lock
		if i.requests.wanted.Load() == nil && i.requests.observe.Load() == nil && !i.endedNow() {
			return
		}
		if !i.tryAcquire() {
			return // its new holder will check
		}
		i.serve()
	}
}

// endedNow reports whether the present run has ended and the exit is not yet
// handled.
func (i *inst) endedNow() bool { return i.requests.ended.Load() != nil }

// serve handles requests that were left for the holder of the lock.
func (i *inst) serve() {
	if e := i.requests.ended.Swap(nil); e != nil {
		i.handleEnding(e)
	}
	if why := i.requests.wanted.Swap(nil); why != nil {
		i.serveWake(*why)
	}
	if why := i.requests.observe.Swap(nil); why != nil {
		i.serveObserve(*why)
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
// under mu and must not block.
func (i *inst) update(f func(r *instance.Record)) instance.Record {
	i.mu.Lock()
	defer i.mu.Unlock()
	before := i.rec.State
	f(&i.rec)
	if i.rec.State != before {
		if err := power.InstanceTable.Check(before, i.rec.State); err != nil {
			i.h.illegal.Add(1)
			i.h.log.Error("illegal transition", "instance", i.name(), "err", err)
		}
		i.rec.StateSince, i.rec.Unserved = i.h.Now(), ""
		i.h.room.Kick()
	}
	i.rec.Generation++
	return i.rec
}

// save changes the record durably. If it cannot be written, the change made by
// f is undone.
func (i *inst) save(f func(r *instance.Record)) error {
	i.mu.Lock()
	old := i.rec
	i.mu.Unlock()
	rec := i.update(f)
	if err := i.h.saver.Write(i, &rec); err != nil {
		i.mu.Lock()
		i.rec = old
		i.mu.Unlock()
		return fmt.Errorf("cannot record %s: %w", i.name(), err)
	}
	return nil
}

// note changes the record whether or not it can be written. It is for facts,
// such as the exit of a program, and for user requests that must not depend on
// the disk. A failed write is retried until it succeeds.
func (i *inst) note(f func(r *instance.Record)) {
	rec := i.update(f)
	if i.h.saver.Write(i, &rec) != nil {
		i.h.saver.WriteLater(i, i.id)
	}
}

// saveOrNote is note for a user's request and save for lull's own decision.
func (i *inst) saveOrNote(asked bool, f func(r *instance.Record)) error {
	if asked {
		i.note(f)
		return nil
	}
	return i.save(f)
}

// byIDNow returns an instance; nil if there is none.
func (h *Host) byIDNow(id string) *inst {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.byID[id]
}

// owner is byIDNow for the saver of records.
func (h *Host) owner(id string) records.Owner {
	if i := h.byIDNow(id); i != nil {
		return i
	}
	return nil
}

// Record returns the present record.
func (i *inst) Record() instance.Record {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.rec
}

// Removed reports whether the instance was removed.
func (i *inst) Removed() bool { return i.requests.deleted.Load() }

// MarkRemoved ends the writing of records of the instance.
func (i *inst) MarkRemoved() { i.requests.deleted.Store(true) }

// Has reports whether there is an instance of that id.
func (h *Host) Has(id string) bool { return h.byIDNow(id) != nil }

// DiskUnwritable is the code of the block on every automatic action while
// records cannot be written.
const DiskUnwritable idle.Code = "disk_unwritable"

// unwritable returns why no record can be written; "" while they can.
func (h *Host) unwritable() string {
	err := h.saver.Failing()
	if err == nil {
		return ""
	}
	return fmt.Sprintf("the host cannot write records: %v", err)
}

// recordsFail publishes that records can no longer be written or, with nil,
// that they can again. id is the instance whose record was being written.
func (h *Host) recordsFail(id string, began error) {
	kind, why := "trouble_over", "the host can write records again"
	if began != nil {
		kind, why = "trouble", "the host cannot write records: "+began.Error()
		h.log.Error("cannot write records; automatic actions wait", "err", began)
	} else {
		h.log.Info("records can be written again")
	}
	if i := h.byIDNow(id); i != nil {
		i.emit(kind, "", why)
	}
}

// move changes the state. The transition must be legal.
func (i *inst) move(to power.Instance) error {
	return power.InstanceTable.Check(i.state(), to)
}

func (i *inst) emit(kind, by, reason string) {
	i.mu.Lock()
	s := i.rec.State
	i.mu.Unlock()
	i.h.happened(hostctl.Event{Time: i.h.Now(), Type: kind, Instance: i.name(), ID: i.id, State: string(s), By: by, Reason: reason})
}
