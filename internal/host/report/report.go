// Package report sends the state of a host's instances to a server, answers the
// server's questions, and applies the fleet's halt.
package report

import (
	"context"
	"encoding/json"
	"errors"
	"hash/maphash"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/host"
	"lull/internal/lib/delay"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

// Server is the fleet server to which a host reports.
type Server interface {
	ReportHost(ctx context.Context, r control.HostReport) (control.HostAnswer, error)
	HostTurn(ctx context.Context, host string, t control.HostTurn) (control.HostQuestions, error)
	AwaitHalt(ctx context.Context, host string, t control.HaltTurn) (control.HaltAnswer, error)
}

// Limits on reporting.
const (
	reportLimit = 10 * time.Second // for a report, and for a long poll in addition to its wait
	reportSpace = time.Second      // between two reports
	reportLook  = 5 * time.Second  // between two checks of running instances
	reportRetry = time.Second      // after a failure; doubles up to reportMost
	reportMost  = 30 * time.Second
	reportPart  = 96 << 10 // bytes of instances or answers in one report
	turnWait    = 25 * time.Second
	answerLimit = time.Second // for one answer
)

// Reporter reports a host's instances to a server and answers the server's
// questions. While the server reports a fleet halt, automatic actions are halted;
// while the server cannot be reached, the last known halt applies. The server can
// change nothing else, unless Commands is set. The fields must be set before Run.
type Reporter struct {
	Host   *host.Host
	Server Server
	Where  string // the server's URL, for display
	// Name is the host's name in its token.
	Name, Version, BuildDate string
	// Every is the heartbeat interval.
	Every  time.Duration
	Faults []string // what is wrong with the host
	Log    *slog.Logger
	// Commands carries out the server's commands. If it is nil, none are accepted.
	// Via is part of whom they are attributed to: "server" gives "ada via server".
	Commands *Commands
	Via      string

	haltMark string // version of the fleet's halt last received; used only by followHalt

	mu   sync.Mutex
	link hostctl.ServerLink
}

// Link returns the state of the connection to the server.
func (r *Reporter) Link() hostctl.ServerLink {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.link
	l.URL, l.Host = r.Where, r.Name
	return l
}

// Run reports until ctx ends. If the server does not answer, it retries with
// backoff.
func (r *Reporter) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { r.converse(ctx) })
	wg.Go(func() { r.followHalt(ctx) })
	r.reports(ctx)
	wg.Wait()
	return nil
}

// reports sends changes when they happen, and a full report every Every.
func (r *Reporter) reports(ctx context.Context) {
	t := progress{r: r, seed: maphash.MakeSeed(), began: time.Now()}
	seen, failures := r.Host.Events().Last(), 0
	for ctx.Err() == nil {
		events, gone, more := r.Host.Events().Since(seen)
		if len(events) > 0 {
			seen = events[len(events)-1].Seq
		}
		if gone {
			t.anew()
		}
		err := t.send(ctx, events)
		r.recordOutcome(err)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			t.anew()
			_ = delay.For(ctx, delay.Backoff(failures, reportRetry, reportMost))
			failures++
			continue
		}
		failures = 0
		_ = delay.For(ctx, reportSpace)
		select {
		case <-more:
		case <-time.After(min(reportLook, r.Every) - reportSpace):
		case <-ctx.Done():
		}
	}
}

// recordOutcome stores the result of a report, and logs it if it differs from the
// previous one.
func (r *Reporter) recordOutcome(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now().Round(0)
	switch {
	case errors.Is(err, context.Canceled):
	case err == nil:
		if r.link.Error != "" {
			r.Log.Info("reports reach the server again", "server", r.Where)
		}
		r.link = hostctl.ServerLink{ReportedAt: &now}
	default:
		if r.link.Error == "" {
			r.Log.Warn("reports do not reach the server; instances are unaffected", "server", r.Where, "err", err)
			r.link.FailingSince = &now
		}
		r.link.Error = err.Error()
	}
}

// progress is the part of the report that the server already has. With zero values, everything is
// reported.
type progress struct {
	r     *Reporter
	seed  maphash.Seed
	began time.Time
	seq   uint64
	last  uint64 // sequence number that the server has; 0 if it has nothing
	beat  time.Time
	head  uint64          // checksum of the last report about the host itself
	sums  map[string]sums // of the last report about each instance, by ID
}

// sums describes the last report of an instance: a checksum of the fields whose
// change is reported at once, a checksum of all fields that the server cannot
// compute itself, and the memory in bytes.
type sums struct {
	urgent, all uint64
	memory      int64
}

func (t *progress) anew() { t.last, t.sums = 0, nil }

// send reports the changes since the last report. events are those since then.
func (t *progress) send(ctx context.Context, events []hostctl.Event) error {
	for {
		resend, err := t.once(ctx, events)
		if err != nil || !resend {
			return err
		}
		t.anew()
		if err := delay.For(ctx, reportSpace); err != nil {
			return err
		}
	}
}

