package container

import (
	"cmp"
	"context"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/runtime/process"
)

// Work is one run; it implements instance.Workload. Its main process is runc,
// which exits with the program's code.
type Work struct {
	*process.Work
	r    *Runtime
	id   string
	stop syscall.Signal // the image's replacement for SIGTERM; 0 for none
	init int            // PID on the host of the container's first process; 0 if it never started
}

// Signal implements instance.Workload. The signal goes to the program, not to runc,
// and SIGTERM is replaced by the image's stop signal. A frozen program receives it
// when it is thawed. As the first process of its PID namespace, the program does
// not end on a signal that it does not handle.
func (w *Work) Signal(sig syscall.Signal) error {
	if sig == syscall.SIGTERM {
		sig = w.stopSignal()
	}
	if w.init == 0 {
		return fmt.Errorf("cannot signal %s: %w", w.id, syscall.ESRCH)
	}
	fd, err := unix.PidfdOpen(w.init, 0)
	if err != nil {
		return fmt.Errorf("cannot signal %s: %w", w.id, err)
	}
	defer unix.Close(fd)
	// This is checked after the descriptor has pinned the process.
	switch ours, err := w.Holds(w.init); {
	case err != nil:
		return fmt.Errorf("cannot signal %s: %w", w.id, err)
	case !ours:
		return fmt.Errorf("cannot signal %s: %w", w.id, syscall.ESRCH)
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil {
		return fmt.Errorf("cannot signal %s: %w", w.id, err)
	}
	return nil
}

func (w *Work) stopSignal() syscall.Signal { return cmp.Or(w.stop, syscall.SIGTERM) }

// Exiting implements instance.Workload.
func (w *Work) Exiting() (bool, error) {
	if w.init == 0 { // there was no process to signal
		return false, nil
	}
	return w.SignalPending(w.init, w.stopSignal())
}

// Explain implements instance.Explainer.
func (w *Work) Explain(e instance.Exit) instance.Exit { return w.r.explain(w.id, e) }

// Kill implements instance.Workload.
func (w *Work) Kill(ctx context.Context) error {
	if err := w.Work.Kill(ctx); err != nil {
		return err
	}
	return w.r.sweep(ctx, w.id)
}
