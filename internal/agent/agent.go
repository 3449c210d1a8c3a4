// Package agent decides, on a machine itself, whether the machine is idle, and stops,
// hibernates or terminates it.
//
// One goroutine, the loop, owns all state. It reads the cheap signals, reads the slow
// ones only if the cheap ones are quiet, lets internal/core/idle judge, and answers
// the control socket. Everything that can take time (tags, hooks, warnings, the
// cloud, the disk) runs outside the loop with a deadline and returns its result to
// the loop, so that nothing blocks the loop for longer than a tick.
//
// Guarantees: An unknown signal, an unreadable configuration and a halt never lead to
// an idle action. An intent is durable before it is acted on. After the hook
// everything is read again, including the tags, and the last readings are at most 5 s
// old when the call is sent. Only a TTL or a completion terminates. The agent's own
// terminal writes and network traffic do not count as use.
//
// The agent's parts (files, clocks, metadata and the cloud) are passed in through
// Options.
package agent

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/lib/wall"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
)

// Cheap reads the signals that cost microseconds: cpu, network, disk and
// terminals. proc.Machine implements it.
type Cheap interface {
	Read(now time.Time, l proc.Limits, into []idle.Reading) []idle.Reading
	Reset()
}

// Slow is one signal that is read only if the cheap ones are quiet. Read should
// respect ctx. A signal that does not answer is unknown.
type Slow interface {
	Signal() string
	Wanted(c Config) bool
	Read(ctx context.Context, now time.Time, c Config) idle.Reading
}

// TagSource reads the instance's tags.
type TagSource interface {
	Tags(ctx context.Context) (map[string]string, error)
}

// Instance is the cloud's description of the machine.
type Instance struct {
	State                 string // running, stopping, ...
	HibernationConfigured bool
}

// Cloud acts on the machine that the agent runs on. If Stop cannot hibernate as
// requested, it stops the machine and returns why.
type Cloud interface {
	Describe(ctx context.Context) (Instance, error)
	WriteTags(ctx context.Context, t map[string]string) error
	Stop(ctx context.Context, hibernate bool) (fallback string, err error)
	Terminate(ctx context.Context) error
}

// Power acts on the machine if there is no cloud.
type Power interface {
	PowerOff(ctx context.Context) error
	Hibernate(ctx context.Context) error
}

// Warner warns the users of the machine, and withdraws warnings that no longer apply.
// The error says what could not be delivered; it never delays an action.
type Warner interface {
	Warn(ctx context.Context, w Warning) error
	Withdraw(ctx context.Context, w Withdrawal) error
}

// HookRunner runs the pre-stop and post-cancel hooks.
type HookRunner interface {
	Run(ctx context.Context, h HookSpec) agentctl.Hook
}

// UserChecker is a HookRunner that knows which users exist. CheckUser returns an
// error if there is no such user.
type UserChecker interface {
	CheckUser(name string) error
}

// Disk stores the agent's files.
type Disk interface {
	Load(name string) ([]byte, error)         // fs.ErrNotExist if there is none
	Save(name string, b []byte) error         // durable when it returns
	Config() ([]byte, error)                  // the local file; fs.ErrNotExist if there is none
	Completed(path string) (time.Time, error) // modification time of a trustworthy completion file of this boot; zero if there is none
}

// Journal stores the history.
type Journal interface {
	Append(e agentctl.Entry) error
	Entries(q agentctl.HistoryQuery) ([]agentctl.Entry, error)
}

// Evidence stores every check and its verdict.
type Evidence interface {
	Take(r evidence.Record) // never blocks
	Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error)
}

// Options are the parts of an Agent. Cheap, Clocks, Disk and Journal are
// required. The others may be nil, which disables what they do.
type Options struct {
	Version, BuildDate string
	InstanceID, Region string
	// Identify returns the instance's ID and region. It is called until it succeeds,
	// unless InstanceID is set. Nil means that there is no cloud.
	Identify func(ctx context.Context) (instanceID, region string, err error)
	BootID   string
	Prefix   string // of tags; empty means lull:

	ConfigPath string // of the local file, for errors; Disk reads it

	Cheap    Cheap
	Slow     []Slow
	Memory   func() (agentctl.Memory, error)
	Timers   func(ctx context.Context) ([]agentctl.Timer, error)
	Tags     []TagSource // tried in order
	Cloud    Cloud
	Power    Power
	Warner   Warner
	Hooks    HookRunner
	Disk     Disk
	Journal  Journal
	Evidence Evidence
	Reporter Reporter
	Clocks   func() wall.Reading // clocks of the current boot; see wall.Read
	Own      *proc.OwnWrites
	Log      *slog.Logger
	Tracer   trace.Tracer // gets spans of checks, warnings and actions; nil disables tracing
}

// Limits of work outside the loop.
const (
	configEvery  = 5 * time.Minute
	sourceLimit  = 10 * time.Second // one source of configuration
	probeLimit   = 10 * time.Second // one slow signal
	warnLimit    = 10 * time.Second
	tagLimit     = 10 * time.Second
	diskLimit    = 30 * time.Second // a longer write to disk is reported as hanging
	callLimit    = 60 * time.Second // one call that stops the machine
	freshLimit   = 5 * time.Second  // maximum age of the readings when the call is sent
	acceptedWait = 10 * time.Minute // an accepted stop must happen within this time
	retryAfter   = 5 * time.Minute  // delay after a failed action; doubles up to an hour
	stepLimit    = 60 * time.Second // a larger jump of the clock is reported
	alarmAfter   = 15 * time.Minute // a signal that is unknown for longer raises an alarm
)