func (t *progress) once(ctx context.Context, events []hostctl.Event) (resend bool, err error) {
	beat := t.last == 0 || !time.Now().Before(t.beat)
	c := t.changed(beat, events)
	head := t.heading(&c)
	sum := t.sum(head) // computed before the instances are added
	if p := &c.parts[0]; !beat && sum == t.head && len(p.instances)+len(p.gone) == 0 {
		return false, nil
	}
	room := t.r.Host.Capacity()
	head.Memory = control.HostMemory{Limit: room.Memory, Free: room.Free, Waiting: room.Waiting}
	for n, p := range c.parts {
		head.Instances, head.Gone = p.instances, p.gone
		head.More = n < len(c.parts)-1
		t.seq++
		head.At, head.Sequence, head.After = time.Now().Round(0), t.seq, t.last
		head.Fit()
		within, cancel := context.WithTimeout(ctx, reportLimit)
		a, err := t.r.Server.ReportHost(within, head)
		cancel()
		if err != nil || a.Resend {
			return a.Resend, err
		}
		t.last = t.seq
	}
	t.sums, t.head = c.sums, sum
	if beat {
		// The next heartbeat is a little early, so that a slow one does not count
		// as missed.
		t.beat = time.Now().Add(t.r.Every * 3 / 4)
	}
	return false, nil
}

// heading returns the part of a report about the host itself. Values that change
// all the time are left out.
func (t *progress) heading(c *change) control.HostReport {
	halt := t.r.Host.Halted()
	if halt != nil {
		halt = new(*halt) // a copy, because Fit modifies it
	}
	return control.HostReport{Host: t.r.Name, StartedAt: t.began.Round(0), Version: t.r.Version, BuildDate: t.r.BuildDate,
		Interval: idle.Duration(t.r.Every), Halted: halt != nil, Halt: halt, Counts: c.counts, Faults: slices.Clone(t.r.Faults), Commands: t.r.Commands != nil, LeftOut: c.total - len(c.sums)}
}

// change holds the news about instances that has to be reported.
type change struct {
	total  int
	counts map[string]int // number of instances by state
	parts  []part         // at least one
	sums   map[string]sums
}

// part is the part of a change that fits in one report.
type part struct {
	instances []control.HostInstance
	gone      []string
	bytes     int
}

