package corpus

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/host"
	"lull/internal/lib/errtest"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/sockets"
	"lull/internal/runtime/process"
	"lull/internal/sim/truth"
)

// program simulates the machine of one instance. It is a runtime of lull host
// whose runs the process runtime samples from files written here.
type program struct {
	t      *trace
	blocks map[string]*block
	dir    string
	onExit func(id string, run uint64, e instance.Exit)

	mu      sync.Mutex
	work    *process.Work
	run     uint64
	alive   time.Duration // time of its last start
	frozen  bool
	dead    bool
	counted time.Duration // time of the day up to which its usage is counted
	sum     second
	next    int // index of the first connection that is open or still to come
	open    map[int]bool
	guarded *guard       // told of what arrives while the program sleeps
	slept   []truth.Span // periods in which it was frozen or stopped
	since   time.Time
	asleep  bool
}

// pid is the program's process ID in the simulated /proc.
const pid = 100

// listenPort is where clients connect.
const listenPort = 8080

func (p *program) now() time.Duration { return time.Since(at0) }

// put writes a file of the simulated tree.
func (p *program) put(name, text string) {
	if err := os.WriteFile(filepath.Join(p.dir, name), []byte(text), 0o644); err != nil {
		panic(err)
	}
}

// prepare creates the simulated tree.
func (p *program) prepare() error {
	for _, d := range []string{"group", "proc/100/fd"} {
		if err := os.MkdirAll(filepath.Join(p.dir, d), 0o755); err != nil {
			return err
		}
	}
	maps := "7f0000001000-7f0000008000 r-xp 00000000 fe:00 41 /usr/bin/program\n"
	if p.t.jvm() {
		maps += "7f0000010000-7f0000018000 rw-s 00000000 fe:00 42 /tmp/hsperfdata_ada/100\n"
	}
	p.put("proc/100/maps", maps)
	p.put("group/cgroup.freeze", "0\n")
	p.put("group/cgroup.procs", strconv.Itoa(pid)+"\n")
	return os.Symlink("socket:[1]", filepath.Join(p.dir, "proc/100/fd/3"))
}

// count adds the program's usage up to now, unless it was frozen. The caller
// holds p.mu.
func (p *program) count() {
	now := p.now()
	if !p.frozen && !p.dead {
		x := p.t.played(p.blocks, p.counted, now, p.alive)
		p.sum.cpu, p.sum.disk = p.sum.cpu+x.cpu, p.sum.disk+x.disk
	}
	p.counted = now
}

// write updates the files to the present time. The caller holds p.mu.
func (p *program) write() {
	p.count()
	p.put("group/cpu.stat", fmt.Sprintf("usage_usec %d\n", int64(p.sum.cpu)))
	written := int64(p.sum.disk) / 4096 * 4096
	p.put("proc/100/io", fmt.Sprintf("rchar: 0\nwchar: %d\nsyscr: 0\nsyscw: 0\nread_bytes: 0\nwrite_bytes: %d\ncancelled_write_bytes: 0\n", p.called(written), written))
	open := p.conns()
	for n := range p.open {
		if !open[n] {
			os.Remove(p.fd(n))
		}
	}
	for n := range open {
		if !p.open[n] {
			if err := os.Symlink(fmt.Sprintf("socket:[%d]", inode(n)), p.fd(n)); err != nil {
				panic(err)
			}
		}
	}
	p.open = open
}

// called returns how many bytes the program has passed to write calls. A JVM that
// serves from memory only sends: its disk writes are changes of mapped counters,
// not calls.
func (p *program) called(written int64) (n int64) {
	for _, c := range p.t.conns[:p.next] {
		n += int64(len(c.messages))
	}
	for k := range p.open {
		n += int64(p.t.conns[k].traffic(p.now()).DataSegsOut)
	}
	if !p.t.jvm() {
		n += written
	}
	return n
}

func (t *trace) jvm() bool { return strings.HasPrefix(t.base, "java") }

