package microvm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"lull/internal/core/instance"
	"lull/internal/platform/proc"
	"lull/internal/protocol/guest"
	"lull/internal/runtime/microvm/share"
	"lull/internal/runtime/microvm/vnet"
)

// Limits for calls to a guest or to QEMU.
const (
	callLimit  = 30 * time.Second
	clockSlack = 5 * time.Millisecond // tolerated clock error
	stillLimit = 5 * time.Second      // for QEMU to stop a guest
	offLimit   = 10 * time.Second     // for a guest to power off
	syncLimit  = 5 * time.Second      // for a guest to flush its files before a pause
	writeLimit = time.Minute          // for a guest to flush its files after its program has ended
	killLimit  = 10 * time.Second
	maxExec    = 24 * time.Hour
)

// Work is one run: a QEMU and its guest. It implements instance.Workload.
type Work struct {
	r     *Runtime
	id    string
	ident instance.Identity
	log   *logFile
	net   *vnet.Network
	rec   runRecord

	ctx    context.Context // ends when this daemon releases the guest, or the run is over
	cancel context.CancelFunc
	done   chan struct{} // closed once the run has been cleaned up

	qemu      // the present QEMU, under the host's lock of the instance
	channel   // messages to and from the guest agent, safe for concurrent use
	sharedDir // constant after the start
	ending    // guarded by its endMu
	console   // guarded by its consoleMu

	mu    sync.Mutex
	state // guarded by mu
}

// qemu is one QEMU process of a run. Hibernation ends it, and a wake starts
// another. The fields change only while the guest is frozen, under the host's lock
// of the instance.
type qemu struct {
	proc     process
	qctx     context.Context // canceled when this QEMU ends, or when this daemon releases it
	qcancel  context.CancelFunc
	loops    sync.WaitGroup
	ports    *portGate
	gone     chan struct{} // closed when this QEMU has ended
	tookOver bool          // started by an earlier daemon
	over     chan struct{} // closed when supervise has ended
	cleanup  sync.Once
	silent   atomic.Bool // do not report the end, because the caller already gets it as an error
	halted   chan string // receives QEMU's reason when the machine stops without a request
}

// channel is the state of the communication with the guest agent.
type channel struct {
	commands        sync.Map            // running commands by their number: uint64 -> *attached
	asks            chan struct{}       // slots for messages in progress
	note            chan guest.ExitNote // the workload ended
	firstAnswer     chan struct{}       // closed when the guest answered for the first time
	firstAnswerOnce *sync.Once
	clockLate       atomic.Bool             // the guest may have received the time late
	waking          atomic.Bool             // the guest is being restored; setClock sends hello on its next channel
	hello           chan *guest.HelloAnswer // from setClock; nil from a guest agent that does not answer hello with the clock call
	awaiting        atomic.Bool             // awaitSpace is running
	noSpaceCall     atomic.Bool             // the guest agent does not support the space call
	slow            *rate.Limiter           // rate limit for everything the guest sends
}

// sharedDir is the directory that the guest shares with the host.
type sharedDir struct {
	files    *share.Server // nil for none
	filesAt  string        // mount point in the guest
	filesFor string        // owner in the guest, as in guest.RunCall
	shared   chan error    // result of the first mount
}

// ending tells the end of a run from that of a QEMU whose guest was hibernated.
// endMu is held while the files on disk and state.saved change together.
type ending struct {
	endMu sync.Mutex
	ended bool // supervise has found the run to be over
}

// console is the ring of the guest's console. consoleMu is held while the ring
// is read, because reading empties it.
type console struct {
	consoleMu   sync.Mutex
	printedLast []byte // the end of the ring's content when it was last read
}

// state is guarded by Work.mu.
type state struct {
	mon           *monitor
	peer          *guest.Peer // on the serial port
	fast          *vsockPeer  // preferred over peer; nil for none
	frozen        bool
	leftFrozen    bool       // frozen by an earlier daemon, and not thawed since
	saved         bool       // hibernated, without a QEMU
	io            proc.Tally // disk traffic
	lastIO        qemuIO
	flushedBytes  uint64 // bytes written because of Flush
	last          guest.HealthAnswer
	lastAt        time.Time // zero: no reading yet
	lastHealthErr error
	consoleTail   string // console output of a machine that ended by itself
	complaint     string // QEMU's output, kept after the run's files are removed
	exit          *instance.Exit
	signals       []syscall.Signal // to be delivered once a hibernated guest is restored
	status        syscall.WaitStatus
	exited        bool   // status is valid
	poweredOffBy  string // why the machine powered off by itself, otherwise ""
	unresponsive  unresponsive
	outOfSpace    bool  // stopped for lack of space (full.go)
	reportedSpace int64 // free space last reported to the guest
}