// changed collects what has changed: about all instances for a heartbeat, and
// otherwise about those that run or have events. A sleeping instance does not
// change without an event.
func (t *progress) changed(beat bool, events []hostctl.Event) change {
	about := map[string]bool{}
	for _, e := range events {
		about[e.ID] = true
	}
	c := change{counts: map[string]int{}, parts: make([]part, 1), sums: map[string]sums{}}
	for _, i := range t.r.Host.Instances() {
		id, s := i.ID(), i.State()
		c.total++
		c.counts[string(s)]++
		old, known := t.sums[id]
		if !known && len(c.sums) == control.MaxHostInstances {
			continue
		}
		rests := s.Asleep() || s == power.Stopped
		if known && rests && !beat && !about[id] {
			c.sums[id] = old
			continue
		}
		read := !rests || about[id] || !known
		o := reported(i.View(read))
		if !read { // the memory of a sleeping instance stays what it was when it fell asleep
			o.Memory = old.memory
		}
		body, now := t.weigh(o)
		if c.sums[id] = now; now.urgent != old.urgent || beat && now.all != old.all {
			c.add(o, body)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(t.sums)) {
		if _, there := c.sums[id]; !there {
			c.parts[0].gone = append(c.parts[0].gone, id)
		}
	}
	return c
}

// add adds an instance to the last part, or to a new one if it does not fit.
func (c *change) add(o control.HostInstance, size int) {
	p := &c.parts[len(c.parts)-1]
	if p.bytes+size > reportPart && len(p.instances) > 0 {
		c.parts = append(c.parts, part{})
		p = &c.parts[len(c.parts)-1]
	}
	p.instances, p.bytes = append(p.instances, o), p.bytes+size
}

// weigh returns the encoded size of an instance, and its sums.
func (t *progress) weigh(o control.HostInstance) (int, sums) {
	o.Blocks = slices.Clone(o.Blocks)
	whole, err := json.Marshal(o)
	if err != nil {
		return 0, sums{} // cannot happen: all of these fields can be encoded
	}
	o.IdleFor = 0 // the server computes it
	all, memory := t.sum(o), o.Memory
	// Sentences contain ages, and use changes the times all the time.
	o.LastActivityAt, o.Memory = nil, 0
	if o.PauseAt != nil {
		o.PauseAt = &time.Time{}
	}
	for n := range o.Blocks {
		o.Blocks[n].Sentence, o.Blocks[n].Until = "", nil
	}
	return len(whole), sums{t.sum(o), all, memory}
}

func (t *progress) sum(v any) uint64 {
	body, err := json.Marshal(v)
	if err != nil {
		return 0
	}
	return maphash.Bytes(t.seed, body)
}

// reported returns what is reported about an instance. Its command, environment and
// files are left out.
func reported(o hostctl.Instance) control.HostInstance {
	out := control.HostInstance{ID: o.ID, Name: o.Name, State: o.State, StateSince: o.StateSince, StatusReason: o.StatusReason, Enabled: o.Enabled,
		Runtime: o.Runtime, Image: o.Image, CreatedAt: o.CreatedAt, LastActivityAt: o.LastActivityAt, LastPausedAt: o.LastPausedAt, LastPausedBy: o.LastPausedBy,
		LastResumedAt: o.LastResumedAt, LastResumedBy: o.LastResumedBy, SnoozeUntil: o.SnoozeUntil, IdleFor: o.IdleFor, PauseAt: o.PauseAt, NextStep: o.NextStep, NextStepAt: o.NextStepAt,
		PauseAfter: o.PauseAfter, StopAfter: o.StopAfter, Connections: o.Connections, Leases: o.Leases, Endpoints: o.Endpoints, Blocks: o.Blocks,
		Memory: o.MemoryBytes, MemoryLimit: o.MemoryLimit, Reclaimed: o.ReclaimedBytes, PauseCount: o.PauseCount, WakeCount: o.WakeCount, RestartCount: o.RestartCount,
		ExitCode: o.ExitCode, CrashLooping: o.CrashLooping}
	if w := o.Waiting; w != nil {
		out.Waiting = &control.HostInstanceWaiting{Reason: w.Reason, Place: w.Place, Until: w.Until}
	}
	return out
}

// followHalt applies the fleet's halt whenever the server reports a change.
func (r *Reporter) followHalt(ctx context.Context) {
	control.FollowHalt(ctx, func(ctx context.Context, t control.HaltTurn) (control.HaltAnswer, error) {
		return r.Server.AwaitHalt(ctx, r.Name, t)
	}, func(a control.HaltAnswer, _ time.Time) {
		x := a.Machine(r.Host.Now())
		if was := r.Host.FleetHalted(); x != nil && was != nil && a.Mark == r.haltMark {
			return // the same halt, seen with different clocks
		}
		r.haltMark = a.Mark
		if err := r.Host.FleetHalt(x); err != nil {
			r.Log.Warn("cannot record the fleet halt", "err", err)
		}
	})
}

// converse answers the server's questions and starts the server's commands.
func (r *Reporter) converse(ctx context.Context) {
	var commands sync.WaitGroup
	defer commands.Wait()
	turn, failures := control.HostTurn{Answers: []control.HostReply{}, Wait: turnWait.Seconds()}, 0
	for ctx.Err() == nil {
		began := time.Now()
		within, cancel := context.WithTimeout(ctx, turnWait+reportLimit)
		q, err := r.Server.HostTurn(within, r.Name, turn)
		cancel()
		turn.Answers = []control.HostReply{}
		if err != nil {
			_ = delay.For(ctx, delay.Backoff(failures, reportRetry, reportMost))
			failures++
			continue
		}
		failures = 0
		late := since(began) - time.Duration(q.Waited)
		for _, x := range q.Commands[:min(len(q.Commands), control.MaxHostAnswers)] {
			commands.Go(func() { r.deliver(ctx, r.carryOut(ctx, x, late)) })
		}
		room := reportPart
		for _, x := range q.Questions[:min(len(q.Questions), control.MaxHostAnswers)] {
			a := r.answer(ctx, x)
			if room -= len(a.body); room >= 0 {
				turn.Answers = append(turn.Answers, a.HostReply)
			}
		}
		if len(q.Questions)+len(q.Commands) == 0 && time.Since(began) < reportSpace {
			_ = delay.For(ctx, reportSpace) // in case the server answers at once
		}
	}
}

// weighed is an answer with its encoded size.
type weighed struct {
	control.HostReply
	body []byte
}

// answer returns the explanation of an instance's state that the server asks for.
func (r *Reporter) answer(ctx context.Context, q control.HostQuestion) weighed {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	a := control.HostReply{ID: q.ID}
	y, err := r.Host.Why(ctx, q.Instance, q.At)
	var missing *host.NotFoundError
	var invalid *host.InvalidError
	switch {
	case errors.As(err, &missing):
		a.Status = http.StatusNotFound
	case errors.As(err, &invalid):
		a.Status = http.StatusUnprocessableEntity
	case err != nil:
		a.Status = http.StatusServiceUnavailable
	default:
		i := reported(y.Instance)
		a.Why = &control.HostWhy{Account: y.Account, Host: r.Name, Readings: "live", Instance: &i, Events: r.events(i.ID, q.At)}
	}
	if err != nil {
		a.Detail = err.Error()
	}
	a.Fit()
	body, err := json.Marshal(a)
	if err != nil {
		a = control.HostReply{ID: q.ID, Status: http.StatusInternalServerError, Detail: err.Error()}
	}
	return weighed{a, body}
}

// events returns the latest events of an instance, up to until unless that is zero.
func (r *Reporter) events(id string, until time.Time) []control.HostEvent {
	all, _, _ := r.Host.Events().Since(0)
	out := []control.HostEvent{}
	for _, e := range slices.Backward(all) {
		if e.ID == id && (until.IsZero() || !e.Time.After(until)) && len(out) < control.MaxHostEvents {
			out = append(out, control.HostEvent{Time: e.Time, Type: e.Type, State: e.State, By: e.By, Reason: e.Reason})
		}
	}
	slices.Reverse(out)
	return out
}
