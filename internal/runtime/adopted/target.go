package adopted

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
)

// Resolve implements instance.Adopter.
func (r *Runtime) Resolve(a instance.Adopted, caller int) (instance.Adopted, instance.Program, error) {
	boot, err := r.fs.BootID()
	if err != nil {
		return a, instance.Program{}, err
	}
	var p instance.Program
	switch {
	case a.IsUnit():
		a, p, err = r.resolveUnit(a)
	case a.Cgroup != "":
		a, p, err = r.resolveGroup(a.Cgroup)
	default:
		a, p, err = r.resolveTree(a.PID)
	}
	if err == nil {
		err = r.refuse(p.PIDs, caller)
	}
	a.BootID = boot
	return a, p, err
}

// resolveTree returns a process tree as a target and a description of its program.
// It fails if lull must not freeze it.
func (r *Runtime) resolveTree(pid int) (a instance.Adopted, p instance.Program, err error) {
	switch {
	case pid < 1:
		return a, p, fmt.Errorf("%d is not a process ID", pid)
	case pid == 1:
		return a, p, errors.New("process 1 is the machine's init, the ancestor of every process")
	}
	s, err := r.fs.Stat(pid)
	switch {
	case errors.Is(err, proc.ErrGone):
		return a, p, fmt.Errorf("there is no process %d", pid)
	case err != nil:
		return a, p, err
	case s.Kernel:
		return a, p, fmt.Errorf("process %d is a thread of the kernel", pid)
	case s.Ended():
		return a, p, fmt.Errorf("process %d has ended; its parent %d has not noticed yet", pid, s.PPID)
	case s.State == 'T':
		return a, p, fmt.Errorf("process %d is stopped by a signal; continue it first: kill -CONT %d", pid, pid)
	case s.State == 't':
		return a, p, fmt.Errorf("process %d is being traced, for example by a debugger", pid)
	}
	if p.PIDs, err = r.fs.Tree(pid, "", nil); err != nil && !errors.Is(err, proc.ErrUnsettled) {
		return a, p, err
	}
	for _, of := range p.PIDs {
		if unix.Kill(of, 0) == unix.EPERM {
			return a, p, fmt.Errorf("no right to freeze process %d: it belongs to another user, and this host does not run as root", of)
		}
	}
	p.Command = commandOf(pid)
	p.Name = filepath.Base(p.Command[0])
	return instance.Adopted{PID: pid, Start: s.Start}, p, nil
}

// resolveGroup is resolveTree for a control group, given as a directory of this
// machine or as a path as in /proc/PID/cgroup.
func (r *Runtime) resolveGroup(path string) (a instance.Adopted, p instance.Program, err error) {
	g, err := cgroup.Lookup(path)
	if err != nil {
		return a, p, err
	}
	a.Cgroup = g.Dir()
	if a.CgroupID, err = inodeOf(a.Cgroup); err != nil {
		return a, p, err
	}
	if err := g.MayFreeze(); err != nil {
		return a, p, fmt.Errorf("no right to freeze %s: %w", a.Cgroup, err)
	}
	if held, err := g.Held(); err != nil || held {
		return a, p, errors.Join(fmt.Errorf("%s is already frozen, but not by lull", a.Cgroup), err)
	}
	if p.PIDs, err = g.PIDs(); err != nil {
		return a, p, err
	}
	if a.PID, err = r.oldest(g); err != nil || a.PID == 0 {
		return a, p, errors.Join(fmt.Errorf("no visible process in %s", a.Cgroup), err)
	}
	p.Command, p.Name = commandOf(a.PID), filepath.Base(a.Cgroup)
	a.PID = 0
	return a, p, nil
}

// refuse returns why pids must not be frozen, or nil. caller is the PID of the
// requesting command, or 0 if unknown.
func (r *Runtime) refuse(pids []int, caller int) error {
	if slices.Contains(pids, os.Getpid()) {
		return errors.New("it contains this host's daemon, which could not thaw itself")
	}
	if caller > 0 && slices.Contains(pids, caller) {
		return errors.New("it contains the requesting command, which would be frozen")
	}
	if slices.Contains(pids, 1) {
		return errors.New("it contains the machine's init, process 1")
	}
	for _, pid := range pids {
		s, err := r.fs.Stat(pid)
		if err == nil && s.Kernel {
			return fmt.Errorf("it contains a kernel thread, process %d", pid)
		}
		if r.isOwn(pid) {
			return fmt.Errorf("it contains process %d, which belongs to lull", pid)
		}
	}
	return nil
}

// isOwn reports whether a process is a daemon of lull, or its supervisor.
func (r *Runtime) isOwn(pid int) bool {
	argv := commandOf(pid)
	switch filepath.Base(argv[0]) {
	case "lull-shim", "lull-agent":
		return true
	}
	if len(argv) < 2 || !slices.Contains([]string{"host", "agent", "server"}, argv[1]) {
		return false
	}
	exe, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	own, oerr := os.Stat("/proc/self/exe")
	return err == nil && oerr == nil && os.SameFile(own, exe)
}

// maxShown limits how much of a command line is shown as a program's description,
// in bytes.
const maxShown = 4 << 10

// commandOf returns the command line of a process, or its name in brackets if it
// has none.
func commandOf(pid int) []string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if b = b[:min(len(b), maxShown)]; err == nil {
		// Servers such as nginx overwrite it with a title, padded with NULs or
		// spaces.
		argv := strings.Split(strings.TrimRight(string(b), "\x00 "), "\x00")
		if name, _, _ := strings.Cut(argv[0], ": "); name != "" {
			return argv
		}
	}
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if name := strings.TrimSpace(string(comm)); err == nil && name != "" {
		return []string{name}
	}
	return []string{"process-" + strconv.Itoa(pid)}
}

// exited reports whether the process with this PID and start time has ended. The
// PID may then belong to another process.
func exited(pid int, start uint64) bool {
	s, err := proc.Live().Stat(pid)
	return errors.Is(err, proc.ErrGone) || err == nil && (s.Start != start || s.Ended())
}

// harmless are the signals that a program may receive at any time without anyone
// having asked it to do something.
var harmless = signalSet(unix.SIGCHLD, unix.SIGURG, unix.SIGWINCH, unix.SIGCONT, unix.SIGALRM, unix.SIGVTALRM, unix.SIGPROF, unix.SIGIO,
	unix.SIGSTOP, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU)

func signalSet(sigs ...unix.Signal) (set uint64) {
	for _, s := range sigs {
		set |= 1 << (uint(s) - 1)
	}
	return set
}

// pendingSignal returns a signal that is pending for a process and neither blocked
// nor ignored, or 0. Real-time signals are skipped.
func pendingSignal(pid int) unix.Signal {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	set := map[string]uint64{}
	for in := bufio.NewScanner(bytes.NewReader(b)); in.Scan(); {
		k, v, _ := strings.Cut(in.Text(), ":")
		switch k {
		case "SigPnd", "ShdPnd", "SigBlk", "SigIgn":
			set[k], _ = strconv.ParseUint(strings.TrimSpace(v), 16, 64)
		}
	}
	waits := (set["SigPnd"] | set["ShdPnd"]) &^ (set["SigBlk"] | set["SigIgn"] | harmless)
	for s := unix.Signal(1); s < 32; s++ {
		if waits&(1<<(uint(s)-1)) != 0 {
			return s
		}
	}
	return 0
}