var (
	_ instance.Workload   = (*Work)(nil)
	_ instance.Dialer     = (*Work)(nil)
	_ instance.Hibernator = (*Work)(nil)
	_ instance.Flusher    = (*Work)(nil)
	_ instance.Troubled   = (*Work)(nil)
)

func (r *Runtime) newWork(id string) *Work {
	w := &Work{r: r, id: id, done: make(chan struct{})}
	w.note, w.asks, w.slow = make(chan guest.ExitNote, 1), make(chan struct{}, maxAsks), rate.NewLimiter(talkRate, talkBurst)
	w.shared, w.reportedSpace = make(chan error, 1), neverAsked
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.renew()
	return w
}

// renew prepares w for another QEMU.
func (w *Work) renew() {
	w.qctx, w.qcancel = context.WithCancel(w.ctx)
	w.ports = new(portGate)
	w.gone, w.over = make(chan struct{}), make(chan struct{})
	w.halted, w.firstAnswer, w.firstAnswerOnce = make(chan string, 1), make(chan struct{}), new(sync.Once)
	w.proc, w.tookOver = process{}, false
	w.waking.Store(false)
	w.hello = make(chan *guest.HelloAnswer, 1)
}

// Identity implements instance.Workload. A wake from hibernation changes it.
func (w *Work) Identity() instance.Identity {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ident
}

// call sends a request to the guest agent.
func (w *Work) call(ctx context.Context, limit time.Duration, method string, params, result any) error {
	if why := w.stands(); why != "" {
		return fmt.Errorf("cannot call %s: %s", method, why)
	}
	p, _ := w.voice()
	return callOn(ctx, p, limit, method, params, result)
}

// ask is call for idempotent requests: if vsock is cut or silent, the request is
// repeated over the serial port.
func (w *Work) ask(ctx context.Context, limit time.Duration, method string, params, result any) error {
	if why := w.stands(); why != "" {
		return fmt.Errorf("cannot call %s: %s", method, why)
	}
	p, fast := w.voice()
	if fast == nil {
		return callOn(ctx, p, limit, method, params, result)
	}
	err := callOn(ctx, p, min(limit, w.r.cfg.LookLimit), method, params, result)
	var refused *guest.Error
	if err == nil || errors.As(err, &refused) || ctx.Err() != nil {
		return err
	}
	w.r.log.Info("a guest does not answer over vsock; trying the serial port", "instance", w.id, "err", err)
	w.doubt(fast)
	p, _ = w.voice()
	return callOn(ctx, p, limit, method, params, result)
}

func callOn(ctx context.Context, p *guest.Peer, limit time.Duration, method string, params, result any) error {
	if p == nil {
		return fmt.Errorf("cannot call %s: %w", method, guest.ErrChannelEnded)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return p.Call(ctx, method, params, result)
}

// voice returns the connection for calls to the guest, or nil, and the vsock peer
// if the connection is vsock.
func (w *Work) voice() (*guest.Peer, *vsockPeer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fast != nil {
		return w.fast.Peer, w.fast
	}
	return w.peer, nil
}

func (w *Work) monitor() (*monitor, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mon == nil {
		return nil, errors.New("cannot reach QEMU: its monitor is not connected")
	}
	return w.mon, nil
}

func (w *Work) isFrozen() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.frozen
}

func (w *Work) hibernated() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.saved
}

func (w *Work) setFrozen(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frozen = on
	w.leftFrozen = w.leftFrozen && on
	switch {
	case w.files == nil:
	case on:
		w.files.Hold()
	default:
		w.files.Release()
	}
}

// Freeze implements instance.Workload. It probes the guest first, because a frozen
// guest cannot be probed. If the guest does not answer in time its readings become
// unknown, which prevents an idle pause.
func (w *Work) Freeze(ctx context.Context) (err error) {
	if w.hibernated() {
		return nil
	}
	if err := w.heed(ctx); err != nil { // also needed for a guest that an earlier daemon froze
		return err
	}
	if w.isFrozen() {
		return nil
	}
	defer func() {
		if err != nil {
			w.unheed()
		}
	}()
	m, err := w.monitor()
	if err != nil {
		return err
	}
	w.probe(ctx)
	// Stopping the guest has its own time limit, however long the probe took.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stillLimit)
	defer cancel()
	err = m.do(ctx, "stop", nil, nil)
	if err == nil {
		var s string
		if s, err = m.status(ctx); err == nil && s != "paused" {
			err = fmt.Errorf("cannot freeze the guest: the machine is %s", s)
		}
	}
	if err != nil {
		// QEMU executes commands in order, so this undoes a stop that is still
		// pending.
		back, cancel := context.WithTimeout(context.WithoutCancel(ctx), stillLimit)
		defer cancel()
		return errors.Join(err, m.do(back, "cont", nil, nil))
	}
	w.setFrozen(true)
	return nil
}

