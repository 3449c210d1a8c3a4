package instance

import (
	"context"
	"fmt"
	"time"

	"lull/internal/cli/term"
	"lull/internal/cli/worker"
	"lull/internal/protocol/hostctl"
)

// watched runs a verb of a host and, while it takes long, shows what happens
// to the instance: its files are fetched, it waits for memory, it starts. Ctrl-C
// detaches: the daemon continues with it.
func (c verbs) watched(ctx context.Context, cl *hostctl.Client, name string, do func() error) error {
	looking, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	p := c.Progress()
	go func() {
		defer close(ended)
		c.narrate(looking, p, func() (hostctl.Instance, error) { return cl.Get(looking, name) })
	}()
	err := do()
	stop()
	<-ended
	p.Close()
	if err != nil && ctx.Err() != nil {
		fmt.Fprintf(c.Err, "lull: detached; the operation continues. Check it with: lull inspect %s\n", name)
		return term.Exit(term.ExitDone)
	}
	return err
}

// narrate shows, until ctx ends, what look finds, as it changes.
func (c verbs) narrate(ctx context.Context, p *term.Progress, look func() (hostctl.Instance, error)) {
	last, waited := "", false
	for wait := time.After(term.SlowAfter); ; wait = time.After(worker.PollEvery) {
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
		p.Line(o.Name + " " + line)
		p.Status(o.Name + " " + o.State)
	}
}

// progress is how an instance is, in a line, and what of it is worth another line
// when it changes: what is free changes all the time, a place does not.
func progress(o hostctl.Instance) (key, line string) {
	if w := o.Waiting; w != nil {
		return fmt.Sprint("waits ", w.Place), fmt.Sprintf("%s, queued at position %d until %s: %s", o.State, w.Place, w.Until.Local().Format(time.TimeOnly), w.Reason)
	}
	line = o.State
	if o.StatusReason != "" {
		line += ": " + term.Localized(o.StatusReason)
	}
	return line, line
}
