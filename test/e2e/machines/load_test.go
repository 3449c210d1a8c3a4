package machines

import (
	"bufio"
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
)

// The size of one load: the number of answers by nginx, and of runs of each Redis
// command, over a few concurrent connections.
const (
	answers = 24
	orders  = 300
	clients = 4

	napsPerLoad = 2
	napEvery    = 200 * time.Millisecond
)

// script makes wrk compare every body, close every second connection after its
// request, and print a line when it has enough answers. wrk is then interrupted.
// A fixed duration would not work, because it is unknown how long the wakes take.
const script = `
local threads = {}
function setup(thread) table.insert(threads, thread) end
function init(args)
   local f = assert(io.open(args[1], "rb"))
   body, left, sent, wrong = f:read("*a"), tonumber(args[2]), 0, 0
   f:close()
end
function request()
   sent = sent + 1
   if sent % 2 == 0 then
      return wrk.format(nil, nil, {Connection = "close"})
   end
   return wrk.format()
end
function response(status, headers, got)
   if status ~= 200 or got ~= body then
      wrong = wrong + 1
   end
   left = left - 1
   if left == 0 then
      io.write("enough\n")
      io.flush()
   end
end
function done(summary, latency)
   local wrong = 0
   for _, thread in ipairs(threads) do
      wrong = wrong + thread:get("wrong")
   end
   local e = summary.errors
   io.write(string.format("report: requests=%d wrong=%d connect=%d read=%d write=%d status=%d timeout=%d longest_us=%d\n",
      summary.requests, wrong, e.connect, e.read, e.write, e.status, e.timeout, latency.max))
end
`

// peers skips the test if a load generator is not installed.
func peers(t *testing.T) {
	t.Helper()
	for program, pkg := range map[string]string{"wrk": "wrk", "redis-benchmark": "redis-tools"} {
		_, err := exec.LookPath(program)
		daemontest.Need(t, err, pkg)
	}
}

// load runs wrk and redis-benchmark against the guest concurrently, while the
// guest is repeatedly put to sleep. Neither may see an error, and everything that
// Redis acknowledged must be there afterwards.
func (c *client) load() {
	c.b.T.Helper()
	ctx, cancel := context.WithTimeout(c.b.T.Context(), 3*daemontest.WaitLimit)
	defer cancel()
	var web, store error
	over := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() { web = c.wrk(ctx) })
	work.Go(func() { store = c.benchmark(ctx) })
	go func() { work.Wait(); close(over) }()
	for naps, busy := 0, true; busy; {
		select {
		case <-over:
			busy = false
		case <-time.After(napEvery):
			if naps < napsPerLoad && c.nap() {
				naps++
			}
		}
	}
	if err := errors.Join(web, store); err != nil {
		c.b.T.Fatalf("%v; it is %+v", err, c.b.get())
	}
	c.loads++
	for key, ask := range map[string][]string{"orders": {"GET", counter}, "pushes": {"LLEN", list}} {
		if got := strings.TrimPrefix(c.redis(ask...), ":"); got != strconv.Itoa(c.loads*orders) {
			c.b.T.Fatalf("redis has %s %s after %d loads of %d", got, key, c.loads, orders)
		}
	}
}

// nap puts the guest to sleep in the middle of its work and resumes it. It
// resumes it manually, because a client that already waits for an answer sends
// nothing that would wake it. nap returns false if traffic canceled the pause,
// which is allowed. On every second call the load generators are stopped
// meanwhile, so that there is no traffic.
func (c *client) nap() bool {
	c.b.T.Helper()
	if c.b.get().State != "running" {
		return false
	}
	if c.tries++; c.tries%2 == 0 {
		c.drivers.signal(syscall.SIGSTOP)
		defer c.drivers.signal(syscall.SIGCONT)
	}
	if c.b.Force(c.b.name) != nil {
		return false
	}
	c.naps++
	c.b.Must(c.b.name, "resume")
	return true
}

// drivers are the running load generators, which can be stopped and continued
// together.
type drivers struct {
	mu   sync.Mutex
	live []*os.Process
}

func (d *drivers) begin(cmd *exec.Cmd) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := cmd.Start()
	if err == nil {
		d.live = append(d.live, cmd.Process)
	}
	return err
}

// wait waits for one of the load generators like cmd.Wait.
func (d *drivers) wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live = slices.DeleteFunc(d.live, func(p *os.Process) bool { return p == cmd.Process })
	return err
}

func (d *drivers) signal(sig syscall.Signal) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.live {
		_ = p.Signal(sig) // may have ended already
	}
}

