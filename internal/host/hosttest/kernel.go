// Package hosttest holds what tests of runtimes share: a conformance suite, and a
// simulated runtime. Its kernel models processes, backlogs, accepts and freezes, so
// that tests of whole days and of every interleaving can run in a synctest bubble.
//
// The simulated kernel records every violation of a rule: a program started
// twice, a duplicate held while its owner runs, a client left in a frozen
// program. It decides nothing and imitates no daemon.
package hosttest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// Kernel is a simulated machine. Its zero value is ready for use.
type Kernel struct {
	// At is called at named points of the kernel, unless it is nil. own appends the
	// data with which the goroutine at the point will continue (see State); it may
	// be nil.
	At func(point string, own func(b []byte, since time.Time) []byte)
	// Seen is called for each event in order, unless it is nil. client is the
	// number of the client concerned, or -1. Seen must not block.
	Seen func(event string, client int)
	// OnExit is called when a run has ended. While programs run, set it with
	// SetOnExit.
	OnExit func(id string, run uint64, e instance.Exit)
	// Stubborn makes programs ignore SIGTERM, so that only Kill ends them.
	Stubborn bool
	// Lingers is how long a program takes to exit after SIGTERM. Meanwhile it
	// serves nothing.
	Lingers time.Duration
	// Deep makes the programs guests, which have their own network and can be saved
	// to disk.
	Deep bool
	// Private makes programs listen at addresses that only they themselves can
	// reach.
	Private bool
	// Deaf makes programs never listen.
	Deaf bool
	// Remote hides the programs' clients from Sample, as a guest's network does.
	// Only the relay sees them.
	Remote bool
	// Remembers makes Sample report for a minute when a client last closed, as
	// sockets in TIME_WAIT do. Walks of the fence leave it off, because every
	// client that came and went would cancel a pause. Unseen returns what samples
	// of a running program do not show; it may be nil.
	Unseen func() *instance.Unseen

	Remembers bool
	// Restore is how long restoring a guest from disk takes.
	Restore time.Duration
	// Frees is how much of a guest's memory Reclaim frees, in bytes; 0 means half a
	// MiB.
	Frees int64

	mu     sync.Mutex
	fails  map[Fault]error
	timers func() (instance.Timers, error)
	// spoiled is the error with which the Thaw of a saved guest fails, or nil.
	spoiled  *instance.SnapshotError
	procs    map[string]*Proc
	kept     map[string]*kept
	clients  []*Client // in order of arrival; kept only if At is used
	arrivals int
	broken   []string
	starts   int
	restores int // number of restores in progress
	most     int // maximum of restores
}

// Client is a connection from outside.
type Client struct {
	k        *Kernel
	id       string
	n        int // number in the order of arrival
	accepted bool
	unread   bool
	closed   bool
	noticed  bool // the program has seen its close
	answered int
	owed     bool // the client sent last, and the program has not answered
	moved    time.Time
	local    bool // over a unix socket
	refused  bool
	reset    bool
	gate     *Gate // the relay through which it came, or nil
}

// Proc is one simulated run; it implements instance.Workload.
type Proc struct {
	k       *Kernel
	id      string
	memory  int64 // as in its launch
	freed   int64
	run     uint64
	frozen  bool
	dead    bool
	term    bool
	backlog []*Client
	open    []*Client
	guard   *guard
	cpu     time.Duration
	busy    bool      // uses CPU all the time
	starved bool      // waits for CPU time and gets none
	writes  bool      // writes to its disk all the time
	slow    bool      // reads requests and does not answer them
	asked   time.Time // when the outbound connections last carried bytes
	asks    int       // number of outbound connections that wait for an answer
	disk    uint64
	last    time.Time
	out     int
	saved   bool
	left    time.Time // when a TCP client last closed
}

var _ instance.Runtime = (*Kernel)(nil)
var _ instance.Workload = (*Proc)(nil)
var _ instance.Hibernator = (*Proc)(nil)

func (k *Kernel) point(name string) { k.pointWith(name, nil) }

