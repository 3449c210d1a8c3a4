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

// Exec implements instance.Execer. The command runs in the instance's guest, with
// the user and environment of its program.
func (r *Runtime) Exec(ctx context.Context, id string, q instance.Command, s instance.Streams) (int, error) {
	return r.exec(ctx, id, guest.ExecCall{Command: q.Command, Env: q.Env, Dir: q.Dir, TTY: s.TTY, Rows: s.Size.Rows, Cols: s.Size.Cols}, s)
}

// exec makes an instance's guest carry out c, with its streams connected to s.
func (r *Runtime) exec(ctx context.Context, id string, c guest.ExecCall, s instance.Streams) (int, error) {
	cannot := "cannot run a command: "
	if c.Files != "" {
		cannot = "cannot copy files: "
	}
	w := r.work(id)
	if w == nil || w.isFrozen() {
		return 0, errors.New(cannot + "the instance does not run")
	}
	if why := w.stands(); why != "" {
		return 0, errors.New(cannot + why)
	}
	p, _ := w.voice()
	if p == nil {
		return 0, guest.ErrChannelEnded
	}
	c.Timeout, c.Stream, c.Input = maxExec.Milliseconds(), true, s.In != nil
	if d, ok := ctx.Deadline(); ok {
		c.Timeout = max(time.Until(d).Milliseconds(), 1)
	}
	over, end := context.WithCancel(ctx)
	defer end()
	x := &attached{peer: p, number: rand.Uint64N(1<<53) + 1, // must differ from the numbers of earlier daemons
		began: make(chan struct{}), some: make(chan struct{}, 1), credit: make(chan int, 1)}
	c.Number = x.number
	w.commands.Store(c.Number, x)
	defer w.commands.Delete(c.Number)
	var out sync.WaitGroup
	answered := make(chan struct{})
	out.Go(func() { x.deliver(over, s, answered) })
	go x.send(over, s)
	var a guest.ExecAnswer
	err := callOn(ctx, p, maxExec, guest.Exec, c, &a)
	close(answered)
	if err != nil {
		end()
	}
	out.Wait()
	refused, said := errors.AsType[*guest.Error](err)
	switch {
	case err == nil:
		var oerr error
		if len(a.Stdout) > 0 {
			_, oerr = s.Out.Write(a.Stdout)
		}
		if len(a.Stderr) > 0 && oerr == nil {
			_, oerr = s.Err.Write(a.Stderr)
		}
		if x.lost || a.Truncated {
			oerr = errors.New("a part of the output was lost")
		}
		return a.Code, oerr
	case !said:
		go w.cancelCommand(c.Number)
	case refused.Code == guest.NotThere:
		err = &instance.CommandError{Code: instance.NotThere, Err: err}
	case refused.Code == guest.CannotRun:
		err = &instance.CommandError{Code: instance.CannotRun, Err: err}
	case refused.Code == guest.InvalidParams:
		err = errors.New(cannot + "the guest was booted by an earlier version of lull; restart the instance")
	}
	return 0, err
}

// cancelCommand makes the guest kill a command. If the guest cannot be reached, it
// kills the command when the next host connects.
func (w *Work) cancelCommand(number uint64) {
	if p, _ := w.voice(); p != nil {
		_ = p.Notify(guest.Cancel, guest.CancelCall{Number: number})
	}
}

// attached is a command in a guest with connected streams.
type attached struct {
	peer   *guest.Peer
	number uint64
	begin  sync.Once
	began  chan struct{} // closed when the guest has started the command and takes input
	credit chan int      // bytes of input that the guest has acknowledged since the last receive

	mu     sync.Mutex
	queue  []guest.OutputNote // at most a window of output
	queued int
	lost   bool // the guest sent more than it may
	some   chan struct{}
}

// output queues a part of a command's output, or drops it if nothing waits for the
// command. It does not block, because one goroutine reads everything that a guest
// sends.
func (w *Work) output(n guest.OutputNote) {
	v, ok := w.commands.Load(n.Number)
	if !ok {
		return
	}
	x := v.(*attached)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.queued+len(n.Data) > guest.Window || n.Stream != 1 && n.Stream != 2 {
		x.lost = true
		return
	}
	if len(n.Data) > 0 {
		x.queued += len(n.Data)
		x.queue = append(x.queue, n)
		wakeUp(x.some)
	}
}

// taken records that a guest runs a command, and how much of the input it has
// passed on.
func (w *Work) taken(n guest.TakenNote) {
	v, ok := w.commands.Load(n.Number)
	if !ok {
		return
	}
	x := v.(*attached)
	x.begin.Do(func() { close(x.began) })
	sum := min(max(n.Bytes, 0), guest.Window)
	for {
		select {
		case x.credit <- sum:
			return
		case more := <-x.credit:
			sum = min(sum+more, guest.Window)
		}
	}
}

func wakeUp(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// deliver writes a command's output until ctx ends, or until answered is closed and
// everything is written.
func (x *attached) deliver(ctx context.Context, s instance.Streams, answered <-chan struct{}) {
	for last := false; ; {
		x.mu.Lock()
		notes := x.queue
		x.queue = nil
		x.mu.Unlock()
		for _, n := range notes {
			to := s.Out
			if n.Stream == 2 && !s.TTY {
				to = s.Err
			}
			if _, err := to.Write(n.Data); err != nil {
				return
			}
			x.mu.Lock()
			x.queued -= len(n.Data)
			x.mu.Unlock()
			// if this fails, so does the call
			_ = x.peer.Notify(guest.Taken, guest.TakenNote{Number: x.number, Bytes: len(n.Data)})
		}
		if len(notes) > 0 {
			continue
		}
		if last {
			return
		}
		select {
		case <-x.some:
		case <-answered:
			last = true
		case <-ctx.Done():
			return
		}
	}
}

// send sends the command's input, signals and terminal sizes to the guest until ctx
// ends.
func (x *attached) send(ctx context.Context, s instance.Streams) {
	select {
	case <-x.began:
	case <-ctx.Done():
		return
	}
	if s.In != nil {
		go x.sendInput(ctx, s)
	}
	for s.Control != nil {
		select {
		case c := <-s.Control:
			// If this fails, so does the call.
			_ = x.peer.Notify(guest.Control, guest.ControlNote{Number: x.number, Signal: int(c.Signal), Rows: c.Size.Rows, Cols: c.Size.Cols})
		case <-ctx.Done():
			return
		}
	}
}

func (x *attached) sendInput(ctx context.Context, s instance.Streams) {
	b := make([]byte, guest.MaxOutput)
	for left := guest.Window; ; {
		for left == 0 {
			select {
			case n := <-x.credit:
				left = n
			case <-ctx.Done():
				return
			}
		}
		n, err := s.In.Read(b[:min(len(b), left)])
		left -= n
		note := guest.InputNote{Number: x.number, Data: b[:n], End: err != nil}
		if n > 0 || err != nil {
			if x.peer.Notify(guest.Input, note) != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
