package process

import (
	"bytes"
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
	"lull/internal/platform/proc"
	"lull/internal/protocol/shimctl"
)

// Exec runs a command in the groups and the environment of an instance and
// waits for it. When ctx ends the command is killed, because its result could
// no longer be retrieved.
func (r *Runtime) Exec(ctx context.Context, id string, q instance.Command) (instance.Outcome, error) {
	env, dir, err := r.environment(ctx, id)
	if err != nil {
		return instance.Outcome{}, err
	}
	if q.Dir != "" {
		dir = q.Dir
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return instance.Outcome{}, fmt.Errorf("cannot run a command: %w", err)
	}
	defer null.Close()
	var out, errOut captured
	var wg sync.WaitGroup
	outR, outW, err := capture(&wg, &out)
	if err != nil {
		return instance.Outcome{}, err
	}
	errR, errW, err := capture(&wg, &errOut)
	if err != nil {
		err = errors.Join(err, outW.Close())
		wg.Wait()
		return instance.Outcome{}, err
	}
	// The caller may give up before it is known what was started. In that case
	// the command is ended below.
	begin, cancel := context.WithTimeout(context.WithoutCancel(ctx), beginLimit)
	defer cancel()
	s, err := r.shim().Exec(begin, shimctl.Exec{ID: id, Command: q.Command, Env: append(env, q.Env...), Dir: dir},
		[3]int{int(null.Fd()), int(outW.Fd()), int(errW.Fd())})
	cerr := errors.Join(outW.Close(), errW.Close())
	if err = errors.Join(err, cerr); err != nil {
		err = errors.Join(err, outR.SetReadDeadline(time.Now()), errR.SetReadDeadline(time.Now()))
		wg.Wait()
		err = errors.Join(err, outR.Close(), errR.Close())
		return instance.Outcome{}, fmt.Errorf("cannot run %s: %w", q.Command[0], err)
	}
	e, err := r.awaitExec(ctx, s)
	// Background processes of the command may keep its output open forever.
	last := time.Now().Add(outputGrace)
	derr := errors.Join(outR.SetReadDeadline(last), errR.SetReadDeadline(last))
	wg.Wait()
	if err = errors.Join(err, derr, outR.Close(), errR.Close()); err != nil {
		return instance.Outcome{}, err
	}
	return instance.Outcome{ExitCode: e.Code, Stdout: out.String(), Stderr: errOut.String(), Truncated: out.cut || errOut.cut}, nil
}

// outputGrace is how long output is read after a command has exited.
const outputGrace = 200 * time.Millisecond

// captured is the beginning of a stream.
type captured struct {
	bytes.Buffer
	cut bool // truncated
}

// capture reads one stream of a command until all its writers are gone, or
// until the deadline of the reading end. The caller closes both ends.
func capture(wg *sync.WaitGroup, into *captured) (pr, pw *os.File, err error) {
	if pr, pw, err = os.Pipe(); err != nil {
		return nil, nil, fmt.Errorf("cannot make a pipe: %w", err)
	}
	wg.Go(func() {
		// The copy ends at the deadline or at the end of the stream.
		_, _ = io.Copy(&into.Buffer, io.LimitReader(pr, instance.MaxOutput))
		more, _ := io.Copy(io.Discard, pr)
		into.cut = more > 0
	})
	return pr, pw, nil
}

// awaitExec waits for a command, and kills it if ctx ends first.
func (r *Runtime) awaitExec(ctx context.Context, s shimctl.Started) (instance.Exit, error) {
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
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		// It leads its own session.
		if st, err := r.fs.Stat(s.PID); err == nil && st.Start == s.Start {
			_ = syscall.Kill(-s.PID, sig) // it may have ended
		}
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

// beginLimit bounds the start of a command. It exceeds the time that the
// supervisor needs before the program runs.
const beginLimit = 30 * time.Second

// endGrace is how long an abandoned command may take to exit.
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

// environment returns the environment with which an instance's main process was
// started. For a run started by an earlier version of lull it reads that of the
// process.
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

// environ reads a process's environment. It is empty only briefly, while the
// process executes another program.
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

// Identify returns the instance that a process belongs to, from its control
// group, or else from the mark in its own or a parent's environment.
func (r *Runtime) Identify(pid int) (string, error) {
	if r.place.Dir != "" {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			return "", err
		}
		// The directory of this host's groups has a unique name, so it is
		// recognized in a path as seen from any namespace.
		host := "/" + filepath.Base(r.place.Dir) + "/"
		for line := range strings.Lines(string(b)) {
			if _, rest, ok := strings.Cut(strings.TrimSpace(line), host); ok {
				id, _, _ := strings.Cut(rest, "/") // the instance may have created subgroups
				return id, nil
			}
		}
		return "", errors.New("it is in no instance's control group")
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
	return "", errors.New("it carries no instance's mark")
}

// mayPageOut reports whether this process may advise about another process's
// memory.
func mayPageOut() bool {
	var data [2]unix.CapUserData
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	return unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<unix.CAP_SYS_NICE) != 0
}

// pageOut asks the kernel to page out a process's memory. It is advice: memory
// without a backing store stays.
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
		return fmt.Errorf("cannot push out the memory of process %d: %w", pid, last)
	}
	return nil
}