// heed makes the shim continue the guest if this daemon ends.
func (w *Work) heed(ctx context.Context) error {
	if w.r.cfg.WhenGone == nil {
		return nil
	}
	if _, err := os.Stat(w.path(goSocket)); err != nil {
		return nil // a QEMU started by an earlier version has no second monitor
	}
	if err := w.r.cfg.WhenGone(ctx, w.id, w.path(goSocket)); err != nil {
		return fmt.Errorf("cannot freeze the guest: %w", err)
	}
	return nil
}

// unheed undoes heed. A failure is harmless: when this daemon has ended, the shim
// finds a guest that already runs, or none.
func (w *Work) unheed() {
	if w.r.cfg.WhenGone == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if err := w.r.cfg.WhenGone(ctx, w.id, ""); err != nil {
		w.r.log.Warn("the shim may continue a guest", "instance", w.id, "err", err)
	}
}

// Flush implements instance.Flusher: the guest writes its dirty files to its disk.
// It is called before anything the guest might not survive. If the guest does not
// finish in time, only what its programs have synced is safe. A guest that did not
// answer its last probe gets no more than the time limit of a probe.
func (w *Work) Flush(ctx context.Context) {
	if !w.rec.Layer || w.isFrozen() {
		return
	}
	limit := syncLimit
	w.mu.Lock()
	if w.lastHealthErr != nil {
		limit = min(limit, w.r.cfg.LookLimit)
	}
	w.mu.Unlock()
	before, _ := w.disk()
	if err := w.call(ctx, limit, guest.Sync, nil, nil); err != nil {
		w.r.log.Info("a guest did not write everything to its disk", "instance", w.id, "err", err)
	}
	// Writes caused by Flush are not activity of the guest.
	if after, err := w.disk(); err == nil && after > before {
		w.mu.Lock()
		w.flushedBytes += after - before
		w.mu.Unlock()
	}
}

// disk returns how many bytes the guest has written to its disk and its workspace.
// Reads by QEMU do not count, because a restore reads too.
func (w *Work) disk() (uint64, error) {
	w.mu.Lock()
	pid, saved := w.ident.PID, w.saved
	w.mu.Unlock()
	now := map[int]uint64{}
	if !saved && pid != 0 {
		switch io, err := proc.Live().IO(pid); {
		case errors.Is(err, proc.ErrGone):
		case errors.Is(err, proc.ErrNoIO):
			return 0, fmt.Errorf("%w: %w", instance.ErrAbsent, err)
		case err != nil:
			return 0, err
		default:
			now[pid] = w.byCalls(pid, io)
		}
	}
	if w.files != nil {
		now[servedKey] = w.files.Written()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.io.Add(now) - w.flushedBytes, nil
}

// byCalls returns how many bytes a QEMU process has written to disks with write
// calls since the first call of byCalls for it. Other writes do not count: the
// guest's memory is a mapped file, and whenever the guest changes a page that the
// kernel has written back, that counts as a write.
func (w *Work) byCalls(pid int, io proc.IO) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := &w.lastIO
	if l.pid != pid || io.Written < l.io.Written || io.Calls < l.io.Calls {
		*l = qemuIO{pid: pid, io: io}
	}
	l.bytes += min(io.Written-l.io.Written, io.Calls-l.io.Calls)
	l.io = io
	return l.bytes
}

// qemuIO holds the disk writes of a QEMU process.
type qemuIO struct {
	pid   int
	io    proc.IO // at the last reading
	bytes uint64  // written with write calls since the first reading
}

// servedKey stands for the workspace among the PIDs of a proc.Tally.
const servedKey = 0

