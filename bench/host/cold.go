package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// cold is one length of silence, and how many connections to measure after it.
type cold struct {
	silence time.Duration
	count   int // minimum number of connections to programs of each kind
}

// parseCold parses a list such as "600ms=60,10s=5".
func parseCold(text string) (out []cold, err error) {
	for part := range strings.SplitSeq(text, ",") {
		if part == "" {
			continue
		}
		silence, count, _ := strings.Cut(part, "=")
		var c cold
		if c.silence, err = time.ParseDuration(silence); err == nil {
			c.count, err = strconv.Atoi(count)
		}
		if err != nil {
			return nil, fmt.Errorf("cannot read %q of -cold: write silence=count, as 10s=5: %w", part, err)
		}
		out = append(out, c)
	}
	return out, nil
}

// coldPart measures connections after a silence, when every cache is cold. It
// compares paused programs with the same programs without lull, in ABBA order.
// Before a connection after a short silence, the whole host was silent for that
// long. For a long silence, several programs are silent at the same time and are
// used in turn: each program, and its own path through lull, is then cold, but
// the host has worked for others in between. With -beside 1 it has not.
func coldPart(ctx context.Context, s settings) (err error) {
	colds, err := parseCold(s.cold)
	if err != nil {
		return err
	}
	kinds := []string{"bare", "paused"}
	daemons := map[string]*daemon{}
	for kind, bin := range map[string]string{"paused": programs.dir, "before": s.against} {
		if bin == "" {
			continue
		}
		d, err := startDaemonFrom(ctx, bin)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, d.end()) }()
		if daemons[kind] = d; kind == "before" {
			kinds = append(kinds, kind)
		}
	}
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	fmt.Fprintf(w, "connect to first byte\t%s\tadded\twanted\t\n", strings.Join(kinds, "\t"))
	var all []*silent
	defer func() {
		for _, p := range all {
			if p.stop != nil {
				p.stop()
			}
		}
	}()
	for _, c := range colds {
		most := len(kinds) * max(1, min(s.beside, int(c.silence/time.Duration(len(kinds))/hostSilence)))
		for n := len(all); n < most; n++ {
			kind := kinds[n%len(kinds)]
			p, err := startSilent(ctx, daemons["paused"].dir, fmt.Sprint("p", n), kind, daemons[kind])
			if err != nil {
				return err
			}
			all = append(all, p)
		}
		took, err := listen(ctx, turns(all[:most], len(kinds)), c)
		if err != nil {
			return err
		}
		for _, q := range []struct {
			name   string
			p      float64
			wanted string
		}{{"p50", 0.5, "at most +120 us"}, {"p90", 0.9, ""}, {"p99", 0.99, "at most +1000 us"}} {
			fmt.Fprintf(w, "after %s of silence of %d programs, %s of %d", c.silence, most/len(kinds), q.name, len(took["bare"]))
			added := ""
			for _, kind := range kinds {
				t := quantile(took[kind], q.p)
				fmt.Fprintf(w, "\t%.0f us", t)
				if kind != "bare" {
					added += fmt.Sprintf(" %+.0f us", t-quantile(took["bare"], q.p))
				}
			}
			fmt.Fprintf(w, "\t%s\t%s\t\n", strings.TrimSpace(added), q.wanted)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// hostSilence is the minimum time between two connections when several programs
// are silent at the same time.
const hostSilence = 300 * time.Millisecond

// silent is a program that gets a connection only rarely.
type silent struct {
	kind string // bare, paused or before
	addr string
	hold func() error // pauses it; nil without lull
	stop func()       // ends it; nil if it ends with its daemon
}

// startSilent starts a web server under d, or without lull if d is nil.
func startSilent(ctx context.Context, dir, name, kind string, d *daemon) (*silent, error) {
	p := &silent{kind: kind}
	addr, command, err := webServer(dir, name)
	if err != nil {
		return nil, err
	}
	p.addr = addr
	if d == nil {
		p.stop, err = startBare(ctx, addr, command)
		return p, err
	}
	p.hold = func() error { return pause(ctx, d, name) }
	return p, d.run(ctx, name, addr, time.Hour, command...)
}

// turns returns the order in which programs are used. Each group with one program
// of each kind is in the reverse order of the group before.
func turns(all []*silent, kinds int) (out []*silent) {
	for n, group := range slices.Collect(slices.Chunk(all, kinds)) {
		group = slices.Clone(group)
		if n%2 == 1 {
			slices.Reverse(group)
		}
		out = append(out, group...)
	}
	return out
}

// listen connects to each program after a silence, at evenly spaced times in the
// given order, and returns how long the answers took. If there is only one
// program of each kind, every second round is in reverse order.
func listen(ctx context.Context, all []*silent, c cold) (took map[string][]time.Duration, err error) {
	took = map[string][]time.Duration{}
	kinds := map[string]bool{}
	for _, p := range all {
		if kinds[p.kind] = true; p.hold != nil {
			if err := p.hold(); err != nil {
				return nil, err
			}
		}
	}
	alone := len(kinds) == len(all)
	gap := c.silence / time.Duration(len(all))
	if alone {
		gap = c.silence
	}
	next := time.Now().Add(c.silence)
	for round := 0; len(took["bare"]) < c.count; round++ {
		if alone && round > 0 {
			slices.Reverse(all)
		}
		for _, p := range all {
			select {
			case <-time.After(time.Until(next)):
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
			t, err := firstAnswer(p.addr)
			if err != nil {
				return nil, err
			}
			took[p.kind] = append(took[p.kind], t)
			if p.hold != nil {
				if err := p.hold(); err != nil {
					return nil, err
				}
			}
			if next = next.Add(gap); alone { // count from the host's last activity
				next = time.Now().Add(gap)
			}
		}
	}
	return took, nil
}

// webServer returns the command line of a web server with one serving process,
// and its address. It is nginx or, if that is not installed, this program.
func webServer(dir, name string) (addr string, command []string, err error) {
	if addr, err = freeAddr(); err != nil {
		return "", nil, err
	}
	path, err := exec.LookPath("nginx")
	if err != nil {
		fmt.Println("note: nginx is not installed, so a Go program stands in for it")
		command, err = self(addr)
		return addr, command, err
	}
	conf := filepath.Join(dir, name+".conf")
	text := fmt.Sprintf("daemon off; worker_processes 1; error_log stderr; pid %s.pid; events {} http { access_log off; server { listen %s; location / { return 200 ok; } } }",
		filepath.Join(dir, name), addr)
	return addr, []string{path, "-c", conf}, os.WriteFile(conf, []byte(text), 0o600)
}

// startBare starts a program without lull.
func startBare(ctx context.Context, addr string, command []string) (stop func(), err error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stderr = os.Stderr
	// In its own session, as an instance is, because the kernel first divides the
	// CPUs among sessions.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() { _ = cmd.Process.Signal(syscall.SIGTERM); _ = cmd.Wait() }
	err = wait(ctx, 10*time.Second, func() error {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err
	})
	if err != nil {
		stop()
	}
	return stop, err
}

// firstAnswer returns the time from the connect to the first byte of the answer
// to an HTTP request. It uses blocking system calls, because this program's own
// poller would be cold too.
func firstAnswer(addr string) (time.Duration, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	at, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return 0, err
	}
	to := &unix.SockaddrInet4{Port: at.Port, Addr: [4]byte(at.IP.To4())}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	request := []byte("GET / HTTP/1.0\r\n\r\n")
	answer := make([]byte, 512)
	began := time.Now()
	if err := unix.Connect(fd, to); err != nil {
		return 0, err
	}
	if _, err := unix.Write(fd, request); err != nil {
		return 0, err
	}
	for {
		n, err := unix.Read(fd, answer)
		if err == unix.EINTR {
			continue
		}
		took := time.Since(began)
		if err == nil && n == 0 {
			err = errors.New("the program closed the connection")
		}
		return took, err
	}
}