func (k *Kernel) pointWith(name string, own func([]byte, time.Time) []byte) {
	if k.At != nil {
		k.At(name, own)
	}
}

// see reports an event. The lock under which the event happens must be held.
func (k *Kernel) see(event string, client int) {
	if k.Seen != nil {
		k.Seen(event, client)
	}
}

// breach records the violation of a rule.
func (k *Kernel) breach(format string, args ...any) {
	k.broken = append(k.broken, fmt.Sprintf(format, args...))
}

// Broken returns all violations so far, and the clients that are stuck.
func (k *Kernel) Broken() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := append([]string(nil), k.broken...)
	for id, p := range k.procs {
		if p.dead {
			continue
		}
		if p.frozen && len(p.backlog) > 0 {
			out = append(out, fmt.Sprintf("%s is frozen with %d clients in its backlog", id, len(p.backlog)))
		}
		for _, c := range p.open {
			if p.frozen && (c.unread || c.closed) {
				out = append(out, fmt.Sprintf("%s is frozen with unread bytes or a close of a client", id))
			}
		}
		if !p.frozen && p.guard != nil && !p.guard.closed {
			out = append(out, fmt.Sprintf("%s runs while duplicates of its sockets are held", id))
		}
	}
	return out
}

// Starts returns the number of programs started.
func (k *Kernel) Starts() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.starts
}

// Proc returns the current run of id, or nil.
func (k *Kernel) Proc(id string) *Proc {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.procs[id]; p != nil && !p.dead {
		return p
	}
	return nil
}

// Capabilities implements instance.Runtime.
func (k *Kernel) Capabilities() power.Capabilities {
	return power.Capabilities{WakeFromStopped: true, Freeze: true, WatchSockets: true, Reclaim: true, Hibernate: k.Deep, Network: k.Deep, Limits: k.Deep}
}

// Size implements instance.Sizer.
func (k *Kernel) Size(s *instance.Spec) (int64, bool) { return s.Memory, k.Deep }

// Clone implements instance.Cloner.
func (k *Kernel) Clone(_ context.Context, from string, l instance.Launch) (int64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.procs[from]
	switch {
	case p == nil || p.dead || !p.saved:
		return 0, errors.New("it is not hibernated")
	case len(p.open) > 0:
		return 0, errors.New("a copy would answer its clients too")
	}
	k.procs[l.ID] = &Proc{k: k, id: l.ID, run: l.Run, last: time.Now(), memory: p.memory, frozen: true, saved: true}
	return 1 << 10, nil
}

// Held returns the memory of all guests at present.
func (k *Kernel) Held() (n int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.procs {
		if !p.dead && !p.saved {
			n += p.memory - p.freed
		}
	}
	return n
}

// Restored returns the maximum number of guests that were restored concurrently.
func (k *Kernel) Restored() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.most
}

// Start implements instance.Runtime.
func (k *Kernel) Start(_ context.Context, l instance.Launch) (instance.Workload, error) {
	k.point("kernel-start")
	return k.start(l), nil
}

func (k *Kernel) start(l instance.Launch) *Proc {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.procs[l.ID]; p != nil && !p.dead {
		k.breach("%s was started twice", l.ID)
	}
	if k.procs == nil {
		k.procs = map[string]*Proc{}
	}
	p := &Proc{k: k, id: l.ID, run: l.Run, last: time.Now(), memory: l.Memory}
	k.procs[l.ID] = p
	k.starts++
	k.see("start", -1)
	if q := k.kept[l.ID]; q != nil && len(l.Handoff) > 0 {
		p.backlog, q.backlog = q.backlog, nil
		p.work()
	}
	return p
}

// Adopt implements instance.Runtime.
func (k *Kernel) Adopt(_ context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.fails[Adopting]; err != nil {
		return nil, err
	}
	p := k.procs[id]
	if p == nil || p.dead || p.run != ident.Run {
		return nil, &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true}}
	}
	if p.guard != nil { // the daemon that held the duplicates is dead
		p.guard.closed, p.guard = true, nil
	}
	return p, nil
}

