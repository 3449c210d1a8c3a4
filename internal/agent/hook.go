package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"sync"
	"syscall"
	"time"

	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
)

// HookSpec describes one run of a hook.
type HookSpec struct {
	Command string        // for sh -c
	User    string        // empty means the agent's own
	Timeout time.Duration // after this time the whole process group is killed
	Env     []string      // added to a minimal environment
}

// hookOutput is the maximum number of bytes kept of a hook's output, from its end.
const hookOutput = 4 << 10

// ShellHooks runs hooks with sh, each in its own process group. The timeout also
// applies to grandchildren that keep the output open or ignore signals: the whole
// group is killed, and Run does not wait for the pipe.
type ShellHooks struct{}

// Run implements HookRunner.
func (ShellHooks) Run(ctx context.Context, h HookSpec) agentctl.Hook {
	out := agentctl.Hook{Command: h.Command, User: h.User, ExitCode: -1}
	started := time.Now()
	cmd := exec.Command("/bin/sh", "-c", h.Command)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"}, h.Env...)
	cmd.Dir = "/"
	if err := become(cmd, h.User); err != nil {
		out.Error = err.Error()
		return out
	}
	r, w, err := os.Pipe()
	if err != nil {
		out.Error = "cannot make a pipe: " + err.Error()
		return out
	}
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		out.Error = "cannot start the hook: " + err.Error()
		return out
	}
	var kept tail
	read := make(chan struct{})
	go func() {
		defer close(read)
		kept.readFrom(r)
	}()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()

	timer := time.NewTimer(h.Timeout)
	defer timer.Stop()
	select {
	case err = <-ended:
	case <-timer.C:
		out.TimedOut = true
	case <-ctx.Done():
		out.Error = "the agent was shut down"
	}
	// Processes left in the hook's group are killed. A hook must start lasting
	// processes in another group.
	if out.TimedOut || out.Error != "" {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		select {
		case err = <-ended:
		case <-time.After(2 * time.Second):
		}
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		select {
		case err = <-ended:
		case <-time.After(2 * time.Second): // the process is in a state that the kernel does not interrupt
		}
	} else {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	select {
	case <-read:
	case <-time.After(200 * time.Millisecond):
	}
	r.Close() // ends the reader even if another process still has the other end
	<-read
	out.Output, out.Took = kept.String(), idle.Duration(time.Since(started))
	if !out.TimedOut && out.Error == "" {
		out.ExitCode = 0
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			out.ExitCode = e.ExitCode()
		} else if err != nil {
			out.ExitCode, out.Error = -1, err.Error()
		}
	}
	return out
}

var _ UserChecker = ShellHooks{}

// CheckUser implements UserChecker.
func (ShellHooks) CheckUser(name string) error {
	if _, err := user.Lookup(name); err != nil {
		if _, unknown := errors.AsType[user.UnknownUserError](err); unknown {
			return fmt.Errorf("there is no user %s on this machine", name)
		}
		return err
	}
	return nil
}

// become makes cmd run as that user, with the user's groups and home.
func become(cmd *exec.Cmd, name string) error {
	if name == "" {
		cmd.Env = append(cmd.Env, "HOME=/root", "USER=root", "LOGNAME=root")
		return nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return fmt.Errorf("cannot run the hook as %s: %w", name, err)
	}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	ids, err3 := u.GroupIds()
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("cannot run the hook as %s: %w", name, err)
	}
	cred := &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	for _, id := range ids {
		if n, err := strconv.ParseUint(id, 10, 32); err == nil {
			cred.Groups = append(cred.Groups, uint32(n))
		}
	}
	if int(uid) != os.Getuid() {
		cmd.SysProcAttr.Credential = cred
	}
	cmd.Env = append(cmd.Env, "HOME="+u.HomeDir, "USER="+name, "LOGNAME="+name)
	if st, err := os.Stat(u.HomeDir); err == nil && st.IsDir() {
		cmd.Dir = u.HomeDir
	}
	return nil
}

// tail is a writer that keeps the last bytes written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) readFrom(r *os.File) {
	buf := make([]byte, 4096)
	for {
		n, err := r.Read(buf)
		t.mu.Lock()
		t.b = append(t.b, buf[:n]...)
		if over := len(t.b) - hookOutput; over > 0 {
			t.b = append(t.b[:0], t.b[over:]...)
		}
		t.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
