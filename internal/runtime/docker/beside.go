package docker

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Docker runs two kinds of commands beside a container's program. A health check is
// not use of the container, so its CPU time is subtracted. Any other command is a
// user's, and holds the container while it runs. Docker's events report the start
// and end of both. A health check is recognized by its command.

// Actions of the events about commands. The command line follows execStart.
const (
	execStart = "exec_start: "
	execDie   = "exec_die"
)

// healthCommand returns the command of the health check in the form in which events
// show it, or "" if there is none.
func (d *details) healthCommand() string {
	if d.Config.Healthcheck == nil || len(d.Config.Healthcheck.Test) < 2 {
		return ""
	}
	args := d.Config.Healthcheck.Test[1:]
	switch d.Config.Healthcheck.Test[0] {
	case "CMD":
	case "CMD-SHELL":
		shell := d.Config.Shell
		if len(shell) == 0 {
			shell = []string{"/bin/sh", "-c"}
		}
		args = slices.Concat(shell, args)
	default:
		return ""
	}
	return strings.TrimSpace(strings.Join(args, " "))
}

// checks measures the CPU time of a container's health checks. While a check runs,
// it is the CPU time of the container's group minus that of the program's own
// process tree. A window lasts while at least one check runs.
type checks struct {
	group, main func() (time.Duration, error)

	mu      sync.Mutex
	running map[string]bool // by exec ID
	open    bool            // whether a window is open; atGroup and atMain are the CPU times when it began
	atGroup time.Duration
	atMain  time.Duration
	done    time.Duration // CPU time of finished windows
}

// begin notes that a health check starts.
func (c *checks) begin(exec string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil {
		c.running = map[string]bool{}
	}
	c.running[exec] = true
	if c.open {
		return
	}
	var err, gerr error
	c.atMain, err = c.main() // read first, so that a delay makes the check's CPU time too small rather than too large
	c.atGroup, gerr = c.group()
	c.open = err == nil && gerr == nil // if a reading failed, the check's CPU time counts as the container's
}

// end notes that a command has ended, and reports whether it was a health check.
func (c *checks) end(exec string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.running[exec] {
		return false
	}
	delete(c.running, exec)
	if len(c.running) == 0 {
		c.closeLocked()
	}
	return true
}

// endAll treats every running check as ended. It is called when Docker's events are
// interrupted.
func (c *checks) endAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running = nil
	c.closeLocked()
}

func (c *checks) closeLocked() {
	c.done += c.currentLocked()
	c.open = false
}

// currentLocked returns the CPU time of the checks in the open window so far, or
// zero if a reading fails. c.mu must be held.
func (c *checks) currentLocked() time.Duration {
	if !c.open {
		return 0
	}
	group, err := c.group()
	if err != nil {
		return 0
	}
	main, err := c.main()
	if err != nil {
		return 0
	}
	return max(group-c.atGroup-max(main-c.atMain, 0), 0)
}

// used returns the CPU time of all checks so far.
func (c *checks) used() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.done + c.currentLocked()
}

// besides holds instances for users' commands that run beside containers.
type besides struct {
	mu sync.Mutex
	by map[string]map[string]func() // by container and exec ID; the function ends the hold
}

// add holds the instance until remove is called for the command.
func (b *besides) add(h Host, container, exec, id, command string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.by[container][exec] != nil {
		return
	}
	if b.by == nil {
		b.by = map[string]map[string]func(){}
	}
	if b.by[container] == nil {
		b.by[container] = map[string]func(){}
	}
	ctx, end := context.WithCancel(context.Background())
	b.by[container][exec] = end
	go func() {
		leave, err := h.KeepAwake(ctx, id, command)
		if err != nil {
			return // the command has ended, or the instance was removed
		}
		<-ctx.Done()
		leave()
	}()
}

func (b *besides) remove(container, exec string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if end := b.by[container][exec]; end != nil {
		end()
	}
	delete(b.by[container], exec)
	if len(b.by[container]) == 0 {
		delete(b.by, container)
	}
}

// removeAll ends every hold of a container, or of all containers if container
// is empty.
func (b *besides) removeAll(container string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c, execs := range b.by {
		if container == "" || c == container {
			for end := range maps.Values(execs) {
				end()
			}
			delete(b.by, c)
		}
	}
}

// command handles an event about a command. It does not block. unproven means that
// the caller must call prove for the command and w, the run in which it starts.
func (f *follower) command(e event) (w *Work, exec string, unproven bool) {
	exec = e.Actor.Attributes["execID"]
	w = f.r.workOf(e.Actor.ID)
	command, starts := strings.CutPrefix(e.Action, execStart)
	switch {
	case w == nil || exec == "":
	case starts && w.isCheck(command):
		w.checks.begin(exec)
		return w, exec, true
	case starts:
		if _, own := f.r.api.own.Load(exec); !own { // for a command of its own, the host already holds the instance
			f.r.beside.add(f.h, w.container, exec, w.id, strings.TrimSpace(command))
			return w, exec, true
		}
	case e.Action == execDie:
		f.r.over(w, exec)
	}
	return w, exec, false
}

// over ends the accounting of a health check, or the hold of any other command.
func (r *Runtime) over(w *Work, exec string) {
	if !w.checks.end(exec) {
		r.beside.remove(w.container, exec)
	}
}

// prove waits until a command has started, and calls over if it could not: Docker
// reports no end for such a command.
func (r *Runtime) prove(ctx context.Context, w *Work, exec string) {
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		x, err := r.api.inspectExec(ctx, exec)
		switch {
		case err == nil && x.Running && x.Pid > 0:
			return
		case err == nil && !x.Running, isStatus(err, 404):
			r.over(w, exec)
			return
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}

func (w *Work) isCheck(command string) bool {
	return w.health != "" && strings.TrimSpace(command) == w.health
}

// findCommands holds a container for the users' commands that already run
// beside it.
func (f *follower) findCommands(ctx context.Context, d *details) error {
	for _, exec := range d.ExecIDs {
		if err := f.r.findCommand(ctx, f.h, d.ID, exec); err != nil {
			return err
		}
	}
	return nil
}

func (r *Runtime) findCommand(ctx context.Context, h Host, container, exec string) error {
	x, err := r.api.inspectExec(ctx, exec)
	if isStatus(err, 404) {
		return nil
	}
	if err != nil {
		return err
	}
	w := r.workOf(container)
	_, own := r.api.own.Load(exec)
	if !x.Running || own || w == nil || w.isCheck(x.command()) {
		return nil
	}
	r.beside.add(h, container, exec, w.id, x.command())
	r.prove(ctx, w, exec) // if it ended before it was added, no event will report its end
	return nil
}