// wrk runs wrk for the big file and checks its report.
func (c *client) wrk(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "wrk", "-t1", "-c"+strconv.Itoa(clients), "-d3600s", "--timeout", "600s", "-s", c.script,
		"http://"+c.b.addrs[0]+"/big", "--", c.big, strconv.Itoa(answers))
	stop := func() error { return cmd.Process.Signal(os.Interrupt) } // makes it print its report
	cmd.Cancel, cmd.WaitDelay = stop, 10*time.Second
	var said, complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = c.drivers.begin(cmd)
	}
	if err != nil {
		return fmt.Errorf("wrk: %w", err)
	}
	enough := false
	for sc := bufio.NewScanner(out); sc.Scan(); {
		fmt.Fprintln(&said, sc.Text())
		if sc.Text() == "enough" {
			enough = true
			go func() { // repeat it: wrk keeps sleeping if another of its threads receives the signal
				for stop() == nil {
					<-time.After(napEvery)
				}
			}()
		}
	}
	if err = errors.Join(err, c.drivers.wait(cmd)); err != nil || !enough {
		return fmt.Errorf("wrk: %w, enough %t; it said:\n%s%s", errors.Join(err, ctx.Err()), enough, &said, &complaint)
	}
	report, err := counts(said.String())
	if err != nil {
		return fmt.Errorf("wrk: %w; it said:\n%s%s", err, &said, &complaint)
	}
	c.served += report["requests"]
	c.slowest = max(c.slowest, time.Duration(report["longest_us"])*time.Microsecond)
	for _, what := range []string{"wrong", "connect", "read", "write", "status", "timeout"} {
		if n, ok := report[what]; !ok || n != 0 {
			return fmt.Errorf("wrk saw errors:\n%s%s", &said, &complaint)
		}
	}
	return nil
}

// counts parses the report line that script prints.
func counts(said string) (map[string]int, error) {
	_, line, ok := strings.Cut(said, "report: ")
	if !ok {
		return nil, errors.New("it ended without a report")
	}
	line, _, _ = strings.Cut(line, "\n")
	out := map[string]int{}
	for _, f := range strings.Fields(line) {
		k, v, _ := strings.Cut(f, "=")
		n, err := strconv.Atoi(v)
		if err != nil {
			return nil, fmt.Errorf("it reports %q", f)
		}
		out[k] = n
	}
	return out, nil
}

// The columns of redis-benchmark's output without -r.
const (
	counter = "counter:__rand_int__"
	list    = "mylist"
)

// benchmark runs redis-benchmark and checks its report.
func (c *client) benchmark(ctx context.Context) error {
	host, port, err := net.SplitHostPort(c.b.addrs[1])
	if err != nil {
		return err
	}
	var said, complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, "redis-benchmark", "-h", host, "-p", port, "-c", strconv.Itoa(clients), "-n", strconv.Itoa(orders),
		"-d", "512", "--csv", "-t", "set,get,incr,lpush")
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &said, &complaint, 10*time.Second
	fault := func(err error) error {
		return fmt.Errorf("redis-benchmark: %w; it said:\n%s%s", err, &said, &complaint)
	}
	if err = c.drivers.begin(cmd); err == nil {
		err = c.drivers.wait(cmd)
	}
	if err != nil {
		return fault(errors.Join(err, ctx.Err()))
	}
	if complaint.Len() > 0 || strings.Contains(strings.ToLower(said.String()), "error") {
		return fault(errors.New("it complains"))
	}
	rows, err := csv.NewReader(&said).ReadAll()
	if err != nil {
		return fault(err)
	}
	var tests []string
	for _, row := range rows {
		tests = append(tests, row[0])
	}
	if want := []string{"test", "SET", "GET", "INCR", "LPUSH"}; !slices.Equal(tests, want) {
		return fmt.Errorf("redis-benchmark reports %q, want %q", rows, want)
	}
	return nil
}

// timed reads the guest's clock (Unix nanoseconds) several times and uses the
// reading with the shortest round trip. off is how far the guest's clock is
// ahead, and way is the round-trip time. off is accurate to half of way.
func timed(ask func() int64) (off, way time.Duration) {
	way = -1
	for range 5 {
		began := time.Now()
		at := ask()
		if trip := time.Since(began); way < 0 || trip < way {
			off, way = time.Unix(0, at).Sub(began.Add(trip/2)), trip
		}
	}
	return off, way
}

// clock checks the guest's clock, as the service reports it, against this
// machine's.
func (c *client) clock() {
	t := c.b.T
	t.Helper()
	p := c.b.dial(2)
	defer p.Close()
	off, way := timed(func() (at int64) {
		var lines int
		errtest.Get(fmt.Sscan(c.b.ask(p, "x"), &at, &lines))(t)
		if c.lines++; lines != c.lines {
			t.Fatalf("the service has seen %d lines, want %d", lines, c.lines)
		}
		return at
	})
	if off.Abs() > way/2+slack {
		t.Fatalf("the guest's clock is %s off, seen over a way of %s", off, way)
	}
	c.offs = append(c.offs, off)
	c.ways = append(c.ways, way)
}

// slack is how far a guest's clock may be off on a machine that is too busy to
// update it in time.
const slack = 5 * time.Second

// newScript writes wrk's script to a file.
func newScript(t *testing.T) string {
	name := filepath.Join(t.TempDir(), "ask.lua")
	errtest.None(t, os.WriteFile(name, []byte(script), 0o644))
	return name
}
