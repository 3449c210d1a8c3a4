package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

// waiting contains the --wait flags.
type waiting struct {
	on     bool
	within time.Duration
}

func (w *waiting) bind(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&w.on, "wait", "w", false, "wait until it is done, showing progress")
	bindSpan(cmd.Flags(), &w.within, "timeout", 30*time.Minute, "how long to wait")
}

// pollEvery is how often a waiting verb looks, besides when an event comes.
const pollEvery = 2 * time.Second

// goal is the state that a verb waits for.
type goal struct {
	what string // follows "wait longer for NAME to"
	// met reports whether a worker is there, or why it does not get there any more.
	met func(w fleet.Worker) (bool, error)
}

// reach is the goal of a worker that is brought to a status.
func reach(to power.Worker) goal {
	return goal{"be " + string(to), func(w fleet.Worker) (bool, error) {
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

// overtaken says who wanted something else of a worker that was to get to a
// status.
func overtaken(w *fleet.Worker, to power.Worker) string {
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

// arrive shows the worker, and with --wait first waits until it is at to. It
// fails if the worker fails, or will not get there any more.
func (c *cli) arrive(ctx context.Context, cl *control.Client, w fleet.Worker, to power.Worker, wait waiting) error {
	return c.follow(ctx, cl, w, reach(to), wait, func(w fleet.Worker) error {
		return c.print(w, func(out io.Writer) { fmt.Fprintf(out, "%s %s\n", w.Name, w.Status) })
	})
}

// follow waits for a goal if it is to, and then shows the worker. Ctrl-C
// detaches: what was asked for continues.
func (c *cli) follow(ctx context.Context, cl *control.Client, w fleet.Worker, g goal, wait waiting, show func(fleet.Worker) error) error {
	if wait.on {
		var err error
		if w, err = c.await(ctx, cl, w, g, wait.within); err != nil {
			if ctx.Err() != nil {
				fmt.Fprintf(c.err, "lull: detached; the operation continues. Check it with: lull worker get %s\n", w.Name)
				return nil
			}
			return err
		}
	}
	return show(w)
}

func (c *cli) await(parent context.Context, cl *control.Client, w fleet.Worker, g goal, within time.Duration) (fleet.Worker, error) {
	ctx, cancel := context.WithTimeout(parent, within)
	defer cancel()
	changed := make(chan struct{}, 1)
	stream, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		// Without the stream the polls below find the change a little later.
		_ = cl.Follow(stream, control.Events{WorkerID: w.ID, Each: func(audit.Entry) error {
			select {
			case changed <- struct{}{}:
			default:
			}
			return nil
		}})
	}()
	defer func() { stop(); <-ended }()
	last, tick := "", time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if now := standing(w); now != last { // the reason for a delay is shown too
			last = now
			fmt.Fprintf(c.err, "%s  %s %s\n", time.Now().Format(time.TimeOnly), w.Name, now)
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
			fmt.Fprintln(c.err, "lull:", unreachable)
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

// standing is how a worker is, in a line.
func standing(w fleet.Worker) string {
	s := strings.TrimSpace(string(w.Status) + " " + w.StatusReason)
	if op := w.License.PendingOperation; op != "" {
		s += ", license " + op
	}
	return s
}

// tellAfter is how long a verb of a host may take before it shows what happens.
const tellAfter = 2 * time.Second

// watched runs a verb of a host and, while it takes long, shows what happens
// to the instance: its files are fetched, it waits for memory, it starts. Ctrl-C
// detaches: the daemon continues with it.
func (c *cli) watched(ctx context.Context, cl *hostctl.Client, name string, do func() error) error {
	looking, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.narrate(looking, func() (hostctl.Instance, error) { return cl.Get(looking, name) })
	}()
	err := do()
	stop()
	<-ended
	if err != nil && ctx.Err() != nil {
		fmt.Fprintf(c.err, "lull: detached; the operation continues. Check it with: lull instance info %s\n", name)
		return &exitError{exitDone}
	}
	return err
}

// narrate shows, until ctx ends, what look finds, as it changes.
func (c *cli) narrate(ctx context.Context, look func() (hostctl.Instance, error)) {
	last, waited := "", false
	for wait := time.After(tellAfter); ; wait = time.After(pollEvery) {
		select {
		case <-ctx.Done():
			return
		case <-wait:
		}
		o, err := look()
		if err != nil {
			continue
		}
		now, line := progress(o)
		if now == last {
			continue
		}
		if waited && o.Waiting == nil {
			line = "resuming: " + line
		}
		last, waited = now, o.Waiting != nil
		fmt.Fprintf(c.err, "%s  %s %s\n", time.Now().Format(time.TimeOnly), o.Name, line)
	}
}

// progress is how an instance is, in a line, and what of it is worth another line
// when it changes: what is free changes all the time, a place does not.
func progress(o hostctl.Instance) (key, line string) {
	if w := o.Waiting; w != nil {
		return fmt.Sprint("waits ", w.Place), fmt.Sprintf("%s, queued at position %d until %s: %s", o.State, w.Place, w.Until.Local().Format(time.TimeOnly), w.Reason)
	}
	line = strings.TrimSpace(o.State + " " + o.StatusReason)
	return line, line
}
