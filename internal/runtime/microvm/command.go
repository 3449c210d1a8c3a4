package microvm

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"lull/internal/core/instance"
	"lull/internal/protocol/guest"
)

// Exec runs a command in an instance's guest, with its program's user and
// environment, and waits for it. If ctx ends first the command is killed.
func (r *Runtime) Exec(ctx context.Context, id string, q instance.Command) (instance.Outcome, error) {
	w := r.work(id)
	if w == nil || w.isFrozen() {
		return instance.Outcome{}, errors.New("cannot run a command: the instance does not run")
	}
	c := guest.ExecCall{Command: q.Command, Env: q.Env, Dir: q.Dir, Timeout: maxExec.Milliseconds()}
	if d, ok := ctx.Deadline(); ok {
		c.Timeout = max(time.Until(d).Milliseconds(), 1)
	}
	out := new(printed)
	c.Number = w.prints(out)
	defer w.printed.Delete(c.Number)
	var a guest.ExecAnswer
	err := w.call(ctx, maxExec, guest.Exec, c, &a)
	var refused *guest.Error
	if errors.As(err, &refused) && refused.Code == guest.InvalidParams { // a guest agent too old for output notes
		c.Number = 0
		err = w.call(ctx, maxExec, guest.Exec, c, &a)
	}
	if err != nil {
		if !errors.As(err, &refused) {
			go w.cancelCommand(c.Number)
		}
		return instance.Outcome{}, err
	}
	out.add(1, a.Stdout)
	out.add(2, a.Stderr)
	return out.outcome(a.Code, a.Truncated), nil
}

// cancelCommand makes the guest kill a command. A guest that cannot be reached
// kills it when another host connects.
func (w *Work) cancelCommand(number uint64) {
	if p, _ := w.voice(); p != nil {
		_ = p.Notify(guest.Cancel, guest.CancelCall{Number: number})
	}
}

// printed collects the output of a command in a guest.
type printed struct {
	mu      sync.Mutex
	streams [2][]byte
	cut     bool
}

// prints returns the number under which out collects output.
func (w *Work) prints(out *printed) uint64 {
	n := rand.Uint64N(1<<53) + 1 // must not clash with numbers of earlier daemons
	w.printed.Store(n, out)
	return n
}

// output records a part of a command's output. Output that is not awaited is
// dropped.
func (w *Work) output(n guest.OutputNote) {
	if out, ok := w.printed.Load(n.Number); ok {
		out.(*printed).add(n.Stream, n.Data)
	}
}

// add appends to a stream, 1 or 2, up to its limit.
func (o *printed) add(stream int, b []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if stream != 1 && stream != 2 {
		return
	}
	s := &o.streams[stream-1]
	if room := instance.MaxOutput - len(*s); len(b) > room {
		b, o.cut = b[:room], true
	}
	*s = append(*s, b...)
}

func (o *printed) outcome(code int, cut bool) instance.Outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	return instance.Outcome{ExitCode: code, Stdout: string(o.streams[0]), Stderr: string(o.streams[1]), Truncated: cut || o.cut}
}