// Identity implements instance.Workload.
func (p *Proc) Identity() instance.Identity {
	return instance.Identity{BootID: "sim", PID: 1000 + int(p.run), Start: p.run, Run: p.run}
}

// Freeze implements instance.Workload.
func (p *Proc) Freeze(context.Context) error {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	if p.dead {
		return errors.New("cannot freeze: no such process")
	}
	if err := p.k.fails[Freezing]; err != nil {
		return err
	}
	p.tick()
	if !p.frozen {
		p.k.see("freeze", -1)
	}
	p.frozen = true
	return nil
}

// Thaw implements instance.Workload. The program then handles what has arrived
// meanwhile: it accepts, reads, answers, or exits.
func (p *Proc) Thaw() error {
	p.k.mu.Lock()
	if p.dead {
		p.k.mu.Unlock()
		return nil
	}
	if p.guard != nil && !p.guard.closed {
		p.k.breach("%s was thawed while duplicates of its sockets were held", p.id)
	}
	if err := p.k.fails[Thawing]; err != nil {
		p.k.mu.Unlock()
		return err
	}
	if bad := p.k.spoiled; p.saved && bad != nil {
		p.k.mu.Unlock()
		return bad
	}
	if p.saved && p.k.Restore > 0 {
		p.k.restores++
		p.k.most = max(p.k.most, p.k.restores)
		p.k.mu.Unlock()
		time.Sleep(p.k.Restore)
		p.k.mu.Lock()
		p.k.restores--
	}
	p.saved, p.freed = false, 0
	if p.frozen {
		p.k.see("thaw", -1)
	}
	p.frozen, p.last = false, time.Now()
	if p.term && !p.k.Stubborn {
		p.terminate()
		return nil
	}
	p.work()
	p.k.mu.Unlock()
	return nil
}

// work does at once what a running program can do. k.mu must be held.
func (p *Proc) work() {
	if p.term && !p.k.Stubborn {
		return
	}
	for _, c := range p.backlog {
		c.accepted = true
		p.k.see("accepted", c.n)
		p.open = append(p.open, c)
	}
	p.backlog = nil
	kept := p.open[:0]
	for _, c := range p.open {
		if c.unread {
			c.unread = false
			p.k.see("answered", c.n)
			if c.owed = p.slow; !p.slow {
				c.answered++
			}
		}
		if c.closed && !c.noticed {
			p.k.see("closed", c.n)
		}
		if c.closed {
			p.k.see("gone", c.n)
		}
		switch {
		case !c.closed:
			kept = append(kept, c)
		case !c.local:
			p.left = time.Now()
		}
	}
	p.open = kept
}

// tick adds the CPU time and the disk writes of a busy program up to now. k.mu must
// be held.
func (p *Proc) tick() {
	now := time.Now()
	if p.busy && !p.frozen {
		p.cpu += now.Sub(p.last)
	}
	if p.writes && !p.frozen {
		p.disk += uint64(now.Sub(p.last).Seconds() * diskRate)
	}
	p.last = now
}

// SetOnExit replaces OnExit.
func (k *Kernel) SetOnExit(f func(id string, run uint64, e instance.Exit)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.OnExit = f
}

// exit ends the run. It releases k.mu, which must be held.
func (p *Proc) exit(code, signal int) {
	p.dead, p.frozen, p.saved = true, false, false
	p.k.see("exit", -1)
	q := p.k.kept[p.id]
	for _, c := range p.backlog {
		if q != nil && c.gate == nil {
			q.backlog = append(q.backlog, c)
		} else {
			c.reset = true
		}
	}
	for _, c := range p.open {
		c.reset = true
	}
	p.backlog, p.open = nil, nil
	f := p.k.OnExit
	p.k.mu.Unlock()
	if f != nil {
		f(p.id, p.run, instance.Exit{Code: code, Signal: signal, At: time.Now()})
	}
}

// terminate delivers SIGTERM to a running program. It releases k.mu, which must be
// held.
func (p *Proc) terminate() {
	if p.k.Lingers == 0 {
		p.exit(143, 15)
		return
	}
	time.AfterFunc(p.k.Lingers, func() {
		p.k.mu.Lock()
		if p.dead {
			p.k.mu.Unlock()
			return
		}
		p.exit(143, 15)
	})
	p.k.mu.Unlock()
}

