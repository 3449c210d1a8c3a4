package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// StageVerb is the argument with which lull-shim starts itself as the exec stage,
// which prepares the new process and then executes the program.
const StageVerb = "exec-stage"

// Descriptors of the exec stage. Those that the program inherits as LISTEN_FDS come
// after these.
const (
	specFD   = 3
	failFD   = 4
	listenFD = 5
	firstFD  = 3 // the first of LISTEN_FDS, by convention (sd_listen_fds(3))
)

// stageSpec is the input of the stage. The shim sends it only once the run is on
// disk, so every program that runs can be found again.
type stageSpec struct {
	Command []string `json:"command"`
	Env     []string `json:"env"`
	Dir     string   `json:"dir"`
	User    string   `json:"user,omitempty"`
	Join    []string `json:"join,omitempty"` // groups that the stage still has to join
	Listen  int      `json:"listen,omitempty"`
	Names   string   `json:"names,omitempty"`
	TTY     bool     `json:"tty,omitempty"`
	Handoff bool     `json:"handoff,omitempty"` // report binds; the descriptor of the handoff socket is listenFD+Listen
	Unlinks bool     `json:"unlinks,omitempty"` // also report the removal of files
}

// stageFailure names the step that failed before the program was executed.
type stageFailure struct {
	Step  string `json:"step"`
	Errno int    `json:"errno,omitempty"`
	What  string `json:"what"`
}

// ExecStage replaces this process with the program described on descriptor 3. It
// returns only on failure, after reporting it on descriptor 4.
func ExecStage() int {
	runtime.LockOSThread()
	spec, err := readSpec()
	if err != nil {
		return 127 // the shim has gone, so there is nowhere to report to
	}
	step, err := spec.become()
	f := stageFailure{Step: step, What: err.Error()}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		f.Errno = int(errno)
	}
	b, err := json.Marshal(f)
	if err == nil {
		_, _ = unix.Write(failFD, b)
	}
	return 127
}

// readSpec reads the spec without Go's poller, whose descriptors could have the
// numbers that the program must get.
func readSpec() (*stageSpec, error) {
	var b []byte
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(specFD, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
		b = append(b, buf[:n]...)
	}
	var s stageSpec
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, err
	}
	if len(s.Command) == 0 {
		return nil, io.ErrUnexpectedEOF
	}
	return &s, nil
}

// become carries out the steps in order. On failure it returns the name of the
// step.
func (s *stageSpec) become() (string, error) {
	for _, dir := range s.Join {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0); err != nil {
			return "cgroup", err
		}
	}
	if s.TTY {
		if err := unix.IoctlSetInt(0, unix.TIOCSCTTY, 0); err != nil {
			return "terminal", err
		}
	}
	if s.TTY {
		if err := ownTerminal(s.User); err != nil {
			return "terminal", err
		}
	}
	if s.Handoff { // first, because the program's user may not have the right
		if _, err := filterSelf(listenFD+s.Listen, s.Unlinks); err != nil {
			return "handoff", err
		}
	}
	env := s.environ()
	if err := switchUser(s.User); err != nil {
		return "user", err
	}
	if err := os.Chdir(s.Dir); err != nil {
		return "workdir", err
	}
	path, err := find(s.Command[0], env)
	if err != nil {
		return "command", err
	}
	fail, err := s.place()
	if err != nil {
		return "listen", err
	}
	if err := resetSignals(); err != nil {
		return "signals", err
	}
	err = syscall.Exec(path, s.Command, env)
	if derr := unix.Dup3(fail, failFD, unix.O_CLOEXEC); derr != nil {
		err = errors.Join(err, derr)
	}
	return "exec", fmt.Errorf("%s: %w", path, err)
}

// environ returns the program's environment, including the variables that only this
// process can determine.
func (s *stageSpec) environ() []string {
	if s.Listen == 0 {
		return s.Env
	}
	var env []string
	for _, e := range s.Env {
		if !strings.HasPrefix(e, "LISTEN_") {
			env = append(env, e)
		}
	}
	return append(env, fmt.Sprintf("LISTEN_FDS=%d", s.Listen), fmt.Sprintf("LISTEN_PID=%d", os.Getpid()), "LISTEN_FDNAMES="+s.Names)
}