func inode(n int) uint64 { return uint64(1000 + n) }

func (p *program) fd(n int) string {
	return filepath.Join(p.dir, "proc/100/fd", strconv.Itoa(10+n))
}

// conns returns the indexes of the connections that are open now. The caller
// holds p.mu.
func (p *program) conns() map[int]bool {
	now := p.now()
	open := map[int]bool{}
	for n := p.next; n < len(p.t.conns) && p.t.conns[n].from <= now; n++ {
		if c := &p.t.conns[n]; now < c.to {
			open[n] = true
		} else if n == p.next {
			p.next++
		}
	}
	return open
}

// sockets takes the place of the kernel's socket list: the listening socket and
// the open connections.
func (p *program) sockets(q sockets.Query) (out []sockets.Socket, err error) {
	if q.UDP {
		return nil, nil
	}
	here := netip.MustParseAddr("10.0.0.5")
	if p.t.port && slices.Contains(q.States, sockets.Listen) {
		out = append(out, sockets.Socket{Family: syscall.AF_INET, State: sockets.Listen, Local: netip.AddrPortFrom(netip.IPv4Unspecified(), listenPort), Inode: 1})
	}
	if slices.Contains(q.States, sockets.TimeWait) {
		out = append(out, p.remembered(here)...)
	}
	if !slices.Contains(q.States, sockets.Established) {
		return out, nil
	}
	for n := range p.open {
		s := sockets.Socket{Family: syscall.AF_INET, State: sockets.Established, Inode: inode(n), InfoSize: 232,
			Local: netip.AddrPortFrom(here, listenPort), Remote: netip.AddrPortFrom(netip.MustParseAddr("10.0.1.9"), uint16(20000+n%40000))}
		if p.t.conns[n].out {
			s.Local, s.Remote = netip.AddrPortFrom(here, uint16(20000+n%40000)), netip.MustParseAddrPort("203.0.113.7:443")
		}
		s.Traffic = p.t.conns[n].traffic(p.now())
		out = append(out, s)
	}
	return out, nil
}

// remembered returns the connections that the program closed within the last
// minute, which the kernel still lists.
func (p *program) remembered(here netip.Addr) (out []sockets.Socket) {
	const kept = time.Minute
	now := p.now()
	for n := p.next - 1; n >= 0 && now-p.t.conns[n].from < kept+time.Hour; n-- {
		if c := &p.t.conns[n]; c.closes && c.to <= now && now-c.to < kept {
			out = append(out, sockets.Socket{Family: syscall.AF_INET, State: sockets.TimeWait, Local: netip.AddrPortFrom(here, listenPort),
				Remote: netip.AddrPortFrom(netip.MustParseAddr("10.0.1.9"), uint16(20000+n%40000)), Expires: kept - (now - c.to)})
		}
	}
	return out
}

// traffic returns the kernel's counters of a connection at now.
func (c *conn) traffic(now time.Duration) (t sockets.Traffic) {
	sent, received := c.from, c.from
	for _, m := range c.messages {
		if m.at > now {
			break
		}
		segments := uint32(1 + m.bytes/1400)
		if m.in {
			received = m.at
			t.BytesReceived += uint64(m.bytes)
			t.SegsIn, t.DataSegsIn, t.SegsOut = t.SegsIn+segments, t.DataSegsIn+segments, t.SegsOut+1
		} else {
			sent = m.at
			t.BytesAcked += uint64(m.bytes)
			t.SegsOut, t.DataSegsOut, t.SegsIn = t.SegsOut+segments, t.DataSegsOut+segments, t.SegsIn+1
		}
	}
	t.LastSent, t.LastReceived = now-sent, now-received
	t.LastAck = min(t.LastSent, t.LastReceived)
	return t
}