// Exit makes the program exit by itself.
func (p *Proc) Exit(code int) {
	p.k.pointWith("program-exit", p.State)
	p.k.mu.Lock()
	if p.dead || p.frozen {
		p.k.mu.Unlock()
		return
	}
	p.exit(code, 0)
}

// SetTimers makes programs report the timers that t returns. t is called at each
// reading.
func (k *Kernel) SetTimers(t func() (instance.Timers, error)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.timers = t
}

// Timers implements instance.Scheduled.
func (p *Proc) Timers() (instance.Timers, error) {
	p.k.mu.Lock()
	t := p.k.timers
	p.k.mu.Unlock()
	if t == nil {
		return nil, nil
	}
	return t()
}

// SetBusy makes the program use a whole CPU, or stops that.
func (p *Proc) SetBusy(on bool) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	p.tick()
	p.busy = on
}

// diskRate is how much a writing program writes, in bytes per second: ten pages.
const diskRate = 40960

// SetWriting makes the program write to its disk without using CPU time, or stops
// that.
func (p *Proc) SetWriting(on bool) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	p.tick()
	p.writes = on
}

// SetOutbound sets the number of connections that the program itself has opened.
func (p *Proc) SetOutbound(n int) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	p.out, p.asked = n, time.Now()
}

// Frozen reports whether the program is frozen.
func (p *Proc) Frozen() bool {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return p.frozen
}

// Fault is an operation of a simulated machine that can be made to fail.
type Fault string

// The faults.
const (
	Freezing  Fault = "freeze"
	Thawing   Fault = "thaw"
	Saving    Fault = "save"
	Signals   Fault = "signal"
	Listening Fault = "listeners" // listening sockets cannot be read
	Stillness Fault = "still"     // whether the program is frozen cannot be read
	Adopting  Fault = "adopt"     // whether the run is alive cannot be determined
)

// Fail makes an operation fail with err; nil makes it succeed again.
func (k *Kernel) Fail(what Fault, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fails == nil {
		k.fails = map[Fault]error{}
	}
	k.fails[what] = err
}

// Spoil makes snapshots unusable with err; nil makes them usable again.
func (k *Kernel) Spoil(err *instance.SnapshotError) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.spoiled = err
}

// Hibernate implements instance.Hibernator.
func (p *Proc) Hibernate(context.Context) (int64, error) {
	p.k.point("kernel-save")
	return p.hibernate()
}

func (p *Proc) hibernate() (int64, error) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	switch {
	case p.dead:
		return 0, errors.New("cannot hibernate: no such process")
	case !p.frozen:
		p.k.breach("%s was saved while it runs", p.id)
	case p.k.fails[Saving] != nil:
		return 0, p.k.fails[Saving]
	}
	p.saved = true
	p.k.see("save", -1)
	return 1 << 20, nil
}

// Hibernated implements instance.Hibernator.
func (p *Proc) Hibernated() bool {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return p.saved
}

// Still implements instance.Workload.
func (p *Proc) Still() (bool, error) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return p.frozen, p.k.fails[Stillness]
}

// Exiting implements instance.Workload.
func (p *Proc) Exiting() (bool, error) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return p.frozen && p.term, p.k.fails[Stillness]
}

// Waiting returns the number of clients that the program has not answered yet.
func (p *Proc) Waiting() int {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	n := len(p.backlog)
	for _, c := range p.open {
		if c.unread {
			n++
		}
	}
	return n
}

// Open returns the number of accepted clients.
func (p *Proc) Open() int {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return len(p.open)
}

// Guarded reports whether duplicates of the program's sockets are watched.
func (p *Proc) Guarded() bool {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return p.guard != nil && !p.guard.closed
}

