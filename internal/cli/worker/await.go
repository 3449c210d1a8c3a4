package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/control"
)

// waiting contains the --wait flags.
type waiting struct {
	on, off bool
	follow  bool // wait by default if the output is a terminal
	within  time.Duration
}

func (w *waiting) bind(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&w.on, "wait", "w", false, "wait until it is done, showing progress")
	term.BindSpan(cmd.Flags(), &w.within, "timeout", 30*time.Minute, "how long to wait")
}

// bindFollow is like bind, for a verb that waits by default on a terminal.
func (w *waiting) bindFollow(cmd *cobra.Command) {
	w.bind(cmd)
	w.follow = true
	cmd.Flags().Lookup("wait").Usage = "wait until it is done, showing progress (default on a terminal)"
	cmd.Flags().BoolVar(&w.off, "no-wait", false, "return as soon as the server has accepted it")
	term.Exclusive(cmd, "wait", "no-wait")
}

// wanted reports whether a verb should wait.
func (w *waiting) wanted(t *term.Term) bool {
	return w.on || w.follow && !w.off && !t.JSON && term.IsTerminal(t.Err)
}

// PollEvery is the interval at which a waiting verb polls. Events make it poll
// earlier.
const PollEvery = 2 * time.Second

// goal is the state that a verb waits for.
type goal struct {
	what string // completes the phrase "wait longer for NAME to"
	// met reports whether a worker has reached the goal. The error is why it can no
	// longer reach the goal.
	met func(w worker.Worker) (bool, error)
}

// reach returns the goal that a worker is in status to.
func reach(to power.Worker) goal {
	return goal{"be " + string(to), func(w worker.Worker) (bool, error) {
		switch {
		case w.Status == to && w.Intent == nil:
			return true, nil
		case w.Status == power.WorkerFailed:
			return false, fmt.Errorf("cannot bring %s to %s: %s", w.Name, to, w.StatusReason)
		case w.Status == power.WorkerTerminated, w.DesiredStatus != to && w.DesiredStatus != "":
			return false, fmt.Errorf("cannot bring %s to %s: its desired status is now %s%s", w.Name, to, w.DesiredStatus, overtaken(&w, to))
		}
		return false, nil
	}}
}

// overtaken returns who or what changed the desired status of a worker that was meant
// to reach status to; "" if unknown.
func overtaken(w *worker.Worker, to power.Worker) string {
	switch {
	case to == power.WorkerRunning && w.StartWithdrawnAt != nil:
		return fmt.Sprintf(": %s canceled the start at %s", w.StartWithdrawnBy, w.StartWithdrawnAt.Format(time.RFC3339))
	case to == power.WorkerRunning && w.DesiredStatus == power.WorkerStopped && w.LastPausedBy != "":
		return fmt.Sprintf(": %s requested a stop (%s)", w.LastPausedBy, w.PauseReason)
	case to == power.WorkerStopped && w.DesiredStatus == power.WorkerRunning && w.StartBy != "":
		return ": " + w.StartBy + " requested a start"
	case to == power.WorkerStopped && w.DesiredStatus == power.WorkerRunning && w.StopCalledOff != nil:
		return ": the stop was canceled: " + w.StopCalledOff.Why
	}
	return ""
}

// arrive prints the worker, after waiting for status to if requested. It fails if the
// worker fails or can no longer reach that status.
func (c verbs) arrive(ctx context.Context, cl *control.Client, w worker.Worker, to power.Worker, wait waiting) error {
	return c.follow(ctx, cl, w, reach(to), wait, func(w worker.Worker) error {
		return c.Print(w, func(out io.Writer) { fmt.Fprintln(out, resultText(w, to)) })
	})
}

// resultText returns the state of a worker that is meant to reach status to.
func resultText(w worker.Worker, to power.Worker) string {
	if there, _ := reach(to).met(w); there {
		return fmt.Sprintf("%s is %s.", w.Name, statusText(w.Status))
	}
	becomes := map[power.Worker]string{power.WorkerRunning: "started", power.WorkerStopped: "stopped", power.WorkerTerminated: "terminated"}[to]
	return fmt.Sprintf("%s is %s and will be %s. Check it with: lull worker get %s", w.Name, statusText(w.Status), becomes, w.Name)
}

// follow waits for the goal g, if requested, and then calls show with the worker.
// Ctrl-C detaches and does not cancel the operation.
func (c verbs) follow(ctx context.Context, cl *control.Client, w worker.Worker, g goal, wait waiting, show func(worker.Worker) error) error {
	if wait.wanted(&c.Term) {
		var err error
		if w, err = c.await(ctx, cl, w, g, wait.within); err != nil {
			if ctx.Err() != nil {
				fmt.Fprintf(c.Err, "lull: detached; the operation continues. Check it with: lull worker get %s\n", w.Name)
				return nil
			}
			return err
		}
	}
	return show(w)
}

func (c verbs) await(parent context.Context, cl *control.Client, w worker.Worker, g goal, within time.Duration) (worker.Worker, error) {
	ctx, cancel := context.WithTimeout(parent, within)
	defer cancel()
	changed := make(chan struct{}, 1)
	stream, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		// If the stream fails, the polls below find changes a little later.
		_ = cl.Follow(stream, control.Events{WorkerID: w.ID, Each: func(audit.Entry) error {
			select {
			case changed <- struct{}{}:
			default:
			}
			return nil
		}})
	}()
	defer func() { stop(); <-ended }()
	last, tick := "", time.NewTicker(PollEvery)
	defer tick.Stop()
	p := c.Progress()
	defer p.Close()
	for {
		if now := standing(w); now != last { // the line also contains the reason for a delay
			last = now
			p.Line(w.Name + " " + now)
			p.Status("waiting for " + w.Name + " to " + g.what)
		}
		if there, err := g.met(w); there || err != nil {
			return w, err
		}
		select {
		case <-ctx.Done():
			return w, fmt.Errorf("timed out waiting for %s to %s: it is %s", w.Name, g.what, standing(w))
		case <-changed:
		case <-tick.C:
		}
		next, err := cl.Worker(ctx, w.ID)
		if unreachable, ok := errors.AsType[*httpx.UnreachableError](err); ok {
			p.Line(unreachable.Error())
			continue
		}
		if err != nil && ctx.Err() == nil {
			return w, err
		}
		if err == nil {
			w = next
		}
	}
}

// standing returns a line about the state of a worker.
func standing(w worker.Worker) string {
	s := strings.TrimSpace(string(w.Status) + " " + term.Localized(w.StatusReason))
	if op := w.License.PendingOperation; op != "" {
		s += ", license " + op
	}
	return s
}
