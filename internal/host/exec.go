package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// Exec runs a command inside an instance, which it resumes first like Attach, and
// returns the output. The command is ended when ctx ends.
func (h *Host) Exec(ctx context.Context, ref string, r hostctl.ExecRequest) (out hostctl.ExecResult, err error) {
	err = h.Attach(ctx, ref, r, func(run Run) error {
		out, err = instance.Capture(func(s instance.Streams) (int, error) { return run(ctx, s) })
		return err
	})
	return out, err
}

// Run runs a command with the given streams and returns its exit code. The command
// is ended when ctx ends.
type Run func(ctx context.Context, s instance.Streams) (code int, err error)

// Attach prepares an instance for a command and calls with, which runs it. It
// resumes a paused instance first, because a freeze would include the command, and
// keeps the instance awake until with returns. It returns with's error, or why the
// command may not run.
func (h *Host) Attach(ctx context.Context, ref string, r hostctl.ExecRequest, with func(Run) error) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	rt, ok := i.rt.(instance.Execer)
	if !ok {
		return &RefusedError{Name: i.name(), What: "run a command beside", Reason: "its runtime cannot"}
	}
	if len(r.Command) == 0 || r.Command[0] == "" {
		return &InvalidError{errors.New("cannot run a command: it is empty")}
	}
	leave, err := h.hold(ctx, i, strings.Join(r.Command, " "))
	if err != nil {
		return err
	}
	defer leave()
	if err := h.Resume(ctx, ref, ByManual); err != nil {
		return err
	}
	return with(func(ctx context.Context, s instance.Streams) (int, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(h.ctx, cancel)()
		return rt.Exec(ctx, i.id, r, s)
	})
}

// hold keeps an instance awake for a command that runs inside it, until leave is
// called.
func (h *Host) hold(ctx context.Context, i *inst, command string) (leave func(), err error) {
	if len(command) > maxShown {
		command = strings.ToValidUTF8(command[:maxShown], "") + "..."
	}
	note := func(ctx context.Context, change func()) error {
		if err := i.acquireCtx(ctx); err != nil {
			return err
		}
		i.mu.Lock()
		change()
		i.rec.LastActivityAt = h.Now()
		i.mu.Unlock()
		i.release()
		return nil
	}
	err = note(ctx, func() { i.says.beside = append(i.says.beside, &command) })
	return func() {
		// This fails only when the host ends, after which nothing is paused.
		_ = note(h.ctx, func() {
			i.says.beside = slices.DeleteFunc(i.says.beside, func(c *string) bool { return c == &command })
		})
	}, err
}

// KeepAwake keeps an instance awake for a command that another program runs inside
// it, until leave is called. It first wakes an instance that lull paused, and
// retries if that fails. An instance paused outside lull stays paused. The error is
// a *NotFoundError or ctx's.
func (h *Host) KeepAwake(ctx context.Context, ref, command string) (leave func(), err error) {
	i, err := h.find(ref)
	if err != nil {
		return nil, err
	}
	if leave, err = h.hold(ctx, i, command); err != nil {
		return nil, err
	}
	defer i.ask()()
	if err := i.acquireCtx(ctx); err != nil {
		leave()
		return nil, err
	}
	defer i.release()
	i.serve()
	if i.stabilize() == nil && i.state().Asleep() && !i.pausedByOthers() {
		i.wakeNow(ByManual, "a command runs beside it: "+command)
	}
	return leave, nil
}

// maxShown is the maximum length of a displayed command, in bytes.
const maxShown = 60

// besideLocked describes the commands that run inside i, or returns "". i.mu must
// be held.
func (i *inst) besideLocked() string {
	switch n := len(i.says.beside); n {
	case 0:
		return ""
	case 1:
		return "A command runs beside it: " + *i.says.beside[0] + "."
	default:
		return fmt.Sprintf("%d commands run beside it, the first: %s.", n, *i.says.beside[0])
	}
}
