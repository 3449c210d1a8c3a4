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

// inst is an instance in memory. Its fields are grouped by what guards them.
type inst struct {
	h     *Host
	id    string
	set   atomic.Pointer[instance.Spec] // the user's settings, which Change replaces
	rt    Runtime
	gate  Gate                    // nil if it needs no relay
	size  int64                   // maximum memory in bytes, 0 if its runtime does not know; never changes
	slow  bool                    // booting and restoring it is slow; never changes
	guest bool                    // a thaw of it may take long; never changes
	due   *deadlines.Entry[*inst] // when it is next checked; never changes

	requests requests
	loops    loops
	ports    ports

	// lock is held across a whole transition or check. The power state may be
	// changed only while it is held.
	lock chan struct{}
	turn turn
	// stir wakes up the holder of the lock while it waits for the disk. Its
	// capacity is one.
	stir chan struct{}

	// mu guards the remaining fields. It must not be held across anything that
	// blocks.
	mu     sync.Mutex
	rec    instance.Record
	proc   proc
	seen   seen
	custom custom
	says   says
	timed  timed
	retry  retry
}

// requests are left for the holder of the lock. They need no lock.
type requests struct {
	// wanted is the reason for a wake that was requested while the lock was taken.
	// It is checked after each release of the lock, so no request is lost.
	wanted atomic.Pointer[string]
	// asked is the time since when a caller waits for the instance to run, or nil.
	asked atomic.Pointer[time.Time]
	// observe is the reason for a requested observation. It is handled like wanted.
	observe atomic.Pointer[string]
	// ended is the exit of the current run. It is set before the lock is taken.
	ended atomic.Pointer[ending]
	// interrupt cancels a start, or a repeated search for a run, in progress.
	interrupt atomic.Pointer[context.CancelCauseFunc]
	// off is why a user last stopped or removed the instance. Requests made before
	// that are not carried out afterwards. It is written under the lock of the
	// room.
	off     atomic.Pointer[string]
	deleted atomic.Bool
	// found is set when the next start only attaches to something that already
	// runs. If that has ended meanwhile, it is not started.
	found atomic.Bool
}

// loops are set while a background goroutine for the instance runs, so that there
// is only one of each kind. They need no lock.
type loops struct {
	queued   atomic.Bool // wakeLater
	awaiting atomic.Bool // wakeAfterDependencies
	ending   atomic.Bool // stopLater
	lost     atomic.Bool // retryAdopt
	holding  atomic.Bool // holdAtRest
}

// ports is how clients reach the program. No lock guards it, because the relay
// reads it for each connection.
type ports struct {
	up        atomic.Bool                     // the application accepts connections
	backends  atomic.Pointer[[]relay.Backend] // backends of the relayed endpoints, in order
	kept      atomic.Bool                     // sockets are kept for the program, of its last launch or of a unit
	noHandoff atomic.Pointer[string]          // why sockets cannot be handed to the program; nil if they can
}

// turn holds data that one transition passes between its steps. Guarded by the
// instance's lock.
type turn struct {
	from     power.Instance // the state in which the current wake began
	again    bool           // the current stop is followed by a start
	early    int            // steps of the current wake that thawFirst has executed
	reported *ending        // the exit that adoption reports if it finds no other
}

// proc is the current run. Guarded by mu.
type proc struct {
	work          Workload
	guard         Guard
	held          Guard // watches the kept sockets while the instance is stopped
	frozen        bool
	thawing       bool          // a client's wake has begun, and may not be recorded yet
	over          chan struct{} // closed when the run is known to be over
	missing       error         // why the run named by the record has not been adopted
	ownPauseUntil time.Time     // a first pause from outside before this time is one that lull requested
}

// seen holds the results of the last checks. Guarded by mu.
type seen struct {
	window   *window // of the run; nil before its first sample and while it sleeps
	readings []idle.Reading
	conns    int
	unseen   time.Time   // a connection may have come and gone unseen before this time; a pause requires to find out
	unheard  bool        // nothing outside could wake the instance
	due      time.Time   // when the workload next has to run, as it reports; zero for never
	dueBy    string      // what reports due
	needed   *idle.Block // because a dependent is awake
	grouped  *idle.Block // because another member of its group is in use
	block    *idle.Block // why it cannot be paused, from the runtime
	trouble  string      // why the workload cannot work, or ""
	verdict  idle.Verdict
	line     evidence.Line // line of the instance's decisions in the log
}

// window is the time that the next verdict is about.
type window struct {
	base instance.Sample // the sample that deltas are measured from
	last instance.Sample // the newest sample
}

// windowLocked returns the window, a new one if there is none. mu is held.
func (s *seen) windowLocked() *window {
	if s.window == nil {
		s.window = new(window)
	}
	return s.window
}

