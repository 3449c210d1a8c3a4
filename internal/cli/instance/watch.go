package instance

import (
	"context"
	"fmt"
	"time"

	"lull/internal/cli/term"
	"lull/internal/cli/worker"
	"lull/internal/protocol/hostctl"
)

// watched calls do, which runs a verb of the host. If that takes long, it shows the
// progress of the instance: that its files are fetched, that it waits for memory,
// that it starts. Ctrl-C detaches, and the daemon continues.
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

// narrate prints the progress of the instance that look returns, whenever it changes,
// until ctx ends.
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

// progress returns a line about an instance's state, and a key. A new line is printed
// when the key changes. So the place in the queue is part of the key, and the free
// memory is not.
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
