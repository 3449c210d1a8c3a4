package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// state is stored on disk and survives restarts of the agent. Its times are wall
// clock times.
type state struct {
	Generation   uint64            `json:"generation"` // number of the last intent
	BootID       string            `json:"boot_id"`    // boot in which the state was written
	SnoozedUntil time.Time         `json:"snoozed_until,omitzero"`
	SnoozedBy    string            `json:"snoozed_by,omitempty"`
	Leases       []idle.Lease      `json:"leases,omitempty"`
	Halted       *idle.HaltedBy    `json:"halted,omitempty"`
	WarnedAt     time.Time         `json:"warned_at,omitzero"`
	OwnWriteAt   time.Time         `json:"own_write_at,omitzero"`
	Last         *agentctl.Outcome `json:"last,omitempty"` // the action in progress or the last one
	Vetoes       veto              `json:"vetoes,omitzero"`
	Completed    *completion       `json:"completed,omitempty"`
	Obeyed       time.Time         `json:"obeyed,omitzero"` // time of the completion file that was last acted on
	ResumedAt    time.Time         `json:"resumed_at,omitzero"`
	Server       *serverSaid       `json:"server,omitempty"`
	FleetHalt    *idle.HaltedBy    `json:"fleet_halt,omitempty"`    // as last reported by the server
	ServerWarned string            `json:"server_warned,omitempty"` // ID of the last warning requested by the server

	Warned   map[string]*announced `json:"warned,omitempty"`   // pending warnings, by reason; the key serverWarning is for the server's
	Extended *extension            `json:"extended,omitempty"` // a user's extension of the TTL
	Prepared *prepared             `json:"prepared,omitempty"` // set from the start of pre-stop until the stop happens or post-cancel has run
}

// veto records for how long pre-stop hooks have held a stop since the machine became
// idle.
type veto struct {
	Since time.Time `json:"since,omitzero"` // time of the first veto
	Until time.Time `json:"until,omitzero"`
	Kind  string    `json:"kind,omitempty"`
}

// completion records that the machine's work is done. It is valid for one boot.
type completion struct {
	BootID  string    `json:"boot_id"`
	At      time.Time `json:"at"`
	By      string    `json:"by"`
	Status  string    `json:"status"`
	Message string    `json:"message"`
	FileAt  time.Time `json:"file_at,omitzero"` // when the completion file was written; zero if the completion was signaled differently
}

const stateFile = "state.json"

func (a *Agent) load() error {
	a.loadCache()
	b, err := a.o.Disk.Load(stateFile)
	if errors.Is(err, fs.ErrNotExist) {
		a.state = state{}
		return nil
	}
	if err == nil {
		err = json.Unmarshal(b, &a.state)
	}
	if err != nil {
		// The unreadable state may have contained a halt, so the agent does nothing
		// until a user lifts the halt that is set here.
		a.state = state{Halted: &idle.HaltedBy{Since: a.now(), By: "agent",
			Reason: "its state on disk cannot be read and may have contained a halt: " + err.Error()}}
		a.alarm("state_unreadable", "The agent's state on disk cannot be read: "+err.Error()+".")
	}
	if last := a.state.Last; last != nil && last.Hook != nil {
		last.Hook.Command = tags.Program(last.Hook.Command)
	}
	if !a.state.OwnWriteAt.IsZero() {
		a.o.Own.Note(a.state.OwnWriteAt)
	}
	return nil
}

