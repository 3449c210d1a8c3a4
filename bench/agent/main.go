// Command agent compares the cost of the agent with that of two programs with a
// similar task, prometheus-node-exporter and collectd, in one run on one machine:
// memory, CPU time and bytes written per check.
//
// Every contender checks once every -every, for the duration -for; node_exporter
// is scraped at that interval. Figures per hour assume the agent's default
// interval of a minute for all of them. A contender that is not installed is
// named and omitted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"lull/internal/agent"
	"lull/internal/core/idle"
	"lull/internal/platform/proc"
)

func main() {
	child := flag.String("child", "", "run the agent itself with its files in this directory (used by the measurement)")
	span := flag.Duration("for", time.Minute, "how long to measure")
	every := flag.Duration("every", time.Second, "time between two checks")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := error(nil)
	if *child != "" {
		err = watch(ctx, *child, *every)
	} else {
		err = measure(ctx, *span, *every)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench agent:", err)
		os.Exit(1)
	}
}

// local stores the agent's files on disk and returns a given local policy file.
type local struct {
	agent.Files
	text string
}

func (l local) Config() ([]byte, error) { return []byte(l.text), nil }

// watch runs an agent as on a real machine, without a cloud.
func watch(ctx context.Context, dir string, every time.Duration) error {
	files := agent.Files{State: filepath.Join(dir, "state")}
	if err := files.Prepare(); err != nil {
		return err
	}
	journal, _, err := agent.OpenJournal(filepath.Join(dir, "history"))
	if err != nil {
		return err
	}
	defer journal.Close()
	o, free, err := agent.Machine(agent.Options{Version: "bench", Journal: journal}, &agent.Meter{}, 0)
	if err != nil {
		return err
	}
	defer free()
	files.Clock = o.Clocks
	o.Disk = local{files, fmt.Sprintf("idle-timeout: 24h\ncheck-interval: %s\n", every)}
	a, err := agent.New(o)
	if err != nil {
		return err
	}
	l, err := agent.Listen(filepath.Join(dir, "agent.sock"))
	if err != nil {
		return err
	}
	control := agent.Control(a, l, nil)
	served := make(chan error, 1)
	go func() { served <- control.Run(ctx) }()
	return errors.Join(a.Run(ctx), <-served)
}

// usage is the resource usage of a process.
type usage struct {
	cpu     time.Duration
	rss     int64
	written int64
}

func usageOf(pid int) (u usage, err error) {
	live := proc.Live()
	st, err := live.Stat(pid)
	if err != nil {
		return u, err
	}
	u.cpu = time.Duration(st.UTime+st.STime) * live.Tick()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	u.rss = number(string(status), "VmRSS:") << 10
	written, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	u.written = number(string(written), "write_bytes:")
	return u, err
}

func number(text, name string) int64 {
	_, rest, _ := strings.Cut(text, name)
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return 0
	}
	n, _ := strconv.ParseInt(fields[0], 10, 64) // 0 if the kernel does not report it
	return n
}

// contender is one of the compared programs.
type contender struct {
	name string
	cmd  *exec.Cmd
	ask  func(ctx context.Context) (int64, error) // performs one check and returns the bytes it transferred; nil if the contender checks by itself
}

