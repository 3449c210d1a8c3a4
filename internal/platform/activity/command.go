package activity

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"lull/internal/core/instance"
)

// markName is the environment variable by which all processes of one probe run
// are found.
const markName = "LULL_PROBE_RUN"

// outputGrace is how long to wait for the rest of the output after a command has
// ended. A child of the command may still have the output open.
const outputGrace = 200 * time.Millisecond

var errTooMuch = errors.New("it printed too much")

// output keeps the first 1024 bytes that a command prints. Write fails once more
// than maxOutput bytes were printed.
type output struct {
	mu   sync.Mutex
	n    int
	head []byte
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.n += len(p); o.n > maxOutput {
		return 0, errTooMuch
	}
	o.head = append(o.head, p[:min(len(p), 1024-len(o.head))]...)
	return len(p), nil
}

func (o *output) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.head)
}

// command runs a probe's command in its own process group. When it returns, every
// process that the command started has ended.
func command(ctx context.Context, p *instance.Probe, env []string) Reading {
	mark := markName + "=" + rand.Text()
	cmd := exec.CommandContext(ctx, p.Command[0], p.Command[1:]...)
	cmd.Env = append(append(os.Environ(), env...), mark)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var out output
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = outputGrace
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if err := cmd.Start(); err != nil {
		return unknown("cannot run %s", firstLine(err.Error()))
	}
	err := cmd.Wait()
	killLeft(cmd.Process.Pid, mark)
	code := cmd.ProcessState.ExitCode()
	switch {
	case ctx.Err() != nil:
		return failed(ctx, p, ctx.Err())
	case errors.Is(err, errTooMuch):
		return unknown("the command printed more than %d bytes", maxOutput)
	case code < 0:
		return unknown("the command was ended by a signal (%s)", cmd.ProcessState)
	}
	return Exited(code, out.text())
}

// killLeft kills the processes that a command left behind: its process group, and
// all processes with its mark, with their descendants. They are stopped first, so
// that none forks between the search and the kill.
func killLeft(group int, mark string) {
	_ = syscall.Kill(-group, syscall.SIGKILL) // usually no process remains
	for range 20 {
		left := marked(mark)
		if len(left) == 0 {
			return
		}
		for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
			if sig == syscall.SIGKILL {
				left = append(left, marked(mark)...)
			}
			for _, pid := range left {
				_ = syscall.Kill(pid, sig) // it may have ended
			}
		}
	}
}

// marked lists the living processes with a mark in their environment, and their
// descendants.
func marked(mark string) (out []int) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	parent := map[int]int{}
	for _, e := range procs {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		of, alive := parentOf(pid)
		if !alive {
			continue
		}
		parent[pid] = of
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); err == nil && slices.Contains(strings.Split(string(b), "\x00"), mark) {
			out = append(out, pid)
		}
	}
	for grown := true; grown; {
		grown = false
		for pid, of := range parent {
			if slices.Contains(out, of) && !slices.Contains(out, pid) {
				out, grown = append(out, pid), true
			}
		}
	}
	return out
}

// parentOf returns the parent of pid, and whether pid is still running.
func parentOf(pid int) (parent int, alive bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	at := strings.LastIndexByte(string(b), ')') // the process name before the parenthesis may contain any character
	f := strings.Fields(string(b[at+1:]))
	if len(f) < 2 || f[0] == "Z" || f[0] == "X" {
		return 0, false
	}
	parent, err = strconv.Atoi(f[1])
	return parent, err == nil
}
