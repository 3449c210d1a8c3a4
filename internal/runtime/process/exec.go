package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/pty"
	"lull/internal/platform/proc"
	"lull/internal/protocol/shimctl"
)

// Exec implements instance.Execer. It runs a command in the control group and with
// the environment of an instance.
func (r *Runtime) Exec(ctx context.Context, id string, q instance.Command, s instance.Streams) (int, error) {
	env, dir, err := r.environment(ctx, id)
	if err != nil {
		return 0, err
	}
	if q.Dir != "" {
		dir = q.Dir
	}
	t, err := newStdio(s)
	if err != nil {
		return 0, fmt.Errorf("cannot run a command: %w", err)
	}
	defer t.close()
	var fds [3]int
	for n, f := range t.theirs {
		fds[n] = int(f.Fd())
	}
	// The start completes even if the caller gives up, because otherwise an unknown
	// process could remain. The command is then ended below.
	begin, cancel := context.WithTimeout(context.WithoutCancel(ctx), beginLimit)
	defer cancel()
	st, err := r.shim().Exec(begin, shimctl.Exec{ID: id, Command: q.Command, Env: append(env, q.Env...), Dir: dir, TTY: s.TTY}, fds)
	t.given()
	if err != nil {
		return 0, notStarted(fmt.Errorf("cannot run %s: %w", q.Command[0], err))
	}
	over := make(chan struct{})
	defer close(over)
	t.connect(s, over, func(sig syscall.Signal) { r.signalExec(st, sig) })
	e, err := r.awaitExec(ctx, st, t)
	t.drain()
	return e.Code, err
}

// notStarted converts an error of the shim into one with the exit code that shells
// use for it.
func notStarted(err error) error {
	var said *shimctl.Error
	if !errors.As(err, &said) || said.Code != shimctl.CodeStage {
		return err
	}
	code := instance.CannotRun
	if syscall.Errno(said.Errno) == syscall.ENOENT && (said.Step == "command" || said.Step == "exec") {
		code = instance.NotThere
	}
	return &instance.CommandError{Code: code, Err: err}
}

// outputGrace is how long output is still read after a command has exited. Its
// background processes may keep the output open forever.
const outputGrace = 200 * time.Millisecond

// stdio holds the standard streams of a command: three pipes, or a terminal.
type stdio struct {
	tty    bool
	theirs [3]*os.File // the command's ends
	in     *os.File    // ours; nil for no input
	out    []*os.File  // ours: output and error, or the terminal
	read   sync.WaitGroup
}

func newStdio(s instance.Streams) (t *stdio, err error) {
	t = &stdio{tty: s.TTY}
	defer func() {
		if err != nil {
			t.given()
			t.close()
		}
	}()
	if s.TTY {
		master, slave, err := pty.Open(s.Size.Rows, s.Size.Cols)
		if err != nil {
			return t, err
		}
		t.theirs, t.in, t.out = [3]*os.File{slave, slave, slave}, master, []*os.File{master}
		return t, nil
	}
	if s.In == nil {
		t.theirs[0], err = os.Open(os.DevNull)
	} else {
		t.theirs[0], t.in, err = os.Pipe()
	}
	for n := 1; n < 3 && err == nil; n++ {
		var r *os.File
		if r, t.theirs[n], err = os.Pipe(); err == nil {
			t.out = append(t.out, r)
		}
	}
	return t, err
}

// given closes the command's ends, which the command now has.
func (t *stdio) given() {
	for _, f := range t.theirs {
		if f != nil {
			f.Close() // a terminal is closed more than once; that error does not matter
		}
	}
}

// close closes our ends. Closing a terminal hangs it up.
func (t *stdio) close() {
	if t.in != nil {
		t.in.Close()
	}
	for _, f := range t.out {
		f.Close()
	}
}

// connect copies the streams, and applies the signals and terminal sizes from
// s.Control to the command, until over is closed.
func (t *stdio) connect(s instance.Streams, over <-chan struct{}, signal func(syscall.Signal)) {
	for n, f := range t.out {
		to := []io.Writer{s.Out, s.Err}[n]
		t.read.Go(func() { pty.Copy(to, f) })
	}
	if s.In != nil {
		go func() {
			_, _ = io.Copy(t.in, s.In) // a command that has stopped reading is not an error
			if !t.tty {
				t.in.Close()
			}
		}()
	}
	if s.Control == nil {
		return
	}
	go func() {
		for {
			select {
			case c := <-s.Control:
				if c.Signal != 0 {
					signal(c.Signal)
				} else if t.tty {
					_ = pty.Resize(t.in, c.Size.Rows, c.Size.Cols) // only fails when it is closed
				}
			case <-over:
				return
			}
		}
	}()
}

// drain reads the remaining output of a command that has exited.
func (t *stdio) drain() {
	for _, f := range t.out {
		_ = f.SetReadDeadline(time.Now().Add(outputGrace)) // fails for a terminal that was hung up
	}
	t.read.Wait()
}

// signalExec signals the process group of a command. The command leads its own
// session, and so its own group.
func (r *Runtime) signalExec(s shimctl.Started, sig syscall.Signal) {
	if st, err := r.fs.Stat(s.PID); err == nil && st.Start == s.Start {
		_ = syscall.Kill(-s.PID, sig) // fails if the command has ended
	}
}

