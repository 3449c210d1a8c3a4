package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// forking describes the start of an exec stage.
type forking struct {
	what     string
	spec     stageSpec
	stdio    [3]int
	cgroups  []string
	listen   func() (fds []int, names string, err error) // with mu held
	register func(pid int, start uint64) error           // with mu held; an error ends the stage
	filtered func(stageReport) error                     // receives the descriptor on which the program's binds are reported; if nil, no filter is installed

	handoff [2]int // a socket to pass that descriptor: the shim's end and the stage's
}

// fork starts the stage and waits until it has executed the program.
func (s *Shim) fork(ctx context.Context, f forking) error {
	failed := func(err error) error { return shimctl.Errorf(shimctl.CodeFailed, "cannot %s: %w", f.what, err) }
	specR, specW, err := os.Pipe()
	if err != nil {
		return failed(err)
	}
	defer specW.Close()
	failR, failW, err := os.Pipe()
	if err != nil {
		specR.Close()
		return failed(err)
	}
	defer failR.Close()
	if f.filtered != nil {
		if f.handoff, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			specR.Close()
			failW.Close()
			return failed(err)
		}
		defer unix.Close(f.handoff[0])
		f.spec.Handoff = true
	}
	pid, err := s.spawn(&f, specR, failW)
	specR.Close()
	failW.Close()
	if f.filtered != nil {
		unix.Close(f.handoff[1])
	}
	if err != nil {
		if pid > 0 {
			_ = unix.Kill(pid, unix.SIGKILL) // otherwise it would wait forever for its spec
		}
		return failed(err)
	}
	stop := time.AfterFunc(stageLimit, func() { _ = failR.SetReadDeadline(time.Now()) })
	defer stop.Stop()
	b, err := json.Marshal(f.spec)
	if err == nil {
		_ = specW.SetWriteDeadline(time.Now().Add(stageLimit))
		_, err = specW.Write(b)
	}
	if err != nil {
		_ = unix.Kill(pid, unix.SIGKILL)
		return failed(fmt.Errorf("cannot send the command to the exec stage: %w", err))
	}
	specW.Close()
	if f.filtered != nil {
		if err := f.awaitFilter(); err != nil {
			_ = unix.Kill(pid, unix.SIGKILL)
			var said *shimctl.Error
			if errors.As(err, &said) {
				return said
			}
			return failed(err)
		}
	}
	said, err := io.ReadAll(io.LimitReader(failR, 64<<10))
	if err != nil {
		_ = unix.Kill(pid, unix.SIGKILL)
		return failed(fmt.Errorf("the program did not begin within %s: %w", stageLimit, err))
	}
	if len(said) == 0 {
		return nil
	}
	var why stageFailure
	if err := json.Unmarshal(said, &why); err != nil {
		return failed(fmt.Errorf("the stage before the program failed: %q", said))
	}
	message := fmt.Sprintf("step %s: %s", why.Step, why.What)
	if why.Step == "exec" {
		message = "cannot execute " + why.What
	}
	return &shimctl.Error{Code: shimctl.CodeStage, Step: why.Step, Errno: why.Errno, Message: message}
}

// awaitFilter receives the descriptor on which the program's binds are reported,
// and lets the stage continue. If the stage has ended instead, it returns nil,
// because the stage reports the reason on its failure pipe.
func (f *forking) awaitFilter() error {
	words, err := readStage(f.handoff[0])
	if err == unix.EPIPE || err == unix.ECONNRESET {
		return nil
	}
	if err != nil {
		return fmt.Errorf("the program did not begin within %s: %w", stageLimit, err)
	}
	if err := f.filtered(words); err != nil {
		return err
	}
	_, err = unix.Write(f.handoff[0], []byte{saysContinue})
	if err == unix.EPIPE {
		return nil
	}
	return err
}

// spawn forks the stage and registers it. If the kernel can, it starts the stage in
// its v2 group. No child is reaped meanwhile, so that an early exit is not missed.
func (s *Shim) spawn(f *forking, spec, fail *os.File) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	files := []uintptr{uintptr(f.stdio[0]), uintptr(f.stdio[1]), uintptr(f.stdio[2]), spec.Fd(), fail.Fd()}
	if f.listen != nil {
		fds, names, err := f.listen()
		if err != nil {
			return 0, err
		}
		for _, fd := range fds {
			files = append(files, uintptr(fd))
		}
		f.spec.Listen, f.spec.Names = len(fds), names
	}
	if f.filtered != nil {
		files = append(files, uintptr(f.handoff[1]))
	}
	attr := &syscall.ProcAttr{Dir: "/", Env: []string{"GOMAXPROCS=1", "GOGC=off"}, Files: files,
		Sys: &syscall.SysProcAttr{Setsid: true}}
	f.spec.Join = f.cgroups
	if into := intoGroup(f.cgroups); into >= 0 {
		defer unix.Close(into)
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, into
		f.spec.Join = f.cgroups[1:]
	}
	argv := []string{Name, StageVerb}
	pid, err := syscall.ForkExec(s.cfg.Exe, argv, attr)
	if err != nil && attr.Sys.UseCgroupFD {
		// Before Linux 5.7, or if the kernel refuses, the stage joins the group
		// itself.
		attr.Sys.UseCgroupFD = false
		f.spec.Join = f.cgroups
		pid, err = syscall.ForkExec(s.cfg.Exe, argv, attr)
	}
	if err != nil {
		return 0, err
	}
	st, err := s.proc.Stat(pid)
	if err != nil {
		return pid, err
	}
	return pid, f.register(pid, st.Start)
}

// intoGroup opens the directory of the first group if a process can be started in
// it (v2). Otherwise it returns -1.
func intoGroup(cgroups []string) int {
	if len(cgroups) == 0 || unix.Access(filepath.Join(cgroups[0], "cgroup.freeze"), unix.F_OK) != nil {
		return -1
	}
	fd, err := unix.Open(cgroups[0], unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return fd
}

// reap collects every child that ends: main processes of runs, commands, and
// processes whose parents have exited, for which the shim is the subreaper.
func (s *Shim) reap(ctx context.Context) error {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGCHLD)
	defer signal.Stop(ch)
	for {
		for {
			var ws syscall.WaitStatus
			pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
			if err == syscall.EINTR {
				continue
			}
			if err != nil || pid <= 0 {
				break // ECHILD means that there is no child, and is not an error
			}
			if !s.dogEnded(pid) {
				s.collected(pid, ws)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ch:
		}
	}
}

func (s *Shim) collected(pid int, ws syscall.WaitStatus) {
	e := shimctl.Exit{At: time.Now(), Code: ws.ExitStatus()}
	if ws.Signaled() {
		e.Signal = int(ws.Signal())
		e.Code = 128 + e.Signal
	}
	s.mu.Lock()
	if n, ok := s.execs[pid]; ok {
		delete(s.execs, pid)
		s.mu.Unlock()
		s.note()
		s.srv.Send(shimctl.VerbExecExited, shimctl.ExecEnded{Exec: n, Exit: e})
		return
	}
	r := s.byPID[pid]
	delete(s.byPID, pid)
	if r == nil {
		s.mu.Unlock()
		return
	}
	if r.state == starting {
		r.state, r.exit = over, e // start reports the exit if the program was executed
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	s.ends(r, e)
}
