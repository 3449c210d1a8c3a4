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

	"lull/internal/lib/pty"
	"lull/internal/protocol/guest"
)

// maxCommands is the maximum number of concurrent commands. It is lower than the
// number of concurrent calls that a connection serves, so that other calls always
// get through.
const maxCommands = 16

// command is a command in the guest that runs beside the workload.
type command struct {
	number uint64
	host   *guest.Peer // the host that waits for the result
	end    context.CancelFunc

	credit *credit // for the command's output; nil if the host does not stream it
	kids   *children

	// Guarded by commands.mu.
	main   *process // nil until the command runs
	tty    *os.File
	input  []byte // input that the command has not read yet, at most one window
	closed bool   // no more input follows
	some   chan struct{}
}

// credit is the number of bytes that may still be sent on a stream.
type credit struct {
	mu   sync.Mutex
	left int
	more chan struct{} // closed and replaced when left grows
}

func newCredit() *credit { return &credit{left: guest.Window, more: make(chan struct{})} }

func (c *credit) give(n int) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left = min(c.left+max(n, 0), guest.Window)
	close(c.more)
	c.more = make(chan struct{})
}

// take waits until at least one byte may be sent. It takes up to n bytes of credit
// and returns how many; 0 means that ctx has ended.
func (c *credit) take(ctx context.Context, n int) int {
	for {
		c.mu.Lock()
		got, more := min(n, c.left), c.more
		c.left -= got
		c.mu.Unlock()
		if got > 0 {
			return got
		}
		select {
		case <-more:
		case <-ctx.Done():
			return 0
		}
	}
}

// feed queues input for the command. If the host sends more than a window, it breaks
// the protocol, and the command is killed. The lock of commands must be held.
func (x *command) feed(n guest.InputNote) {
	switch {
	case x.closed:
	case len(x.input)+len(n.Data) > guest.Window:
		x.end()
	default:
		x.input, x.closed = append(x.input, n.Data...), n.End
		select {
		case x.some <- struct{}{}:
		default:
		}
	}
}

// control applies a signal or a terminal size from the host to the command. The
// lock of commands must be held.
func (x *command) control(n guest.ControlNote) {
	switch {
	case n.Signal != 0 && x.main != nil:
		if n.Signal > 0 && n.Signal <= 64 {
			_ = x.kids.signalGroup(x.main, syscall.Signal(n.Signal)) // fails if the command has ended
		}
	case x.tty != nil:
		_ = pty.Resize(x.tty, n.Rows, n.Cols) // fails only if the terminal is closed
	}
}

// write passes queued input on to the command until the command has ended.
func (x *command) write(ctx context.Context, k *commands, to *os.File) {
	for {
		k.mu.Lock()
		b, closed := x.input, x.closed
		x.input = nil
		k.mu.Unlock()
		if len(b) > 0 {
			if _, err := to.Write(b); err != nil {
				return // the command has stopped reading
			}
			if x.host.Notify(guest.Taken, guest.TakenNote{Number: x.number, Bytes: len(b)}) != nil {
				return
			}
			continue
		}
		if closed {
			if x.tty == nil {
				to.Close()
			}
			return
		}
		select {
		case <-x.some:
		case <-ctx.Done():
			return
		}
	}
}

// commands is the set of running commands.
type commands struct {
	mu  sync.Mutex
	all []*command
}

