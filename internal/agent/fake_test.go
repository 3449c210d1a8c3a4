package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/wall"
	"lull/internal/platform/ec2"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
)

// world is a simulated machine with its cloud and its disk, for one agent in a
// bubble.
type world struct {
	mu sync.Mutex

	// The machine.
	busy     map[string]bool // signals that are active
	broken   map[string]bool // signals that cannot be read
	typed    time.Time       // the last key press
	written  time.Time       // last write to a terminal, by any process
	own      *proc.OwnWrites
	samples  int // number of samples since Reset; the first is unknown
	sampled  map[string]time.Time
	slept    time.Duration
	skew     time.Duration
	bootID   string
	hang     map[string]bool // slow signals that do not answer
	lastRead time.Time

	// The cloud.
	tags      map[string]string
	tagsErr   error
	tagsHang  bool
	tagsTook  time.Duration // how long reading the tags takes; it returns their content at its beginning
	writeErr  error
	writeHang bool
	descErr   error
	stopErr   []error // errors of the next calls; later calls succeed
	stopHang  bool
	stopTook  time.Duration // how long the call takes
	descTook  time.Duration
	hibernate bool // the instance was launched with hibernation enabled
	calls     []string
	stopped   bool
	writes    []map[string]string

	// Files.
	files    map[string][]byte
	config   []byte
	saveErr  error
	saveTook time.Duration
	complete time.Time // modification time of the completion file

	warnings []Warning
	warnHang bool

	withdrawn []Withdrawal
	hook      func(HookSpec) agentctl.Hook
	hooks     int
	ran       []HookSpec
	atFence   func() // called once, when the tags are written right before the call
	tune      func(*Options)
}

func newWorld() *world {
	return &world{busy: map[string]bool{}, broken: map[string]bool{}, hang: map[string]bool{}, tags: map[string]string{},
		files: map[string][]byte{}, bootID: "boot-1", own: &proc.OwnWrites{}, hibernate: true}
}

func (w *world) with(f func()) { w.mu.Lock(); defer w.mu.Unlock(); f() }

// Read implements Cheap.
func (w *world) Read(now time.Time, _ proc.Limits, into []idle.Reading) []idle.Reading {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.samples++
	w.lastRead = time.Now()
	for _, s := range []string{proc.SignalCPU, proc.SignalNetwork, proc.SignalDisk} {
		if w.samples == 1 || w.sampled == nil {
			w.sampled = map[string]time.Time{}
		}
		window := time.Minute
		if last := w.sampled[s]; !last.IsZero() {
			window = max(window, now.Sub(last))
		}
		r := idle.Judge(s, 0, 5, "%", window, now)
		if !w.broken[s] {
			w.sampled[s] = now
		}
		switch {
		case w.broken[s]:
			r = idle.NotKnown(s, now, "broken for the test")
		case w.samples == 1:
			r = idle.NotKnown(s, now, "first sample")
		case w.busy[s]:
			r = idle.Judge(s, 50, 5, "%", window, now)
		}
		into = append(into, r)
	}
	t := idle.Reading{Signal: proc.SignalTerminals, State: idle.Quiet, At: now, LastEvent: w.typed}
	if ownSpan := w.written.Sub(w.own.Last()); w.written.After(t.LastEvent) && (ownSpan < 0 || ownSpan > proc.OwnWriteSpan) {
		t.LastEvent = w.written
	}
	return append(into, t)
}

// Reset implements Cheap.
func (w *world) Reset() { w.with(func() { w.samples = 0 }) }

type slowSignal struct {
	w    *world
	name string
}

func (s slowSignal) Signal() string     { return s.name }
func (s slowSignal) Wanted(Config) bool { return true }
func (s slowSignal) Read(ctx context.Context, now time.Time, _ Config) idle.Reading {
	s.w.mu.Lock()
	hang, broken, busy := s.w.hang[s.name], s.w.broken[s.name], s.w.busy[s.name]
	s.w.mu.Unlock()
	switch {
	case hang:
		<-ctx.Done()
		return idle.NotKnown(s.name, now, ctx.Err().Error())
	case broken:
		return idle.NotKnown(s.name, now, "broken for the test")
	case busy:
		return idle.Judge(s.name, 1, 1, "sessions", time.Minute, now)
	}
	return idle.Reading{Signal: s.name, State: idle.Quiet, At: now}
}