// says holds what programs report about themselves, and the commands that run
// inside. Guarded by mu.
type says struct {
	beside   []*string // commands that run inside it
	busy     int       // number of connections on which the workload reports work in progress
	inside   bool      // the guest agent reports that a program in the guest has work in progress
	wokenFor time.Time // the last timer for which it was woken
}

// retry holds the times of the next attempts. Guarded by mu.
type retry struct {
	restart   time.Time // when it is restarted after a failure
	notBefore time.Time // when it may be hibernated again after a failure
	// refused is the last refusal by admission that was published (operation and
	// requester), and refusedAt its time.
	refused   string
	refusedAt time.Time
}

type ending struct {
	run  uint64
	exit instance.Exit
}

func newInst(h *Host, rec instance.Record, rt Runtime) *inst {
	spec := rec.Spec // a separate copy, because rec changes under mu
	i := &inst{h: h, id: rec.ID, rt: rt, rec: rec, lock: make(chan struct{}, 1), stir: make(chan struct{}, 1)}
	i.due = deadlines.NewEntry(i)
	i.guest = rt.Capabilities().Network
	i.set.Store(&spec)
	if s, ok := rt.(instance.Sizer); ok {
		i.size, i.slow = s.Size(&spec)
	}
	return i
}

func (i *inst) name() string { return i.spec().Name } // only rename changes it

// spec returns the user's settings. The result must not be modified.
func (i *inst) spec() *instance.Spec { return i.set.Load() }

// stirNow makes the holder of the lock check for requests, if it is waiting for the
// disk with the workload frozen.
func (i *inst) stirNow() {
	select {
	case i.stir <- struct{}{}:
	default: // the last signal has not been received yet
	}
}

// acquire takes the lock.
func (i *inst) acquire() { i.lock <- struct{}{} }

// acquireCtx takes the lock. It returns ctx's error if ctx ends first.
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

// release releases the lock and serves the requests that arrived meanwhile. It
// checks for requests after the release. Every requester sets wanted and then tries
// the lock, so either the requester gets the lock or this check sees the request.
func (i *inst) release() {
	for {
		<-i.lock
		if i.requests.wanted.Load() == nil && i.requests.observe.Load() == nil && !i.endedNow() {
			return
		}
		if !i.tryAcquire() {
			return // the new holder will check
		}
		i.serve()
	}
}

// endedNow reports whether the current run has ended and its exit has not been
// handled yet.
func (i *inst) endedNow() bool { return i.requests.ended.Load() != nil }

// serve handles the requests that were left for the holder of the lock.
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

// update changes the record in memory and returns a copy of it for writing. f runs
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

// save changes the record durably. If the record cannot be written, save undoes the
// change and returns an error.
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

// note changes the record even if it cannot be written. It is for facts, such as a
// program's exit, and for user requests, which must not depend on the disk. A
// failed write is retried until it succeeds.
func (i *inst) note(f func(r *instance.Record)) {
	rec := i.update(f)
	if i.h.saver.Write(i, &rec) != nil {
		i.h.saver.WriteLater(i, i.id)
	}
}

// saveOrNote is note if asked is set, for a user's request, and otherwise save, for
// lull's own decision.
func (i *inst) saveOrNote(asked bool, f func(r *instance.Record)) error {
	if asked {
		i.note(f)
		return nil
	}
	return i.save(f)
}

// byIDNow returns the instance with an ID, or nil.
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

// Record returns a copy of the current record.
func (i *inst) Record() instance.Record {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.rec
}

// Removed reports whether the instance has been removed.
func (i *inst) Removed() bool { return i.requests.deleted.Load() }

// MarkRemoved ends all writing of the instance's record.
func (i *inst) MarkRemoved() { i.requests.deleted.Store(true) }

// Has reports whether there is an instance with this ID.
func (h *Host) Has(id string) bool { return h.byIDNow(id) != nil }

// DiskUnwritable is the code of the block on every automatic action while
// records cannot be written.
const DiskUnwritable idle.Code = "disk_unwritable"

// unwritable returns why records cannot be written, or "".
func (h *Host) unwritable() string {
	err := h.saver.Failing()
	if err == nil {
		return ""
	}
	return fmt.Sprintf("the host cannot write records: %v", err)
}

// recordsFail publishes that records can no longer be written or, if began is nil,
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

// move changes the power state. The transition must be legal.
func (i *inst) move(to power.Instance) error {
	return power.InstanceTable.Check(i.state(), to)
}

func (i *inst) emit(kind, by, reason string) {
	i.mu.Lock()
	s := i.rec.State
	i.mu.Unlock()
	i.h.happened(hostctl.Event{Time: i.h.Now(), Type: kind, Instance: i.name(), ID: i.id, State: string(s), By: by, Reason: reason})
}