// enter admits x. live ends when x is canceled or its host disconnects. The caller
// must call leave.
func (k *commands) enter(ctx context.Context, x *command) (live context.Context, leave func(), err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.all) >= maxCommands {
		return nil, nil, fmt.Errorf("cannot run a command: the limit of %d concurrent commands is reached", maxCommands)
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

// with calls do for the command with this number, if it runs.
func (k *commands) with(number uint64, do func(*command)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, x := range k.all {
		if x.number == number {
			do(x)
			return
		}
	}
}

// exec runs a command beside the workload, as the workload's user, and waits for
// it. It sends output to the host as it appears. If the host cancels the command,
// exec kills it.
func (h *Harness) exec(ctx context.Context, host *guest.Peer, c guest.ExecCall) (guest.ExecAnswer, error) {
	if (len(c.Command) == 0) == (c.Files == "") {
		return guest.ExecAnswer{}, errors.New("cannot run a command: want either a command or files")
	}
	x := &command{number: c.Number, host: host, kids: h.kids, closed: !c.Input, some: make(chan struct{}, 1)}
	if c.Stream {
		x.credit = newCredit()
	}
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
	if c.Files != "" {
		cred = nil // root needs no credentials
	}
	s, err := openStreams(c, cred)
	if err != nil {
		return guest.ExecAnswer{}, err
	}
	defer s.close()
	var p *process
	if c.Files != "" {
		p, err = h.startCopy(c, s.theirs)
	} else {
		p, err = h.spawn(c.Command, append(slices.Clone(env), c.Env...), dir, cred, s.theirs, c.TTY)
	}
	s.given()
	switch {
	case err == nil:
	case c.Files != "":
		return guest.ExecAnswer{}, fmt.Errorf("cannot copy files: %w", err)
	default:
		code := guest.CannotRun
		if errors.Is(err, errNotThere) {
			code = guest.NotThere
		}
		return guest.ExecAnswer{}, &guest.Error{Code: code, Message: fmt.Sprintf("cannot run %s: %v", c.Command[0], err)}
	}
	if c.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(c.Timeout)*time.Millisecond)
		defer cancel()
	}
	h.commands.begin(ctx, x, p, s, c)
	var read sync.WaitGroup
	streams := [2]stream{}
	for n, f := range s.out {
		streams[n] = stream{to: host, note: guest.OutputNote{Number: c.Number, Stream: n + 1}, credit: x.credit, live: ctx}
		read.Go(func() { pty.Copy(&streams[n], f) })
	}
	select {
	case <-p.over:
	case <-ctx.Done():
		if c.TTY {
			s.close() // closing a terminal sends SIGHUP to the programs on it
		}
		_ = syscall.Kill(-p.pid, syscall.SIGKILL) // kills the command's process group, which may have ended
		<-p.over
	}
	if c.Files == "" { // the process that copies files has no children
		// A child that keeps the output open must not delay the answer.
		for _, f := range s.out {
			_ = f.SetReadDeadline(time.Now().Add(200 * time.Millisecond)) // fails for a terminal that was hung up
		}
	}
	read.Wait()
	return guest.ExecAnswer{Code: p.note().Code, Stdout: streams[0].note.Data, Stderr: streams[1].note.Data,
		Truncated: streams[0].cut || streams[1].cut}, nil
}

// begin tells the host that x runs, and starts to pass input on.
func (k *commands) begin(ctx context.Context, x *command, p *process, s *streams, c guest.ExecCall) {
	k.mu.Lock()
	x.main = p
	if c.TTY {
		x.tty = s.in
	}
	k.mu.Unlock()
	if c.Input {
		go x.write(ctx, k, s.in)
	}
	if c.Stream {
		_ = x.host.Notify(guest.Taken, guest.TakenNote{Number: x.number}) // fails if the host has disconnected
	}
}

// streams holds the standard streams of a command: pipes, or a terminal.
type streams struct {
	theirs [3]*os.File // the command's ends
	in     *os.File    // ours; nil for no input
	out    []*os.File  // ours: output and error, or the terminal
}

func openStreams(c guest.ExecCall, cred *syscall.Credential) (s *streams, err error) {
	s = &streams{}
	defer func() {
		if err != nil {
			s.given()
			s.close()
		}
	}()
	if c.TTY {
		master, slave, err := pty.Open(c.Rows, c.Cols)
		if err != nil {
			return s, err
		}
		s.theirs, s.in, s.out = [3]*os.File{slave, slave, slave}, master, []*os.File{master}
		return s, give(cred, slave)
	}
	if !c.Input {
		s.theirs[0], err = os.Open(os.DevNull)
	} else if s.theirs[0], s.in, err = os.Pipe(); err == nil {
		err = give(cred, s.theirs[0])
	}
	for n := 1; n < 3 && err == nil; n++ {
		var r *os.File
		if r, s.theirs[n], err = os.Pipe(); err == nil {
			s.out = append(s.out, r)
			err = give(cred, s.theirs[n])
		}
	}
	if err != nil {
		return s, fmt.Errorf("cannot make a pipe: %w", err)
	}
	return s, nil
}

// given closes the command's ends, which the command now has.
func (s *streams) given() {
	for _, f := range s.theirs {
		if f != nil {
			f.Close() // a terminal is closed more than once; that error does not matter
		}
	}
}

// close closes our ends.
func (s *streams) close() {
	if s.in != nil {
		s.in.Close()
	}
	for _, f := range s.out {
		f.Close()
	}
}
