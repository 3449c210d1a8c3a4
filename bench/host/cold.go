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
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// cold is how many connections are measured after a silence.
type cold struct {
	silence time.Duration
	count   int // to each of the two programs
}

// parseCold reads "600ms=60,10s=5".
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

// coldPart keeps the whole host silent before each connection, so that every
// cache is cold: neither lull nor the programs get a request. Connections
// alternate, in ABBA order, between the paused nginx and the same nginx without
// lull.
func coldPart(ctx context.Context, s settings) (err error) {
	colds, err := parseCold(s.cold)
	if err != nil {
		return err
	}
	d, err := startDaemon(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	with, command, err := webServer(d.dir, "kept")
	if err != nil {
		return err
	}
	if err := d.run(ctx, "program", with, time.Hour, command...); err != nil {
		return err
	}
	without, command, err := webServer(d.dir, "bare")
	if err != nil {
		return err
	}
	stop, err := startBare(ctx, without, command)
	if err != nil {
		return err
	}
	defer stop()
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	fmt.Fprintln(w, "connect to first byte\tbare\tpaused\tadded\twanted\t")
	for _, c := range colds {
		var asleep, awake []time.Duration
		for n := range 2 * c.count {
			addr, into := with, &asleep
			if n%4 == 1 || n%4 == 2 {
				addr, into = without, &awake
			}
			if err := pause(ctx, d, "program"); err != nil {
				return err
			}
			select {
			case <-time.After(c.silence):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			t, err := firstAnswer(addr)
			if err != nil {
				return err
			}
			*into = append(*into, t)
		}
		for _, q := range []struct {
			name   string
			p      float64
			wanted string
		}{{"p50", 0.5, "at most +120 us"}, {"p99", 0.99, "at most +1000 us"}} {
			a, b := quantile(awake, q.p), quantile(asleep, q.p)
			fmt.Fprintf(w, "after %s of silence, %s of %d\t%.0f us\t%.0f us\t%+.0f us\t%s\t\n", c.silence, q.name, c.count, a, b, b-a, q.wanted)
		}
	}
	return w.Flush()
}

// webServer returns the command line of a web server with one process that
// serves, and its address: nginx, or this program if there is none.
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
	// In its own session, as an instance is: the kernel divides the CPUs among
	// sessions first.
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
// poller is as cold as everything else.
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
