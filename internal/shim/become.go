package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// becomeUnit turns this process into the program of a systemd unit, under a filter
// that reports its binds. systemd finds a copy of lull-shim, with the program's name, in
// a directory of the unit's ExecSearchPath, and shimctl.HandoffFile beside it. Without
// a shim, or if it does not know the unit, the program runs as without lull.
//
// It returns only if the program could not be executed; ok is false if this process
// was started as something else.
func becomeUnit(args []string) (code int, ok bool) {
	switch filepath.Base(args[0]) {
	case Name, "lull":
		return 0, false
	}
	exe, err := os.Executable()
	if err != nil {
		return 0, false
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(exe), shimctl.HandoffFile))
	if err != nil {
		return 0, false
	}
	var h shimctl.Handoff
	if err := json.Unmarshal(b, &h); err != nil || h.Program == "" {
		return 0, false
	}
	runtime.LockOSThread() // the filter is this thread's, which executes the program
	env := os.Environ()
	if err := filterUnit(h, valueOf(env, "INVOCATION_ID")); err != nil {
		fmt.Fprintf(os.Stderr, "lull: no socket can be handed over: %v\n", err)
		if errors.Is(err, errReports) {
			return 1, true
		}
	}
	err = syscall.Exec(h.Program, args, withPath(env, h))
	fmt.Fprintf(os.Stderr, "lull: cannot execute %s: %v\n", h.Program, err)
	return 203, true // as systemd has it
}

// valueOf returns the value of a variable.
func valueOf(env []string, name string) string {
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v
		}
	}
	return ""
}

// withPath returns the environment without the search path of the drop-in.
func withPath(env []string, h shimctl.Handoff) []string {
	for n, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok && strings.HasPrefix(v, h.Dir+":") {
			env[n] = "PATH=" + h.Path
		}
	}
	return env
}

// shimAway is how long a shim that is being replaced may take to listen again.
const shimAway = dogWait + 500*time.Millisecond

// errReports means that a filter is installed whose reports nothing reads, so every
// bind of this process would fail.
var errReports = errors.New("the supervisor was lost")

// filterUnit passes the descriptor that reports this process's binds to the shim, if
// the shim wants it. An error that is no errReports leaves the process as it was.
func filterUnit(h shimctl.Handoff, invocation string) error {
	c, err := dialShim(h)
	if err != nil {
		return err
	}
	defer unix.Close(c)
	m, err := json.Marshal(intro{Invocation: invocation})
	if err == nil {
		_, err = unix.Write(c, m)
	}
	if err != nil {
		return err
	}
	var answer [1]byte
	n, err := unix.Read(c, answer[:])
	if err != nil || n == 0 || answer[0] == saysPlain {
		return err
	}
	filtered, err := filterSelf(c, answer[0] == saysUnlinks)
	if err != nil && err != unix.EAGAIN && filtered { // EAGAIN: it was sent, and the shim is slow
		err = fmt.Errorf("%w: %w", errReports, err)
	} else if filtered {
		err = nil
	}
	return err
}

// dialShim connects to the shim, which must be the expected user's: any user can listen
// at an abstract address.
func dialShim(h shimctl.Handoff) (int, error) {
	c, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	limit := unix.NsecToTimeval((2 * introLimit).Nanoseconds())
	_ = unix.SetsockoptTimeval(c, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit) // it also works without
	for end := time.Now().Add(shimAway); ; time.Sleep(10 * time.Millisecond) {
		err = unix.Connect(c, &unix.SockaddrUnix{Name: h.Socket})
		if err == nil || err != unix.EAGAIN && err != unix.ECONNREFUSED || time.Now().After(end) {
			break
		}
	}
	if err == nil {
		var peer *unix.Ucred
		if peer, err = unix.GetsockoptUcred(c, unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil && int(peer.Uid) != h.UID {
			err = fmt.Errorf("user %d listens there, want %d", peer.Uid, h.UID)
		}
	}
	if err != nil {
		unix.Close(c)
		return -1, fmt.Errorf("connect to lull-shim: %w", err)
	}
	return c, nil
}