// Still implements instance.Workload. It asks QEMU for the machine's actual state.
func (w *Work) Still() (bool, error) {
	if w.hibernated() {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(w.ctx, callLimit)
	defer cancel()
	m, err := w.monitor()
	if err != nil {
		return false, err
	}
	s, err := m.status(ctx)
	return s == "paused", err
}

// Thaw implements instance.Workload. It sets the guest's clock, which stopped with
// the guest, before it returns.
func (w *Work) Thaw() error {
	ctx, cancel := context.WithTimeout(w.ctx, max(callLimit, w.r.cfg.CallLimit))
	defer cancel()
	if w.hibernated() {
		if err := w.restore(ctx); err != nil {
			return err
		}
	}
	m, err := w.monitor()
	if err != nil {
		return err
	}
	if why := w.stands(); why != "" {
		return errors.New("cannot thaw the guest: " + why)
	}
	defer w.keepGoing()()
	if err := m.do(ctx, "cont", nil, nil); err != nil {
		w.examine(w.ctx)
		return err
	}
	began := time.Now()
	if err := w.setClock(ctx); err != nil { // nothing in the guest may run with a wrong clock, so the guest is stopped again
		back, cancel := context.WithTimeout(w.ctx, callLimit)
		defer cancel()
		return errors.Join(err, m.do(back, "stop", nil, nil))
	}
	w.clockLate.Store(time.Since(began) > clockSlack)
	w.setFrozen(false)
	w.unheed()
	w.reportSpace(ctx, true)
	w.mu.Lock()
	late := w.signals
	w.signals = nil
	w.mu.Unlock()
	for _, sig := range late {
		if err := w.Signal(sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return nil
}

// Dial connects to the port of target ("host:port") inside the guest. The host
// part is ignored.
func (w *Work) Dial(ctx context.Context, target string) (net.Conn, error) {
	_, p, err := net.SplitHostPort(target)
	if err != nil {
		return nil, fmt.Errorf("cannot connect to %q in the guest: %w", target, err)
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("cannot connect to %q in the guest: the port is not a number", target)
	}
	c, err := w.net.Dial(ctx, uint16(port))
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Guard implements instance.Workload. The guest's network is in this process, so it
// sees everything that arrives for the guest.
func (w *Work) Guard(ports []instance.Endpoint, outbound bool, wake func(reason string)) (instance.Guard, error) {
	if !w.isFrozen() {
		return nil, errors.New("cannot watch the guest: it is not frozen")
	}
	w.mu.Lock()
	rested := w.leftFrozen
	w.mu.Unlock()
	pending, end := w.net.Watch(outbound, wake)
	return &guard{pending, end, w.files, rested}, nil
}

type guard struct {
	pending func() string
	end     func()
	files   *share.Server
	rested  bool // an earlier daemon has checked that no client waits
}

func (g *guard) Pending() string {
	switch what := g.pending(); {
	case what != "" || g.files == nil:
		return what
	case !g.rested && !g.files.Met():
		return "whether it waits for a file of its workspace is not yet known"
	}
	return g.files.Pending()
}

func (g *guard) Close() { g.end() }

// Signal implements instance.Workload. A frozen guest receives the signal when
// it is thawed.
func (w *Work) Signal(sig syscall.Signal) error {
	c := guest.SignalCall{Signal: int(sig)}
	if w.isFrozen() {
		if w.hibernated() { // kept until the guest is restored
			w.mu.Lock()
			w.signals = append(w.signals, sig)
			w.mu.Unlock()
			return nil
		}
		p, _ := w.voice()
		if p == nil {
			return errors.New("cannot signal the guest's program: the control channel is not connected")
		}
		return p.Notify(guest.Signal, c)
	}
	err := w.call(w.ctx, callLimit, guest.Signal, c, nil)
	var refused *guest.Error
	if errors.As(err, &refused) {
		return fmt.Errorf("%w: %w", refused, syscall.ESRCH)
	}
	return err
}

// Exiting implements instance.Workload. It reports true unless the guest is
// hibernated, because a signal from an earlier daemon may wait unread in the
// guest's channel. A signal for a hibernated guest is kept in memory only, and is
// lost with its daemon.
func (w *Work) Exiting() (bool, error) { return !w.hibernated(), nil }

// Kill implements instance.Workload. If the guest answers, its files are flushed
// first, so that what the program has written is kept, as when a process is killed.
func (w *Work) Kill(ctx context.Context) error {
	switch {
	case w.proc.pid != 0:
		if w.answers() {
			w.Flush(ctx)
		}
		w.takeConsole(ctx)
		if err := w.proc.kill(ctx); err != nil {
			return err
		}
	default:
		w.end() // there is no QEMU whose exit would call it
	}
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("cannot clean up %s: %w", w.id, context.Cause(ctx))
	}
}

// answers reports whether the guest is known to have booted and to be running.
func (w *Work) answers() bool {
	select {
	case <-w.gone:
		return false
	case <-w.firstAnswer:
		return !w.isFrozen()
	default:
		return false
	}
}

// Memory implements instance.Workload. It returns QEMU's proportional set size.
func (w *Work) Memory() (int64, error) {
	if w.hibernated() {
		return 0, nil
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", w.proc.pid))
	if err != nil {
		return 0, fmt.Errorf("cannot read the memory of %s: %w", w.id, err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Pss:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("cannot read the memory of %s: %w", w.id, err)
			}
			return kb << 10, nil
		}
	}
	return 0, fmt.Errorf("cannot read the memory of %s: the kernel does not report it", w.id)
}

// remove deletes a run's files.
func (w *Work) remove() error {
	if err := os.RemoveAll(w.r.dir(w.id)); err != nil {
		return fmt.Errorf("cannot remove the files of %s: %w", w.id, err)
	}
	_, err := w.r.sweepTemplates()
	return err
}

func (w *Work) path(name string) string { return filepath.Join(w.r.dir(w.id), name) }
