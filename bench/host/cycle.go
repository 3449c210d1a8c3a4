package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// crowd is the number of connections between two other programs that lull does
// not manage.
const crowd = 20_000

// cyclePart measures the daemon's CPU time for a pause and wake of a program,
// with and without a crowd of other connections, for a probe of a running
// program, and while many idle programs run.
func cyclePart(ctx context.Context, s settings) error {
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	fmt.Fprintln(w, "daemon CPU\talone\tbeside the crowd\tratio\twanted\t")
	for _, m := range []struct {
		name, wanted string
		take         func(context.Context, *daemon, func() error, settings) (pair, error)
	}{
		{"per pause and wake", "at most 4 ms", cycles},
		{"per probe, 10 connections", "at most 150 us", probes},
	} {
		p, err := beside(ctx, s, m.take)
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.2f\t%s\t\n", m.name, p.alone, p.crowded, float64(p.crowded)/float64(p.alone), m.wanted)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Printf("(the crowd is %d established connections of other programs)\n", crowd)
	return awake(ctx, s)
}

// pair is the same measurement without and with the crowd.
type pair struct{ alone, crowded time.Duration }

// beside measures without and with the crowd, using one daemon.
func beside(ctx context.Context, s settings, take func(context.Context, *daemon, func() error, settings) (pair, error)) (p pair, err error) {
	d, err := startDaemon(ctx)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	var end func()
	defer func() {
		if end != nil {
			end()
		}
	}()
	return take(ctx, d, func() (err error) { end, err = gather(ctx); return err }, s)
}

// cycles repeatedly lets a program fall asleep and wakes it with one request. The
// program is nginx or, if that is not installed, this program.
func cycles(ctx context.Context, d *daemon, gather func() error, s settings) (p pair, err error) {
	addr, command, err := webServer(d.dir, "web")
	if err != nil {
		return p, err
	}
	if err := d.run(ctx, "web", addr, 300*time.Millisecond, command...); err != nil {
		return p, err
	}
	if p.alone, err = cycled(ctx, d, addr, s.cycles); err != nil {
		return p, err
	}
	if err := gather(); err != nil {
		return p, err
	}
	p.crowded, err = cycled(ctx, d, addr, s.cycles)
	return p, err
}

// cycled returns the daemon's CPU time per wake. It returns an error unless every
// request met a paused program, because the figure would otherwise be
// meaningless.
func cycled(ctx context.Context, d *daemon, addr string, n int) (time.Duration, error) {
	<-time.After(2 * time.Second) // let it fall asleep, and the daemon write its records
	before, err := d.Get(ctx, "web")
	if err != nil {
		return 0, err
	}
	from, err := usage(d.cmd.Process.Pid)
	if err != nil {
		return 0, err
	}
	for range n {
		if err := request(addr); err != nil {
			return 0, err
		}
		<-time.After(800 * time.Millisecond)
	}
	to, err := usage(d.cmd.Process.Pid)
	if err != nil {
		return 0, err
	}
	after, err := d.Get(ctx, "web")
	if err != nil {
		return 0, err
	}
	wakes := after.WakeCount - before.WakeCount
	if wakes == 0 || int(wakes) < n*9/10 {
		return 0, fmt.Errorf("the program woke %d times in %d requests", wakes, n)
	}
	return (to.cpu - from.cpu) / time.Duration(wakes), nil
}

// request sends one HTTP request and reads the complete answer.
func request(addr string) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return err
	}
	if t, ok := c.(*net.TCPConn); ok {
		if err := t.CloseWrite(); err != nil {
			return err
		}
	}
	_, err = io.Copy(io.Discard, c)
	return err
}

// probes measures probes of a program with ten open connections, which is probed
// every 50 ms.
func probes(ctx context.Context, d *daemon, gather func() error, s settings) (p pair, err error) {
	const each = 50 * time.Millisecond
	addr, err := freeAddr()
	if err != nil {
		return p, err
	}
	command, err := self(addr)
	if err != nil {
		return p, err
	}
	if err := d.run(ctx, "web", addr, 2*each, command...); err != nil {
		return p, err
	}
	for range 10 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return p, err
		}
		defer c.Close()
		if _, err := c.Write([]byte{'x'}); err != nil {
			return p, err
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			return p, err
		}
	}
	take := func() (time.Duration, error) {
		cpu, err := busy(d, s.quiet)
		return time.Duration(float64(cpu) * each.Seconds() / s.quiet.Seconds()), err
	}
	if p.alone, err = take(); err != nil {
		return p, err
	}
	if err := gather(); err != nil {
		return p, err
	}
	p.crowded, err = take()
	return p, err
}