// place moves the listening sockets to the numbers that the program expects, and
// closes everything else. It returns the new number of the failure pipe.
func (s *stageSpec) place() (int, error) {
	end := firstFD + s.Listen
	fail, err := unix.FcntlInt(failFD, unix.F_DUPFD_CLOEXEC, listenFD+s.Listen)
	if err != nil {
		return failFD, err
	}
	for i := range s.Listen {
		if err := unix.Dup3(listenFD+i, firstFD+i, 0); err != nil {
			return fail, err
		}
	}
	const all = 1<<32 - 1
	if err := unix.CloseRange(uint(end), all, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		for fd := end; fd < listenFD+s.Listen; fd++ { // needed before Linux 5.11; all other descriptors are close-on-exec
			unix.CloseOnExec(fd)
		}
	}
	return fail, nil
}

// ownTerminal makes the program's user the owner of the terminal, which a program
// may open by name.
func ownTerminal(who string) error {
	if who == "" || os.Geteuid() != 0 {
		return nil
	}
	uid, _, _, err := lookup(who)
	if err != nil {
		return nil // switchUser will report the error
	}
	return unix.Fchown(0, uid, -1)
}

// switchUser switches to a user, given as a name, UID or UID:GID. It does nothing
// if that is the current user.
func switchUser(who string) error {
	if who == "" {
		return nil
	}
	uid, gid, groups, err := lookup(who)
	if err != nil {
		return err
	}
	if uid == os.Geteuid() && gid == os.Getegid() {
		return nil
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("cannot run as %s: only root can change to another user, and this is user %d: %w", who, os.Geteuid(), unix.EPERM)
	}
	if err := syscall.Setgroups(groups); err != nil {
		return fmt.Errorf("setgroups: %w", err)
	}
	if err := syscall.Setgid(gid); err != nil {
		return fmt.Errorf("setgid %d: %w", gid, err)
	}
	if err := syscall.Setuid(uid); err != nil {
		return fmt.Errorf("setuid %d: %w", uid, err)
	}
	return nil
}

// lookup returns the IDs of a user. A UID without an entry in the user database
// gets a group of the same number.
func lookup(who string) (uid, gid int, groups []int, err error) {
	name, group, hasGroup := strings.Cut(who, ":")
	u, err := user.Lookup(name)
	if err != nil {
		if u, err = user.LookupId(name); err != nil {
			n, nerr := strconv.ParseUint(name, 10, 31)
			if nerr != nil {
				return 0, 0, nil, fmt.Errorf("cannot run as %s: no such user", who)
			}
			u = &user.User{Uid: name, Gid: name}
			groups = []int{int(n)}
		}
	}
	if uid, err = strconv.Atoi(u.Uid); err != nil {
		return 0, 0, nil, fmt.Errorf("cannot run as %s: uid %q", who, u.Uid)
	}
	if gid, err = strconv.Atoi(u.Gid); err != nil {
		return 0, 0, nil, fmt.Errorf("cannot run as %s: gid %q", who, u.Gid)
	}
	if hasGroup {
		n, err := strconv.ParseUint(group, 10, 31)
		if err != nil {
			return 0, 0, nil, fmt.Errorf("cannot run as %s: %q is not a group ID", who, group)
		}
		return uid, int(n), []int{int(n)}, nil
	}
	if groups == nil {
		ids, err := u.GroupIds()
		if err != nil {
			return 0, 0, nil, fmt.Errorf("cannot run as %s: %w", who, err)
		}
		for _, id := range ids {
			if n, err := strconv.Atoi(id); err == nil {
				groups = append(groups, n)
			}
		}
	}
	return uid, gid, groups, nil
}

// find searches the PATH in env for a command. It must run as the program's user.
func find(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	path := ""
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			path = v // the last PATH counts, as in the program
		}
	}
	denied := false
	for _, dir := range filepath.SplitList(path) {
		full := filepath.Join(dir, name)
		st, err := os.Stat(full)
		if err != nil || st.IsDir() {
			continue
		}
		if unix.Access(full, unix.X_OK) == nil {
			return full, nil
		}
		denied = true
	}
	if denied {
		return "", fmt.Errorf("cannot run %q: it is in PATH but not executable: %w", name, unix.EACCES)
	}
	return "", fmt.Errorf("cannot find %q in a directory of PATH: %w", name, unix.ENOENT)
}

// resetSignals gives every signal its default action and unblocks all. This process
// may have inherited others, from nohup or as a shell's background job.
func resetSignals() error {
	const last = 64
	var act [4]uint64 // struct sigaction of the kernel: handler, flags, restorer, mask; all zero is SIG_DFL
	for sig := 1; sig <= last; sig++ {
		if sig == int(unix.SIGKILL) || sig == int(unix.SIGSTOP) {
			continue
		}
		if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0); e != 0 {
			return fmt.Errorf("signal %d: %w", sig, e)
		}
	}
	var none unix.Sigset_t
	return unix.PthreadSigmask(unix.SIG_SETMASK, &none, nil)
}
