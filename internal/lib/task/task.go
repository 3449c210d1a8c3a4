// Package task runs the long-running parts of a process as one group. They are
// started in order, each when the previous one is ready, and stopped in reverse
// order, each when the one started after it has ended.
//
// It guarantees that a task is not canceled while one that was started after it
// still runs (unless that one missed its deadline), that the first error stops
// all tasks, that every error names its task, and that Run returns only when all
// tasks have ended or were reported as overdue. A group is itself a task, so
// groups can be nested. Tasks are not restarted: a task that may fail and be
// retried must do that inside its own Run.
package task

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// Task is a long-running part of a process.
type Task interface {
	// Run works until ctx ends or it fails. After ctx has ended, nil and the
	// context's error both mean that the task stopped as requested.
	Run(ctx context.Context) error
	// Ready returns a channel that is closed once the task is working, so that
	// dependent tasks may start. It returns the same channel at each call.
	Ready() <-chan struct{}
	// String returns the name of the task for errors and logs.
	String() string
}

// DefaultStopTimeout is how long a task may take to end if its group does not
// set a limit.
const DefaultStopTimeout = 30 * time.Second

// Group runs tasks together. Set its fields before Run. A Group can run only
// once.
type Group struct {
	// StartTimeout is how long each task may take to become ready; 0 means
	// forever.
	StartTimeout time.Duration
	// StopTimeout is how long each task may take to end after its context is
	// canceled; 0 means DefaultStopTimeout. A task that takes longer causes an
	// *OverdueError and its goroutine is abandoned, so the process should exit.
	StopTimeout time.Duration

	name  string
	tasks []Task
	ready chan struct{}
}

var _ Task = (*Group)(nil)

// NewGroup returns a group of tasks in the order in which they are to start. name
// is used in errors and may be empty.
func NewGroup(name string, tasks ...Task) *Group {
	return &Group{name: name, tasks: tasks, ready: make(chan struct{})}
}

// Run runs tasks as a group with the default limits.
func Run(ctx context.Context, tasks ...Task) error { return NewGroup("", tasks...).Run(ctx) }

// Ready returns a channel that is closed when every task of the group is ready.
func (g *Group) Ready() <-chan struct{} { return g.ready }

func (g *Group) String() string { return g.name }

// OverdueError is part of Run's error for each task that did not end within the
// stop timeout.
type OverdueError struct {
	Task  string
	After time.Duration
}

func (e *OverdueError) Error() string {
	return fmt.Sprintf("cannot stop %s: still running after %v", e.Task, e.After)
}

// running is a started task.
type running struct {
	task  Task
	stop  context.CancelFunc
	ended chan struct{} // closed after err is set
	err   error
}

// Run starts the tasks and waits until all have ended. It returns nil if ctx
// ended and all stopped as requested, or if all ended by themselves without an
// error. Otherwise it returns the errors of all tasks joined, the first one
// first.
func (g *Group) Run(ctx context.Context) error {
	// errgroup's context ends with the first error, or with ctx. The tasks'
	// contexts are not derived from it, because they would then all end at once
	// instead of in order.
	eg, first := errgroup.WithContext(ctx)
	base := context.WithoutCancel(ctx)
	var started []*running
	var errs []error
	for _, t := range g.tasks {
		r := start(base, eg, t)
		started = append(started, r)
		if err := g.await(first, r); err != nil {
			errs = append(errs, err)
		}
		if first.Err() != nil || len(errs) > 0 {
			break
		}
	}
	if first.Err() == nil && len(errs) == 0 {
		close(g.ready)
		waitAny(first, started)
	}
	if cause := context.Cause(first); ctx.Err() == nil && cause != nil && cause != context.Canceled {
		errs = append(errs, cause)
	}
	errs = append(errs, g.stop(started, errs)...)
	return errors.Join(errs...)
}

func start(base context.Context, eg *errgroup.Group, t Task) *running {
	ctx, stop := context.WithCancel(base)
	r := &running{task: t, stop: stop, ended: make(chan struct{})}
	eg.Go(func() error {
		defer close(r.ended)
		err := t.Run(ctx)
		if err != nil && !(ctx.Err() != nil && errors.Is(err, context.Canceled)) {
			r.err = fmt.Errorf("cannot run %s: %w", t, err)
		}
		return r.err
	})
	return r
}

// await waits until a task is ready or has ended, or everything must stop.
func (g *Group) await(first context.Context, r *running) error {
	var late <-chan time.Time
	if g.StartTimeout > 0 {
		t := time.NewTimer(g.StartTimeout)
		defer t.Stop()
		late = t.C
	}
	select {
	case <-r.task.Ready():
	case <-r.ended:
		r.reported(first)
	case <-first.Done():
	case <-late:
		return fmt.Errorf("cannot start %s: not ready after %v", r.task, g.StartTimeout)
	}
	return nil
}

// waitAny waits for the first error, the end of the group's context or the
// natural end of every task.
func waitAny(first context.Context, started []*running) {
	for _, r := range started {
		select {
		case <-r.ended:
			r.reported(first)
		case <-first.Done():
			return
		}
	}
}

// reported waits until the group has received the error of an ended task. The
// task's goroutine reports the error only after it has closed ended.
func (r *running) reported(first context.Context) {
	if r.err != nil {
		<-first.Done()
	}
}

// stop ends the tasks in reverse order and returns their errors, except those
// already in known.
func (g *Group) stop(started []*running, known []error) []error {
	limit := g.StopTimeout
	if limit == 0 {
		limit = DefaultStopTimeout
	}
	var errs []error
	for i := len(started) - 1; i >= 0; i-- {
		r := started[i]
		r.stop()
		if !r.within(limit) {
			errs = append(errs, &OverdueError{Task: r.task.String(), After: limit})
			continue
		}
		if r.err != nil && !contains(known, r.err) {
			errs = append(errs, r.err)
		}
	}
	return errs
}

// within reports whether the task ends within limit. It waits up to that long.
func (r *running) within(limit time.Duration) bool {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-r.ended:
		return true
	case <-t.C:
		select {
		case <-r.ended:
			return true
		default:
			return false
		}
	}
}

// contains reports whether errs contains err, compared by identity: the same text
// from two tasks is two errors.
func contains(errs []error, err error) bool {
	for _, e := range errs {
		if e == err {
			return true
		}
	}
	return false
}

// Func returns a task that runs a function. The function must call ready once its
// work has begun; further calls have no effect.
func Func(name string, run func(ctx context.Context, ready func()) error) Task {
	return &function{name: name, run: run, ready: make(chan struct{})}
}

// Loop returns a task that runs a function and counts as ready as soon as it is
// started.
func Loop(name string, run func(ctx context.Context) error) Task {
	return Func(name, func(ctx context.Context, ready func()) error {
		ready()
		return run(ctx)
	})
}

type function struct {
	name  string
	run   func(context.Context, func()) error
	once  sync.Once
	ready chan struct{}
}

func (f *function) Run(ctx context.Context) error {
	return f.run(ctx, func() { f.once.Do(func() { close(f.ready) }) })
}

func (f *function) Ready() <-chan struct{} { return f.ready }

func (f *function) String() string { return f.name }