// Start implements instance.Runtime.
func (p *program) Start(_ context.Context, l instance.Launch) (instance.Workload, error) {
	group, err := cgroup.Place{}.Open(filepath.Join(p.dir, "group"))
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.run, p.alive, p.counted, p.dead, p.frozen, p.sum = l.Run, p.now(), p.now(), false, false, second{}
	p.work = (&process.Fixture{Proc: filepath.Join(p.dir, "proc"), Group: group, Sockets: p.sockets}).Work(l.ID, p.identity(l.Run))
	p.awake(true)
	return &workload{p, l.ID, l.Run}, nil
}

func (p *program) identity(run uint64) instance.Identity {
	return instance.Identity{BootID: "corpus", PID: pid, Start: run, Run: run}
}

// awake records whether the program runs. The caller holds p.mu.
func (p *program) awake(on bool) {
	now := time.Now()
	if on && p.asleep {
		p.slept = append(p.slept, truth.Span{From: p.since, To: now})
	}
	if !on && !p.asleep {
		p.since = now
	}
	p.asleep = !on
}

// Adopt implements instance.Runtime.
func (p *program) Adopt(context.Context, string, instance.Identity) (instance.Workload, error) {
	return nil, fmt.Errorf("nothing is adopted")
}

// Capabilities implements instance.Runtime.
func (p *program) Capabilities() power.Capabilities {
	return power.Capabilities{WakeFromStopped: true, Freeze: true, WatchSockets: true}
}

// Hold, Unhold and Watch implement host.HeldListeners. Its other methods concern
// bind handoff, which the program does not use.
func (p *program) Handoff(context.Context) (noPrivs bool, err error) { return false, nil }
func (p *program) Shut(string)                                       {}
func (p *program) Open(string)                                       {}
func (p *program) Hold(context.Context, string, []string) error      { return nil }
func (p *program) Unhold(context.Context, string) error              { return nil }
func (p *program) Watch(_ string, wake func(string)) (host.Guard, error) {
	return p.guard(wake), nil
}

// guard implements instance.Guard.
type guard struct {
	p    *program
	wake func(string)
}

func (p *program) guard(wake func(string)) *guard {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.guarded = &guard{p, wake}
	return p.guarded
}

func (g *guard) Pending() string { return "" }
func (g *guard) Close() {
	g.p.mu.Lock()
	defer g.p.mu.Unlock()
	if g.p.guarded == g {
		g.p.guarded = nil
	}
}

// workload is one run; it implements instance.Workload.
type workload struct {
	p   *program
	id  string
	run uint64
}

func (w *workload) Identity() instance.Identity  { return w.p.identity(w.run) }
func (w *workload) Freeze(context.Context) error { return w.freeze(true) }
func (w *workload) Thaw() error                  { return w.freeze(false) }
func (w *workload) freeze(on bool) error {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	if w.p.dead {
		return nil
	}
	w.p.count()
	w.p.frozen = on
	w.p.work.Froze(on)
	w.p.awake(!on)
	return nil
}

func (w *workload) Still() (bool, error) {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	return w.p.frozen, nil
}

func (w *workload) Exiting() (bool, error) { return false, nil } // a signal ends the program at once

func (w *workload) Guard(_ []instance.Endpoint, _ bool, wake func(string)) (instance.Guard, error) {
	return w.p.guard(wake), nil
}

func (w *workload) Sample(ports []instance.Endpoint) instance.Sample {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	w.p.write()
	return w.p.work.Sample(ports)
}

func (w *workload) Listeners() ([]instance.Listener, error) {
	if !w.p.t.port {
		return nil, nil
	}
	return []instance.Listener{{Network: "tcp", Addr: fmt.Sprintf("0.0.0.0:%d", listenPort), PID: pid, Watchable: true}}, nil
}

func (w *workload) Signal(syscall.Signal) error { return w.Kill(context.Background()) }
func (w *workload) Kill(context.Context) error {
	w.p.mu.Lock()
	if w.p.dead || w.p.run != w.run {
		w.p.mu.Unlock()
		return nil
	}
	w.p.count()
	w.p.dead, w.p.frozen = true, false
	w.p.awake(false)
	w.p.mu.Unlock()
	w.p.onExit(w.id, w.run, instance.Exit{At: time.Now()})
	return nil
}