// Tags implements TagSource.
func (w *world) Tags(ctx context.Context) (map[string]string, error) {
	w.mu.Lock()
	hang, t, err := w.tagsHang, maps.Clone(w.tags), w.tagsErr
	w.takes(w.tagsTook)
	w.mu.Unlock()
	if hang {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return t, err
}

// refusal returns an error like those of package ec2.
func refusal(k ec2.Kind) error { return &ec2.Error{Op: "StopInstances", Kind: k, Code: string(k)} }

type fakeCloud struct{ w *world }

func (c fakeCloud) Describe(context.Context) (Instance, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.w.takes(c.w.descTook)
	return Instance{State: "running", HibernationConfigured: c.w.hibernate}, c.w.descErr
}

func (c fakeCloud) WriteTags(ctx context.Context, t map[string]string) error {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if c.w.writeHang {
		return c.w.until(ctx)
	}
	if c.w.writeErr != nil {
		return c.w.writeErr
	}
	c.w.writes = append(c.w.writes, t)
	maps.Copy(c.w.tags, t)
	if f := c.w.atFence; f != nil && t["lull:idle-action"] != "" {
		c.w.atFence = nil
		c.w.mu.Unlock()
		f()
		c.w.mu.Lock()
	}
	return nil
}

// until blocks until ctx ends. w.mu must be held; it is released meanwhile.
func (w *world) until(ctx context.Context) error {
	w.mu.Unlock()
	defer w.mu.Lock()
	<-ctx.Done()
	return ctx.Err()
}

func (c fakeCloud) act(ctx context.Context, name string) error {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if age := time.Since(c.w.lastRead); age > freshLimit {
		panic(fmt.Sprintf("%s was sent on readings %s old", name, age))
	}
	c.w.calls = append(c.w.calls, name)
	if c.w.stopHang {
		return c.w.until(ctx)
	}
	if len(c.w.stopErr) > 0 {
		err := c.w.stopErr[0]
		c.w.stopErr = c.w.stopErr[1:]
		if err != nil {
			return err
		}
	}
	c.w.stopped = true
	c.w.takes(c.w.stopTook)
	return nil
}

// takes blocks for d. w.mu must be held; it is released meanwhile.
func (w *world) takes(d time.Duration) {
	w.mu.Unlock()
	defer w.mu.Lock()
	time.Sleep(d)
}

func (c fakeCloud) Stop(ctx context.Context, hibernate bool) (string, error) {
	if !hibernate {
		return "", c.act(ctx, "stop")
	}
	err := c.act(ctx, "hibernate")
	if ec2.KindOf(err) == ec2.HibernateUnsupported {
		return err.Error(), c.act(ctx, "stop")
	}
	return "", err
}
func (c fakeCloud) Terminate(ctx context.Context) error { return c.act(ctx, "terminate") }

// world also implements Disk, Warner and HookRunner.

func (w *world) Load(name string) ([]byte, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b, ok := w.files[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return b, nil
}

func (w *world) Save(name string, b []byte) error {
	w.mu.Lock()
	took := w.saveTook
	w.mu.Unlock()
	time.Sleep(took)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.saveErr != nil {
		return w.saveErr
	}
	w.files[name] = append([]byte(nil), b...)
	return nil
}

func (w *world) Config() ([]byte, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.config == nil {
		return nil, fs.ErrNotExist
	}
	if string(w.config) == "unreadable" {
		return nil, errors.New("permission denied")
	}
	return w.config, nil
}

func (w *world) Completed(string) (time.Time, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.complete, nil
}

func (w *world) Warn(ctx context.Context, x Warning) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.warnings = append(w.warnings, x)
	w.own.Note(time.Now())
	w.written = time.Now()
	if w.warnHang {
		return w.until(ctx)
	}
	return nil
}

func (w *world) Withdraw(_ context.Context, x Withdrawal) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.withdrawn = append(w.withdrawn, x)
	if x.Warning.Action != "" {
		w.own.Note(time.Now())
		w.written = time.Now()
	}
	return nil
}

func (w *world) Run(_ context.Context, h HookSpec) agentctl.Hook {
	w.mu.Lock()
	w.hooks++
	w.ran = append(w.ran, h)
	f := w.hook
	w.mu.Unlock()
	if f == nil {
		return agentctl.Hook{Command: h.Command}
	}
	return f(h)
}

// clocks returns the bubble's clocks, shifted by the test's sleeps and clock changes.
func (w *world) clocks() wall.Reading {
	w.mu.Lock()
	defer w.mu.Unlock()
	mono := time.Since(epoch)
	return wall.Reading{Boot: mono + w.slept, Mono: mono, Wall: time.Now().Add(w.slept + w.skew).Round(0)}
}

// epoch is when the simulated machine booted, an hour before a bubble's clock begins.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).Add(-time.Hour)

func (w *world) start(t *testing.T, ctx context.Context) *Agent {
	t.Helper()
	a := w.make(t)
	go a.Run(ctx)
	<-a.Ready()
	return a
}

// make returns an agent over w that is not running yet.
func (w *world) make(t *testing.T) *Agent {
	t.Helper()
	var slow []Slow
	for _, s := range []string{proc.SignalUsers, proc.SignalRecent, proc.SignalGPU} {
		slow = append(slow, slowSignal{w, s})
	}
	o := Options{Version: "test", InstanceID: "i-1", BootID: w.bootID, Cheap: w, Slow: slow, Tags: []TagSource{w},
		Cloud: fakeCloud{w}, Warner: w, Hooks: w, Disk: w, Journal: &MemoryJournal{}, Clocks: w.clocks, Own: w.own, Log: slog.New(slog.DiscardHandler)}
	if w.tune != nil {
		w.tune(&o)
	}
	a, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// bubble runs an agent over w in a bubble.
func bubble(t *testing.T, w *world, body func(t *testing.T, a *Agent)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		a := w.start(t, ctx)
		body(t, a)
		cancel()
		time.Sleep(4 * w.saveTook) // before it ends, the agent writes what is queued to the disk
		synctest.Wait()
	})
}

// sent returns the calls to the cloud so far.
func (w *world) sent() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string{}, w.calls...)
}

// tag returns the value of a state tag, by its name without the prefix.
func (w *world) tag(name string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tags["lull:"+name]
}

// warned returns the warnings so far.
func (w *world) warned() []Warning {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]Warning{}, w.warnings...)
}