func measure(ctx context.Context, span, every time.Duration) error {
	dir, err := os.MkdirTemp("", "lull-bench-agent-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fmt.Printf("machine: %d CPUs; a check every %s for %s\n\n", countCPUs(), every, span)
	fmt.Printf("file readings of a tick: %s\n\n", reading())
	fmt.Printf("%-22s %10s %14s %16s %18s %14s\n", "", "memory", "CPU a check", "CPU s an hour", "written an hour", "sent an hour")
	base := usageLine{}
	for _, c := range contenders(dir, every) {
		u, err := c.run(ctx, span, every)
		if err != nil {
			fmt.Printf("%-22s left out: %v\n", c.name, err)
			continue
		}
		if base.name == "" {
			base = u
		}
		fmt.Println(u.text(base))
	}
	return nil
}

func countCPUs() int {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	return strings.Count(string(b), "\ncpu")
}

// reading measures the agent's file reads alone.
func reading() string {
	m := proc.NewMachine(proc.MachineConfig{})
	defer m.Close()
	into := make([]idle.Reading, 0, 8)
	const rounds = 2000
	started := time.Now()
	for range rounds {
		into = m.Read(time.Now(), proc.Limits{}, into[:0])
	}
	return (time.Since(started) / rounds).String()
}

func contenders(dir string, every time.Duration) []contender {
	self, _ := os.Executable() // on an error, the start of the command below fails
	out := []contender{{name: "lull agent", cmd: exec.Command(self, "-child", dir, "-every", every.String())}}
	out = append(out, exporter())
	conf := filepath.Join(dir, "collectd.conf")
	text := fmt.Sprintf("BaseDir %q\nPIDFile %q\nInterval %g\nLoadPlugin cpu\nLoadPlugin interface\nLoadPlugin disk\nLoadPlugin users\nLoadPlugin csv\n<Plugin csv>\nDataDir %q\n</Plugin>\n",
		dir, filepath.Join(dir, "pid"), every.Seconds(), filepath.Join(dir, "csv"))
	if err := os.WriteFile(conf, []byte(text), 0o600); err == nil {
		out = append(out, contender{name: "collectd", cmd: exec.Command("collectd", "-f", "-C", conf)})
	}
	return out
}

func exporter() contender {
	const addr = "127.0.0.1:19199"
	return contender{name: "node_exporter",
		cmd: exec.Command("prometheus-node-exporter", "--web.listen-address="+addr),
		ask: func(ctx context.Context) (int64, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
			if err != nil {
				return 0, err
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return 0, err
			}
			defer resp.Body.Close()
			return io.Copy(io.Discard, resp.Body)
		}}
}

// usageLine is one row of the table.
type usageLine struct {
	name    string
	rss     int64
	look    time.Duration // CPU time per check
	written int64         // bytes per check
	sent    int64         // bytes per check, sent to the client
}

func (u usageLine) text(base usageLine) string {
	s := fmt.Sprintf("%-22s %7.1f MB %14s %16.2f %15.1f kB %11.1f kB", u.name, float64(u.rss)/1e6, u.look.Round(time.Microsecond), u.look.Seconds()*60,
		float64(u.written)*60/1e3, float64(u.sent)*60/1e3)
	if u.name != base.name && base.look > 0 && base.rss > 0 {
		s += fmt.Sprintf("   (%.1fx memory, %.1fx CPU of the agent)", float64(u.rss)/float64(base.rss), float64(u.look)/float64(base.look))
	}
	return s
}

func (c contender) run(ctx context.Context, span, every time.Duration) (usageLine, error) {
	line := usageLine{name: c.name}
	if err := c.cmd.Start(); err != nil {
		return line, err
	}
	defer func() {
		c.cmd.Process.Signal(syscall.SIGTERM)
		c.cmd.Wait()
	}()
	if err := c.warmUp(ctx); err != nil {
		return line, err
	}
	before, err := usageOf(c.cmd.Process.Pid)
	if err != nil {
		return line, err
	}
	looks := int64(0)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for end := time.Now().Add(span); time.Now().Before(end); looks++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return line, ctx.Err()
		}
		if c.ask != nil {
			if line.sent, err = c.ask(ctx); err != nil {
				return line, err
			}
		}
	}
	after, err := usageOf(c.cmd.Process.Pid)
	if err != nil {
		return line, err
	}
	line.rss = after.rss
	line.look = (after.cpu - before.cpu) / time.Duration(looks)
	line.written = (after.written - before.written) / looks
	return line, nil
}

// warmUp waits until the contender is working, so that its start-up is not
// measured.
func (c contender) warmUp(ctx context.Context) error {
	for range 100 {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
		if c.ask == nil {
			continue // for a contender that checks by itself, five seconds suffice
		}
		if _, err := c.ask(ctx); err == nil {
			return nil
		} else if _, ok := errors.AsType[*net.OpError](err); !ok {
			return err
		}
	}
	if c.ask != nil {
		return errors.New("no answer")
	}
	return nil
}