// awaitExec waits for a command, and ends it if ctx ends first.
func (r *Runtime) awaitExec(ctx context.Context, s shimctl.Started, t *stdio) (instance.Exit, error) {
	ch := make(chan instance.Exit, 1)
	r.mu.Lock()
	if e, ok := r.early[s.Exec]; ok {
		delete(r.early, s.Exec)
		ch <- e
	} else {
		r.execs[s.Exec] = ch
	}
	r.mu.Unlock()
	select {
	case e := <-ch:
		return e, nil
	case <-ctx.Done():
	}
	sigs := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}
	if t.tty { // closing a terminal sends SIGHUP, on which interactive shells exit
		t.close()
		sigs[0] = syscall.SIGHUP
	}
	for _, sig := range sigs {
		r.signalExec(s, sig)
		select {
		case <-ch:
		case <-time.After(endGrace):
			continue
		}
		break
	}
	r.mu.Lock()
	delete(r.execs, s.Exec)
	r.mu.Unlock()
	return instance.Exit{}, fmt.Errorf("the command was ended because the request was canceled: %w", context.Cause(ctx))
}

// beginLimit bounds the start of a command. It is longer than the shim's own limit.
const beginLimit = 30 * time.Second

// endGrace is how long an abandoned command gets to exit before it is killed.
const endGrace = 2 * time.Second

func (r *Runtime) execEnded(e shimctl.ExecEnded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ch, ok := r.execs[e.Exec]; ok {
		delete(r.execs, e.Exec)
		ch <- e.Exit
		return
	}
	if len(r.early) < 1024 { // the results of abandoned commands must not accumulate
		r.early[e.Exec] = e.Exit
	}
}

// environment returns the environment and directory with which an instance's main
// process was started. For a run that an earlier version of lull started, it reads
// those of the process.
func (r *Runtime) environment(ctx context.Context, id string) (env []string, dir string, err error) {
	r.mu.Lock()
	w := r.works[id]
	r.mu.Unlock()
	if w == nil {
		return nil, "", errors.New("cannot run a command: the instance has no process")
	}
	if live, err := w.Alive(); err != nil || !live {
		return nil, "", errors.New("cannot run a command: the instance has no process")
	}
	n, err := r.launchOf(id, w.ident.Run)
	if err == nil {
		return n.Env, n.Dir, nil
	}
	r.cfg.Log.Debug("the environment is read from the process", "instance", id, "reason", err)
	b, err := environ(ctx, w.ident.PID)
	if err != nil {
		return nil, "", fmt.Errorf("cannot read the environment: %w", err)
	}
	dir, err = os.Readlink(fmt.Sprintf("/proc/%d/cwd", w.ident.PID))
	if err != nil {
		return nil, "", fmt.Errorf("cannot read the working directory: %w", err)
	}
	for e := range strings.SplitSeq(strings.TrimRight(string(b), "\x00"), "\x00") {
		if !strings.HasPrefix(e, "LISTEN_") { // these were for the main process
			env = append(env, e)
		}
	}
	return env, dir, nil
}

// environ reads a process's environment. It retries while the environment is empty,
// which it is for a moment when the process executes another program.
func environ(ctx context.Context, pid int) (b []byte, err error) {
	for range 100 {
		if b, err = os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); err != nil || len(b) > 0 {
			return b, err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return b, nil
}

// Identify returns the ID of the instance to which a process belongs. It looks at
// the process's control group, or else at the mark in the environment of the
// process and of its parents.
func (r *Runtime) Identify(pid int) (string, error) {
	if r.place.Dir != "" {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			return "", err
		}
		// The directory of this host's groups has a unique name, so it is
		// recognized in a path from any control group namespace.
		host := "/" + filepath.Base(r.place.Dir) + "/"
		for line := range strings.Lines(string(b)) {
			if _, rest, ok := strings.Cut(strings.TrimSpace(line), host); ok {
				id, _, _ := strings.Cut(rest, "/") // the instance may have created subgroups
				return id, nil
			}
		}
		return "", errors.New("it is not in the control group of an instance")
	}
	for p := pid; p > 1; {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p))
		if err != nil {
			return "", err
		}
		for _, e := range strings.Split(string(b), "\x00") {
			if id, ok := strings.CutPrefix(e, "LULL_INSTANCE_ID="); ok {
				return id, nil
			}
		}
		s, err := r.fs.Stat(p)
		if err != nil {
			return "", err
		}
		p = s.PPID
	}
	return "", errors.New("it does not have the mark of an instance")
}

// mayPageOut reports whether this process may page out another process's memory.
func mayPageOut() bool {
	var data [2]unix.CapUserData
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	return unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<unix.CAP_SYS_NICE) != 0
}

// pageOut asks the kernel to page out a process's memory. Memory without a backing
// store, such as swap, remains.
func (r *Runtime) pageOut(pid int) error {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if errors.Is(err, os.ErrNotExist) {
		return proc.ErrGone
	}
	if err != nil {
		return fmt.Errorf("cannot read the mappings of process %d: %w", pid, err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("cannot open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	const page = 21 // MADV_PAGEOUT
	done := 0
	var last error
	for line := range strings.Lines(string(b)) {
		var from, to uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil || from >= to || strings.Contains(line, "[v") {
			continue
		}
		iov := struct{ base, size uint64 }{from, to - from}
		if _, _, errno := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1, page, 0, 0); errno != 0 {
			last = errno
			if errno == syscall.EPERM {
				break
			}
			continue
		}
		done++
	}
	if done == 0 && last != nil {
		return fmt.Errorf("cannot page out the memory of process %d: %w", pid, last)
	}
	return nil
}