func (w *workload) Memory() (int64, error) { return 1 << 20, nil }
func (w *workload) Reclaim(context.Context) (int64, error) {
	return 0, fmt.Errorf("nothing to reclaim")
}

// stir wakes the program at every event for which the kernel would wake a guard:
// a new connection, or data on an open one.
func (p *program) stir() {
	for _, at := range p.t.arrivals() {
		time.Sleep(time.Until(at0.Add(at)))
		p.mu.Lock()
		g := p.guarded
		p.mu.Unlock()
		if g != nil {
			g.wake("a client")
		}
	}
}

// arrivals returns the times at which a connection or data arrives from outside.
func (t *trace) arrivals() (out []time.Duration) {
	for _, c := range t.conns {
		if !c.out {
			out = append(out, c.from)
		}
		for _, m := range c.messages {
			if m.in {
				out = append(out, m.at)
			}
		}
	}
	slices.Sort(out)
	return slices.DeleteFunc(out, func(d time.Duration) bool { return d >= day })
}

// notes records the verdicts of a replay.
type notes struct {
	mu  sync.Mutex
	all []evidence.Decision
}

func (n *notes) Take(r evidence.Record) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, r.Decision)
}

func (n *notes) Read(context.Context, evidence.Query, func(evidence.Record) error) ([]evidence.Missing, error) {
	return nil, nil
}

type noDisk struct{}

func (noDisk) Put(*instance.Record) error  { return nil }
func (noDisk) Note(*instance.Record) error { return nil }
func (noDisk) Delete(string) error         { return nil }

// replayed is the result of replaying a day.
type replayed struct {
	slept    truth.Use
	verdicts []evidence.Decision
	kind     string // kind of the objects, as in package why
	timeout  time.Duration
	window   time.Duration // the longest window of a reading
	// guarded reports whether a block that does not concern use was justified at
	// a time.
	guarded func(b idle.Block, at time.Duration) bool
}

// onHost replays a day of an instance with the default settings of lull host, and
// quiet-connection-after if quiet is not 0.
func onHost(t *testing.T, d *trace, quiet time.Duration) (out replayed) {
	all, err := blocks()
	errtest.None(t, err)
	p := &program{t: d, blocks: all, dir: fastDir(t), open: map[int]bool{}}
	errtest.None(t, p.prepare())
	kept := &notes{}
	synctest.Test(t, func(t *testing.T) {
		h := host.New(host.Config{PauseAfter: time.Minute, StopAfter: 5 * time.Minute, Runtimes: map[string]host.Runtime{"process": p},
			Records: noDisk{}, Log: slog.New(slog.DiscardHandler), KeepEvents: 16, Evidence: kept, HeldListeners: p, Workers: 1})
		p.onExit = h.OnExit
		errtest.None(t, h.Load(t.Context(), nil))
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- h.Run(ctx) }()
		spec := instance.Spec{Name: "a", Command: []string{"program"}, Restart: instance.RestartNo, QuietConnectionAfter: asIdle(quiet)}
		if d.port {
			address := fmt.Sprintf("0.0.0.0:%d", listenPort)
			spec.Expose = []instance.Endpoint{{Listen: address, Target: address}}
		}
		id, err := h.Create(t.Context(), spec)
		if err == nil {
			err = h.Start(t.Context(), id, host.ByManual)
		}
		if err != nil {
			t.Error(err)
		} else {
			p.stir()
			time.Sleep(time.Until(at0.Add(day)))
		}
		p.mu.Lock()
		p.awake(true)
		out.slept = truth.Of(p.slept...)
		p.mu.Unlock()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	out.verdicts, out.kind, out.timeout, out.window = kept.all, why.KindInstance, time.Minute, 12*time.Second
	return out
}

func asIdle(d time.Duration) idle.Duration { return idle.Duration(d) }

// fastDir returns a directory in memory if possible, otherwise a temporary
// directory.
func fastDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "lull-corpus-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
