package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// The demo's timers are short, so that there is something to see.
const (
	pauseAfter = 3 * time.Second
	visitEvery = 15 * time.Second // per program, in turns
	visitSoon  = 4 * time.Second  // when the demo ends by itself
	startLimit = time.Minute
)

// host is the daemon with its programs.
type host struct {
	*hostctl.Client
	s        *stage
	cmd      *exec.Cmd
	shim     int
	socket   string
	programs []program
	visits   chan string // what a client has just done
	gone     chan struct{}
}

// startHost is the scene of lull host.
func startHost(ctx context.Context, s *stage) (end func() error, err error) {
	h := &host{s: s, socket: filepath.Join(s.data, "host.sock"), visits: make(chan string, 16), gone: make(chan struct{})}
	if err := h.startDaemon(ctx); err != nil {
		return h.end, err
	}
	found, missing := findPrograms(s)
	for _, p := range found {
		if err := h.run(ctx, p); err != nil {
			if ctx.Err() != nil {
				return h.end, err
			}
			missing = append(missing, fmt.Sprintf("%s did not start (%v)", p.name, err))
			continue
		}
		h.programs = append(h.programs, p)
	}
	h.introduce(missing)
	go func() { defer close(h.gone); h.visit(ctx) }()
	s.lines = append(s.lines, h.line)
	return func() error { <-h.gone; return h.end() }, nil
}

func (h *host) startDaemon(ctx context.Context) error {
	for _, name := range []string{"lull", "lull-shim"} {
		if _, err := os.Stat(filepath.Join(h.s.bin, name)); err != nil {
			return fmt.Errorf("%w; make build builds it", err)
		}
	}
	logs, err := os.Create(filepath.Join(h.s.data, "host.log"))
	if err != nil {
		return err
	}
	defer logs.Close()
	h.cmd = exec.Command(filepath.Join(h.s.bin, "lull"), "host", "--data", filepath.Join(h.s.data, "host"), "--socket", h.socket,
		"--probe-interval", "500ms", "--stop-after", "0", "--stop-all")
	h.cmd.Stdout, h.cmd.Stderr = logs, logs
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C goes to the demo only, which ends everything in order
	if err := h.cmd.Start(); err != nil {
		h.cmd = nil
		return err
	}
	if h.Client, err = hostctl.NewClient("unix://" + h.socket); err != nil {
		return err
	}
	limit := time.Now().Add(startLimit)
	for {
		st, err := h.Status(ctx)
		if err == nil {
			_, err = fmt.Sscanf(st.Shim, "pid %d", &h.shim)
			return err
		}
		if time.Now().After(limit) || ctx.Err() != nil {
			said, _ := os.ReadFile(logs.Name())
			return fmt.Errorf("%w\n%s", err, said)
		}
		<-time.After(20 * time.Millisecond)
	}
}

func (h *host) run(ctx context.Context, p program) error {
	after := idle.Duration(pauseAfter)
	spec := instance.Spec{Name: p.name, Command: p.command, User: p.user,
		PauseAfter: &after, Expose: []instance.Endpoint{{Listen: p.addr, Target: p.addr, Path: instance.PathDirect}}}
	if p.image != "" {
		spec.Runtime, spec.Image, spec.Memory = "microvm", p.image, 128<<20
		spec.Expose = []instance.Endpoint{{Listen: p.addr, Target: "127.0.0.1:80"}}
		spec.HibernateAfter = idle.Duration(pauseAfter)
	}
	_, err := h.Create(ctx, hostctl.Create{Start: true, Spec: spec})
	return err
}

func (h *host) introduce(missing []string) {
	w, s := h.s.out, h.s
	fmt.Fprintf(w, "lull keeps %d programs. Each is frozen %s after its last connection and wakes at the next one.\n", len(h.programs), pauseAfter)
	for _, m := range missing {
		fmt.Fprintf(w, "  not shown: %s\n", m)
	}
	fmt.Fprintf(w, "\nType in another terminal:\n\n  export LULL_HOST=unix://%s\n", h.socket)
	lull := filepath.Join(s.bin, "lull")
	fmt.Fprintf(w, "  %s ps\n", lull)
	for _, p := range h.programs {
		fmt.Fprintf(w, "  %-52s # wakes %s\n", p.try, p.name)
	}
	if len(h.programs) > 0 {
		fmt.Fprintf(w, "  %-52s # why it runs, or sleeps\n", lull+" why "+h.programs[0].name)
	}
	fmt.Fprintf(w, "  %-52s # everything that happens\n\nCtrl-C ends the demo.\n\n", lull+" events -f")
}

// visit connects a client to each program in turn, once it sleeps.
func (h *host) visit(ctx context.Context) {
	every := visitEvery
	if h.s.short {
		every = visitSoon
	}
	for n := 0; len(h.programs) > 0; n++ {
		p := h.programs[n%len(h.programs)]
		state := ""
		for state != "paused" && state != "hibernated" {
			select {
			case <-time.After(every):
			case <-ctx.Done():
				return
			}
			if o, err := h.Get(ctx, p.name); err == nil {
				state = o.State
			}
		}
		began := time.Now()
		said, err := p.visit(p.addr)
		text := fmt.Sprintf("a client came to %s, which was %s: %s after %s", p.name, state, said, time.Since(began).Round(10*time.Microsecond))
		if err != nil {
			text = fmt.Sprintf("a client came to %s, which was %s, and failed: %v", p.name, state, err)
		}
		select {
		case h.visits <- text:
		case <-ctx.Done():
			return
		}
	}
}

// line returns the table: one line for all programs, and what clients did.
func (h *host) line(ctx context.Context) string {
	var b strings.Builder
	for len(h.visits) > 0 {
		fmt.Fprintf(&b, "          %s\n", h.s.paint("1", "> "+<-h.visits))
	}
	all, err := h.List(ctx)
	if err != nil {
		return b.String()
	}
	fmt.Fprintf(&b, "%s ", time.Now().Format(time.TimeOnly))
	for _, o := range all {
		state, color := o.State, "32"
		switch {
		case o.State == "paused" || o.State == "hibernated":
			state, color = fmt.Sprintf("%s %.0fs", o.State, time.Since(*o.StateSince).Seconds()), "36"
		case o.State == "running" && o.PauseAt != nil:
			state = fmt.Sprintf("running, pauses in %.0fs", max(time.Until(*o.PauseAt).Seconds(), 0))
		case o.State == "running" && o.Connections > 0:
			state = fmt.Sprintf("running, %d connections", o.Connections)
		case o.State == "stopped":
			color = "31"
		}
		fmt.Fprintf(&b, " %s %s", o.Name, h.s.paint(color, fmt.Sprintf("%-24s", state)))
	}
	return strings.TrimRight(b.String(), " ")
}

// end stops the programs and the host, and waits for both.
func (h *host) end() error {
	if h.cmd == nil {
		return nil
	}
	err := h.cmd.Process.Signal(syscall.SIGTERM) // --stop-all stops the programs
	werr := h.cmd.Wait()
	if h.shim > 1 {
		if kerr := syscall.Kill(h.shim, syscall.SIGTERM); !errors.Is(kerr, syscall.ESRCH) {
			err = errors.Join(err, kerr)
		}
	}
	return errors.Join(err, werr)
}