// resumeState completes the loaded state at a start: it determines the outcome of an
// action that was in progress, and removes what a new boot invalidates.
func (a *Agent) resumeState(now time.Time) {
	fresh := a.state.BootID != a.o.BootID
	if a.o.Reporter == nil {
		a.state.Server, a.state.FleetHalt = nil, nil // from a server that is no longer configured
	}
	if s := a.state.Server; s != nil && s.Halted { // written by an earlier version
		if a.state.FleetHalt == nil {
			a.state.FleetHalt = &idle.HaltedBy{Fleet: true, Since: now}
		}
		s.Halted = false
	}
	unsure := false
	if last := a.state.Last; last != nil && last.EndedAt == nil {
		ended := now
		unsure = last.Phase == phaseCalling || last.Phase == phaseAccepted
		last.EndedAt = &ended
		switch {
		case fresh && (last.Phase == phaseCalling || last.Phase == phaseAccepted):
			last.Phase = phaseDone
			last.Detail = "the machine was down"
			if last.Action == actionHibernate {
				last.Detail = "the machine was down and lost its memory: it booted"
			}
			a.tagged.final(last.Action)
		case fresh:
			last.Phase, last.Detail = phaseCancelled, "the machine went down before the call was sent"
		default:
			last.Phase, last.Detail = phaseCancelled, "the agent was restarted during the action"
		}
	}
	if fresh {
		a.state.Completed, a.state.WarnedAt, a.state.Vetoes = nil, time.Time{}, veto{}
		a.state.Warned, a.state.Prepared = nil, nil
	} else if p := a.state.Prepared; p != nil && unsure {
		p.NotBefore = now.Add(acceptedWait) // the machine may still go down
	}
	a.clearWarnings()
	a.state.BootID = a.o.BootID
	kind := "The agent was restarted; the idle clock starts again."
	if fresh {
		kind = "The machine has booted; the idle clock starts."
	}
	a.record(agentctl.Entry{Kind: "start", Sentence: kind, Outcome: copyOf(a.state.Last)})
	a.save(nil)
}

// save writes the state outside the loop. It calls done, which may be nil, when the
// state is durable.
func (a *Agent) save(done func(error)) {
	a.state.OwnWriteAt = a.o.Own.Last()
	b, err := json.Marshal(a.state)
	if err != nil {
		panic("the agent's state cannot be written as JSON: " + err.Error()) // cannot happen: plain data
	}
	a.saver.save(stateFile, b, func(err error) {
		if done != nil {
			done(err)
		}
		a.post(func() {
			a.alarmIf(err != nil, "state_unsaved", fmt.Sprintf("The agent's state cannot be written to disk: %v.", err))
		})
	})
}

// durable calls change in the loop and waits until the changed state is on disk. It
// must be called outside the loop.
func (a *Agent) durable(ctx context.Context, change func() error) error {
	saved := make(chan error, 1)
	var refused error
	err := a.ask(ctx, func() {
		if refused = change(); refused == nil {
			a.save(func(err error) { saved <- err })
		}
	})
	if err = errors.Join(err, refused); err != nil {
		return err
	}
	select {
	case err := <-saved:
		return err
	case <-ctx.Done():
		return fmt.Errorf("cannot wait for the state to be written: %w", context.Cause(ctx))
	case <-a.ended:
		return errors.New("cannot write the state: the agent is shutting down")
	}
}

// saver writes files one after another, outside the loop, so that a hanging disk
// blocks nothing else. If several versions of a file are pending, only the newest is
// written.
type saver struct {
	disk Disk
	wake chan struct{}

	mu      sync.Mutex
	pending map[string]*version
	order   []string
	since   time.Time // start of the write in progress; zero if there is none
}

type version struct {
	b    []byte
	done []func(error)
}

func newSaver(d Disk) *saver {
	return &saver{disk: d, wake: make(chan struct{}, 1), pending: map[string]*version{}}
}

func (s *saver) save(name string, b []byte, done func(error)) {
	s.mu.Lock()
	v := s.pending[name]
	if v == nil {
		v = &version{}
		s.pending[name] = v
		s.order = append(s.order, name)
	}
	v.b, v.done = b, append(v.done, done)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// hangs returns how long the write in progress has taken if that is longer than
// diskLimit; otherwise 0.
func (s *saver) hangs() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := time.Since(s.since); !s.since.IsZero() && d >= diskLimit {
		return d
	}
	return 0
}

// run writes files until ctx ends, and then what is still pending.
func (s *saver) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			s.drain()
			return
		case <-s.wake:
			s.drain()
		}
	}
}

func (s *saver) drain() {
	for {
		s.mu.Lock()
		if len(s.order) == 0 {
			s.mu.Unlock()
			return
		}
		name := s.order[0]
		s.order = s.order[1:]
		v := s.pending[name]
		delete(s.pending, name)
		s.since = time.Now()
		s.mu.Unlock()
		err := s.disk.Save(name, v.b)
		s.mu.Lock()
		s.since = time.Time{}
		s.mu.Unlock()
		for _, done := range v.done {
			done(err)
		}
	}
}
