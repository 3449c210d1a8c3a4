package guestagent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"lull/internal/protocol/guest"
)

// maxCommands is the maximum number of concurrent commands, fewer than the calls
// a channel serves, so that other calls always get through.
const maxCommands = 16

// command is a command running beside the workload.
type command struct {
	number uint64
	host   *guest.Peer // waits for the result
	end    context.CancelFunc
}

// commands is the set of running commands.
type commands struct {
	mu  sync.Mutex
	all []*command
}

// enter admits x. The context ends when x is canceled or its host disconnects.
// The caller must call leave.
func (k *commands) enter(ctx context.Context, x *command) (live context.Context, leave func(), err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.all) >= maxCommands {
		return nil, nil, fmt.Errorf("cannot run a command: %d run already, and no more may", maxCommands)
	}
	live, x.end = context.WithCancel(ctx)
	gone := make(chan struct{})
	go func() {
		select {
		case <-x.host.Over():
			x.end()
		case <-gone:
		}
	}()
	k.all = append(k.all, x)
	return live, func() {
		close(gone)
		x.end()
		k.mu.Lock()
		defer k.mu.Unlock()
		k.all = slices.DeleteFunc(k.all, func(o *command) bool { return o == x })
	}, nil
}

// cancel cancels the commands for which match returns true.
func (k *commands) cancel(match func(*command) bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, x := range k.all {
		if match(x) {
			x.end()
		}
	}
}

// exec runs a command beside the workload, as its user, and waits for it. Output
// is sent to the host as it appears. If the host cancels it, it is killed.
func (h *Harness) exec(ctx context.Context, host *guest.Peer, c guest.ExecCall) (guest.ExecAnswer, error) {
	if len(c.Command) == 0 {
		return guest.ExecAnswer{}, errors.New("cannot run a command: it is empty")
	}
	x := &command{number: c.Number, host: host}
	ctx, leave, err := h.commands.enter(ctx, x)
	if err != nil {
		return guest.ExecAnswer{}, err
	}
	defer leave()
	h.mu.Lock()
	env, dir, cred, main := h.env, h.dir, h.cred, h.main
	h.mu.Unlock()
	if main == nil {
		return guest.ExecAnswer{}, errors.New("cannot run a command: no workload is running")
	}
	if c.Dir != "" {
		dir = c.Dir
	}
	var read sync.WaitGroup
	streams := [2]stream{{to: host, note: guest.OutputNote{Number: c.Number, Stream: 1}}, {to: host, note: guest.OutputNote{Number: c.Number, Stream: 2}}}
	var ends, mine [2]*os.File
	shut := func(fs [2]*os.File) {
		for _, f := range fs {
			if f != nil {
				f.Close()
			}
		}
	}
	for n := range ends {
		r, w, err := os.Pipe()
		if err != nil {
			shut(ends)
			shut(mine)
			return guest.ExecAnswer{}, fmt.Errorf("cannot make a pipe: %w", err)
		}
		mine[n], ends[n] = r, w
	}
	if err := give(cred, ends[0], ends[1]); err != nil {
		shut(ends)
		shut(mine)
		return guest.ExecAnswer{}, err
	}
	p, err := h.spawn(c.Command, append(slices.Clone(env), c.Env...), dir, cred, ends[0], ends[1])
	shut(ends)
	if err != nil {
		shut(mine)
		return guest.ExecAnswer{}, fmt.Errorf("cannot run %s: %w", c.Command[0], err)
	}
	for n := range mine {
		read.Go(func() { streams[n].readFrom(mine[n]) })
	}
	if c.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(c.Timeout)*time.Millisecond)
		defer cancel()
	}
	select {
	case <-p.over:
	case <-ctx.Done():
		_ = syscall.Kill(-p.pid, syscall.SIGKILL) // its session, which may already be gone
		<-p.over
	}
	// A child that keeps a stream open must not delay the answer.
	for _, f := range mine {
		_ = f.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	}
	read.Wait()
	shut(mine)
	return guest.ExecAnswer{Code: p.note().Code, Stdout: streams[0].note.Data, Stderr: streams[1].note.Data,
		Truncated: streams[0].cut || streams[1].cut}, nil
}