// Signal implements instance.Workload. Only SIGTERM has an effect.
func (p *Proc) Signal(s syscall.Signal) error {
	p.k.mu.Lock()
	if p.dead {
		p.k.mu.Unlock()
		return syscall.ESRCH
	}
	if err := p.k.fails[Signals]; err != nil {
		p.k.mu.Unlock()
		return err
	}
	if s == syscall.SIGTERM {
		p.k.see("term", -1)
		if p.term = true; !p.frozen && !p.k.Stubborn {
			p.terminate()
			return nil
		}
	}
	p.k.mu.Unlock()
	return nil
}

// Kill implements instance.Workload.
func (p *Proc) Kill(context.Context) error {
	p.k.mu.Lock()
	if p.dead {
		p.k.mu.Unlock()
		return nil
	}
	p.exit(137, 9)
	return nil
}

// Sample implements instance.Workload.
func (p *Proc) Sample([]instance.Endpoint) instance.Sample {
	p.k.point("sample")
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	p.tick()
	s := instance.Sample{At: time.Now(), CPU: p.cpu, DiskBytes: p.disk, Outbound: p.out, Listens: !p.k.Deep && !p.k.Deaf}
	if p.k.Remembers && !p.k.Remote && time.Since(p.left) < timeWait {
		s.LastClosed = p.left
	}
	if p.k.Unseen != nil && !p.frozen {
		s.Unseen = p.k.Unseen()
	}
	for _, c := range p.seen(p.backlog) {
		s.Inbound = append(s.Inbound, instance.Conn{Unread: unread(c), QuietFor: c.quietFor()})
	}
	for _, c := range p.seen(p.open) {
		turn := instance.TurnLocal
		if c.owed {
			turn = instance.TurnRemote
		}
		s.Inbound = append(s.Inbound, instance.Conn{Accepted: true, Unread: unread(c), QuietFor: c.quietFor(), Turn: turn})
	}
	for n := range max(p.out, p.asks) {
		turn := instance.TurnRemote
		if n < p.asks {
			turn = instance.TurnLocal
		}
		s.Calls = append(s.Calls, instance.Conn{Accepted: true, QuietFor: time.Since(p.asked), Turn: turn, Loopback: n >= p.out})
	}
	return s
}

// timeWait is how long a kernel remembers a closed connection.
const timeWait = time.Minute

// seen returns the clients that a sample shows.
func (p *Proc) seen(all []*Client) []*Client {
	if p.k.Remote {
		return nil
	}
	return all
}

// AtWork implements instance.Toiler.
func (p *Proc) AtWork() (bool, error) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	return (p.busy || p.starved) && !p.frozen, nil
}

// SetSlow makes the program read requests and answer them only after
// SetSlow(false).
func (p *Proc) SetSlow(on bool) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	if p.slow = on; on || p.frozen {
		return
	}
	for _, c := range p.open {
		if c.owed {
			c.owed, c.moved = false, time.Now()
			c.answered++
		}
	}
}

// SetAsking sets on how many outbound connections the program waits for an answer.
func (p *Proc) SetAsking(n int) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	p.asks, p.asked = n, time.Now()
}

// Starve makes the program wait for CPU time that it does not get.
func (p *Proc) Starve(on bool) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	p.starved = on
}

func unread(c *Client) uint32 {
	if c.unread {
		return 1
	}
	return 0
}

// Listeners implements instance.Workload.
func (p *Proc) Listeners() ([]instance.Listener, error) {
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	if err := p.k.fails[Listening]; err != nil {
		return nil, err
	}
	if p.k.Deaf {
		return nil, nil
	}
	return []instance.Listener{{Network: "tcp", Addr: "127.0.0.1:80", PID: 1, Watchable: true, Private: p.k.Private}}, nil
}

// Memory implements instance.Workload.
func (p *Proc) Memory() (int64, error) { return 1 << 20, nil }

// Reclaim implements instance.Workload.
func (p *Proc) Reclaim(context.Context) (int64, error) {
	if !p.Frozen() {
		return 0, errors.New("cannot reclaim a running program")
	}
	p.k.mu.Lock()
	defer p.k.mu.Unlock()
	p.freed = min(max(p.k.Frees, 1<<19), p.memory)
	return max(p.freed, 1<<19), nil
}
