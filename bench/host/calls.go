package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// callsPart counts the daemon's system calls in equal intervals while more and
// more clients connect to a running program on the direct path.
func callsPart(ctx context.Context, s settings) (err error) {
	d, err := startDaemon(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	addr, err := kept(ctx, d)
	if err != nil {
		return err
	}
	span := 11 * time.Second // long enough for two probes of the program
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	fmt.Fprintf(w, "connections in %s\tsystem calls of the daemon\tits context switches\tits CPU\t\n", span)
	for _, n := range []int{0, 2_000, 20_000} {
		before, err := usage(d.cmd.Process.Pid)
		if err != nil {
			return err
		}
		calls, err := counted(ctx, d.cmd.Process.Pid, span, func() error {
			return each(s.clients, n, func(int) error { _, err := firstByte(addr); return err })
		})
		if err != nil {
			return err
		}
		after, err := usage(d.cmd.Process.Pid)
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "%d\t%s\t%d\t%s\t\n", n, calls, after.switches-before.switches, after.cpu-before.cpu)
	}
	return w.Flush()
}

// counted counts the system calls of a process with strace over span, while work
// runs.
func counted(ctx context.Context, pid int, span time.Duration, work func() error) (string, error) {
	path, err := exec.LookPath("strace")
	if err != nil {
		end := time.Now().Add(span)
		err := work()
		<-time.After(time.Until(end))
		return "not counted: strace is not installed", err
	}
	cmd := exec.CommandContext(ctx, path, "-c", "-f", "-q", "-p", strconv.Itoa(pid))
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return "", err
	}
	end := time.Now().Add(span)
	<-time.After(500 * time.Millisecond) // let strace attach to every thread
	werr := work()
	<-time.After(time.Until(end))
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		return "", err
	}
	_ = cmd.Wait() // returns an error because of the signal
	lines := strings.Split(strings.TrimSpace(said.String()), "\n")
	if f := strings.Fields(lines[len(lines)-1]); len(f) > 3 && f[len(f)-1] == "total" {
		return f[3], werr
	}
	return "not counted: " + lines[len(lines)-1], werr
}

// used is the resource usage of a process so far.
type used struct {
	cpu      time.Duration // has the resolution of a tick, or a finer one if the scheduler reports it
	switches uint64
	threads  int
	rss      int64 // bytes
	private  int64 // bytes of anonymous memory
	timers   int
}

func usage(pid int) (u used, err error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	tasks, err := filepath.Glob(dir + "/task/*")
	if err != nil {
		return u, err
	}
	u.threads = len(tasks)
	for _, t := range tasks {
		for k, v := range fields(t + "/status") {
			if strings.HasSuffix(k, "ctxt_switches") {
				u.switches += uint64(v)
			}
		}
		b, err := os.ReadFile(t + "/schedstat")
		if err != nil {
			continue // the thread has ended in the meantime
		}
		var ns int64
		if _, err := fmt.Sscan(string(b), &ns); err == nil {
			u.cpu += time.Duration(ns)
		}
	}
	status := fields(dir + "/status")
	u.rss, u.private = status["VmRSS"]<<10, status["RssAnon"]<<10
	b, err := os.ReadFile(dir + "/timers")
	if err == nil {
		u.timers = bytes.Count(b, []byte("ID:"))
	}
	if len(tasks) == 0 {
		return u, fmt.Errorf("cannot read %s", dir)
	}
	return u, nil
}

// fields returns the numbers in a status file, by name.
func fields(path string) map[string]int64 {
	out := map[string]int64{}
	b, err := os.ReadFile(path)
	if err != nil {
		return out
	}
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(line, ":")
		var n int64
		if _, err := fmt.Sscan(v, &n); err == nil {
			out[k] = n
		}
	}
	return out
}