// busy returns the CPU time that the daemon uses within span.
func busy(d *daemon, span time.Duration) (time.Duration, error) {
	<-time.After(time.Second) // let the daemon write its records
	from, err := usage(d.cmd.Process.Pid)
	if err != nil {
		return 0, err
	}
	<-time.After(span)
	to, err := usage(d.cmd.Process.Pid)
	return to.cpu - from.cpu, err
}

// awake measures a daemon that probes many running programs.
func awake(ctx context.Context, s settings) (err error) {
	d, err := startDaemon(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	bin, err := tiny(d.dir)
	if err != nil {
		return err
	}
	n := s.running
	none, err := busy(d, s.quiet)
	if err != nil {
		return err
	}
	after := idle.Duration(time.Hour)
	err = each(16, n, func(k int) error {
		port := fmt.Sprint(firstPort + k)
		at := "127.0.0.1:" + port
		_, err := d.Create(ctx, hostctl.Create{Start: true, Spec: instance.Spec{Name: "t" + port, Command: []string{bin, port}, PauseAfter: &after,
			Expose: []instance.Endpoint{{Listen: at, Target: at, Path: instance.PathDirect}}}})
		return err
	})
	if err != nil {
		return err
	}
	<-time.After(5 * time.Second) // until each has been probed
	all, err := busy(d, s.quiet)
	if err != nil {
		return err
	}
	share := func(cpu time.Duration) float64 { return 100 * cpu.Seconds() / s.quiet.Seconds() }
	fmt.Printf("%d running, idle instances, probed every 5 s: %.2f %% of a core (empty host: %.4f %%), %.0f us per probe; wanted: at most 5 %% for 1,000\n",
		n, share(all), share(none), float64((all-none).Microseconds())*5/s.quiet.Seconds()/float64(n))
	return nil
}

// gather starts programs that hold the crowd of connections, as many as the limit
// on open files requires. end stops them.
func gather(ctx context.Context) (end func(), err error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return nil, err
	}
	share := int(min(limit.Max, 1<<20)-100) / 2 // a program has both ends of its connections
	var ends []func()
	end = func() {
		for _, e := range ends {
			e()
		}
	}
	for left := crowd; left > 0; left -= share {
		n := fmt.Sprint(min(left, share))
		cmd := exec.CommandContext(ctx, exe, "-crowd", n)
		cmd.Stderr = os.Stderr
		in, ierr := cmd.StdinPipe()
		out, oerr := cmd.StdoutPipe()
		if err := errors.Join(ierr, oerr); err != nil {
			return end, err
		}
		if err := cmd.Start(); err != nil {
			return end, err
		}
		ends = append(ends, func() { in.Close(); _ = cmd.Wait() })
		line, err := bufio.NewReader(out).ReadString('\n')
		if strings.TrimSpace(line) != n {
			return end, fmt.Errorf("the crowd is not complete: %q: %w", line, err)
		}
	}
	return end, nil
}

// beCrowd opens n connections to this process itself, reports that, and keeps
// them open until its input ends.
func beCrowd(n int) error {
	const perListener = 5000 // each address has its own ephemeral ports
	var keep []*net.TCPConn
	for len(keep) < 2*n {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.1.%d:0", 1+len(keep)/2/perListener))
		if err != nil {
			return err
		}
		for range min(perListener, n-len(keep)/2) {
			a, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				return err
			}
			b, err := l.Accept()
			if err != nil {
				return err
			}
			keep = append(keep, a.(*net.TCPConn), b.(*net.TCPConn))
		}
		l.Close()
	}
	fmt.Println(n)
	_, err := io.Copy(io.Discard, os.Stdin)
	for _, c := range keep {
		err = errors.Join(err, c.SetLinger(0)) // close without TIME_WAIT, which would disturb the next measurement
		c.Close()
	}
	return err
}