// Agent is one machine's agent. Its agentctl.Agent methods are safe for
// concurrent use while Run runs.
type Agent struct {
	o     Options
	log   *slog.Logger
	calls chan func()
	ended chan struct{}
	tasks sync.WaitGroup
	ctx   context.Context // the context of Run
	saver *saver
	lines chan agentctl.Entry // history entries to be written to the journal

	// The fields below are owned by the loop.
	clock    steady
	started  time.Time
	booted   time.Time
	state    state
	config   configured
	machine  machineView
	acting   *attempt
	round    *round
	busy     map[string]bool // slow signals whose last probe has not ended
	nextAt   time.Time
	tagged   tagWriter
	server   reporting
	alarms   map[string]agentctl.Alarm
	counters agentctl.Counters
	unknown  map[string]time.Time // since when, by signal
	failures int                  // consecutive failures of the same action
	warning  trace.SpanContext    // span of the last warning, to which the action's span links

	delivered chan struct{} // closed when the last delivery of the Warner has ended; nil before the first
	ready     chan struct{}

	self atomic.Pointer[identity]
}

// identity is the machine's instance, empty while unknown.
type identity struct {
	instanceID, region string
	err                error // why it is unknown
}

// machineView holds the results of the last finished round.
type machineView struct {
	readings []idle.Reading
	notAsked []string
	verdict  idle.Verdict
	policy   idle.Policy
	stages   []agentctl.Stage
	stage    int
	memory   *agentctl.Memory
	timers   []agentctl.Timer
	activity time.Time // newest use of any kind
	// activityBy is the signal that showed the activity; empty if activity is only
	// the time at which idle time began.
	activityBy string
	// sampled is the end of each rate's last window. unseen is the end of the last
	// time that no window of that rate covers.
	sampled  map[string]time.Time
	unseen   map[string]time.Time
	restarts bool          // the next round restarts the samples on purpose
	line     evidence.Line // the last log line about decisions
	recorded string        // the verdict last written to the journal
}

// New returns an agent. It does no I/O.
func New(o Options) (*Agent, error) {
	var errs []error
	if o.Cheap == nil || o.Clocks == nil || o.Disk == nil || o.Journal == nil {
		errs = append(errs, errors.New("cannot make an agent: Cheap, Clocks, Disk and Journal are required"))
	}
	if o.Prefix == "" {
		o.Prefix = "lull:"
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Own == nil {
		o.Own = &proc.OwnWrites{}
	}
	a := &Agent{
		o: o, log: o.Log,
		calls: make(chan func()), ended: make(chan struct{}), ready: make(chan struct{}),
		lines: make(chan agentctl.Entry, 256),
		busy:  map[string]bool{}, alarms: map[string]agentctl.Alarm{},
		unknown: map[string]time.Time{},
	}
	a.self.Store(&identity{instanceID: o.InstanceID, region: o.Region})
	return a, errors.Join(errs...)
}

// Ready is closed once the first attempt to read the configuration has ended,
// successful or not, and the control methods answer.
func (a *Agent) Ready() <-chan struct{} { return a.ready }

// String returns the agent's name as a task.
func (a *Agent) String() string { return "agent" }

// Run watches the machine until ctx ends. Then it returns nil. It returns an
// error only if the agent cannot start.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	a.ctx = ctx
	a.saver = newSaver(a.o.Disk)
	a.tasks.Go(func() { a.saver.run(ctx) })
	// The journal is written until its last entry, the end of the agent, has been
	// written.
	keeping, kept := context.WithCancel(context.WithoutCancel(ctx))
	a.tasks.Go(func() { a.keep(keeping) })
	defer func() {
		a.record(agentctl.Entry{Kind: "end", Sentence: "The agent ends."})
		close(a.ended)
		cancel()
		kept()
		a.tasks.Wait()
	}()
	if err := a.begin(); err != nil {
		return err
	}
	if f, ok := a.o.Reporter.(HaltFollower); ok {
		a.tasks.Go(func() { a.followHalt(ctx, f) })
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case f := <-a.calls:
			f()
		case <-timer.C:
			a.tick()
		}
		timer.Reset(max(a.nextAt.Sub(a.now()), 0))
	}
}

// now returns the time used throughout the agent: it follows the wall clock without
// its jumps.
func (a *Agent) now() time.Time { return a.clock.at(a.o.Clocks()) }

// post runs f in the loop. If the loop has ended, f is dropped.
func (a *Agent) post(f func()) {
	select {
	case a.calls <- f:
	case <-a.ended:
	}
}

// ask runs f in the loop and returns when f has run.
func (a *Agent) ask(ctx context.Context, f func()) error {
	done := make(chan struct{})
	select {
	case a.calls <- func() { f(); close(done) }:
	case <-a.ended:
		return errors.New("cannot reach the agent: it is shutting down")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	<-done
	return nil
}

// beside runs work outside the loop, for at most limit, and then runs the
// returned function in the loop. Run waits for it.
func (a *Agent) beside(limit time.Duration, work func(ctx context.Context) (then func())) {
	a.tasks.Go(func() {
		ctx, cancel := context.WithTimeout(a.ctx, limit)
		defer cancel()
		if then := work(ctx); then != nil {
			a.post(then)
		}
	})
}

// begin loads the state of an earlier agent and records the start.
func (a *Agent) begin() error {
	c := a.o.Clocks()
	a.clock.start(c)
	now := a.now()
	a.started, a.booted = now, now.Add(-c.Boot)
	a.machine.activity = now // idle time restarts with the agent
	a.nextAt = now
	if err := a.load(); err != nil {
		return err
	}
	a.resumeState(now)
	a.refresh(func(agentctl.Reload) {
		a.nextAt = a.now()
		close(a.ready)
	})
	return nil
}
