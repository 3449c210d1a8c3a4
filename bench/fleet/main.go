// Command fleet measures what a steady fleet costs a server: lull server on its
// embedded store, with lull sim in another process that is not counted. For each
// size it makes a simulated region and a store that knows its workers, starts
// the server, waits until all is read and owned, and measures some cycles:
// calls of the cloud, writes of the store, processor time by part of the work,
// memory. A tenth of the workers run; each has a history of -events events, and
// its telemetry is due every 300 s, the shortest that the settings give.
package main

import (
	"bufio"
	"context"
	"encoding/json"
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
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"lull/internal/edge/etcd"
	"lull/internal/fleet"
	"lull/internal/link/control"
	"lull/internal/power"
	"lull/internal/sim"
	"lull/internal/store"
)

func main() {
	sizes := flag.String("sizes", "1000,10000", "numbers of workers, one run for each")
	cycles := flag.Int("cycles", 4, "cycles of 30 s to measure")
	warm := flag.Duration("warm", 330*time.Second, "time between ready and the measurement; the first check of every worker, which always writes, takes 300 s")
	events := flag.Int("events", 300, "events in the history of each running worker")
	bin := flag.String("bin", "bin/lull", "the binary to measure")
	profile := flag.String("profile", "", "folder for the processor and heap profiles of each run")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fmt.Println("workers  ready s (CPU)  describes/cycle  writes/cycle  CPU s/cycle: all    ec2  telemetry   idle  store   list  evidence     gc  other   RSS MiB  KiB/worker")
	for text := range strings.SplitSeq(*sizes, ",") {
		n, err := strconv.Atoi(text)
		if err == nil {
			err = run(ctx, bench{workers: n, cycles: *cycles, warm: *warm, events: *events, bin: *bin, profiles: *profile})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench fleet:", err)
			os.Exit(1)
		}
	}
}

// bench is one run.
type bench struct {
	workers, cycles, events int
	warm                    time.Duration
	bin, dir, profiles      string
	sim                     string // URL
}

// cycle is RECONCILE_INTERVAL.
const cycle = 30 * time.Second

func run(ctx context.Context, b bench) (err error) {
	if b.dir, err = os.MkdirTemp("", "lull-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	scenario := fmt.Sprintf(`regions: [{name: us-east-1}]
timing: {background: -1s}
profiles: {quiet: {history: %d, history_span: 700h}}
workers:
  - {name: up, count: %d, type: t3.small, profile: quiet}
  - {name: down, count: %d, type: t3.small, profile: quiet, state: stopped}
`, b.events, b.workers/10, b.workers-b.workers/10)
	if err := os.WriteFile(b.file("sim.yaml"), []byte(scenario), 0o600); err != nil {
		return err
	}
	cmlPort, err := freePort()
	if err != nil {
		return err
	}
	simulator, text, err := b.start(ctx, "on http://", "sim", "--listen", "127.0.0.1:0", "--cml-port", cmlPort, "--scenario", b.file("sim.yaml"))
	if err != nil {
		return err
	}
	defer end(simulator)
	b.sim = "http://" + strings.TrimSuffix(text, ",")
	if err := b.fill(ctx); err != nil {
		return err
	}
	begun := time.Now()
	server, url, err := b.start(ctx, "serving on ", "server", "--data", b.file("data"), "--listen", "127.0.0.1:0", "--cml-port", cmlPort, "--log-level", "warn",
		"--admin-token-file", b.file("token"), "--worker-activity-detection-interval", "300")
	if err != nil {
		return err
	}
	defer end(server)
	client, err := b.client(ctx, url)
	if err != nil {
		return err
	}
	ready := time.Since(begun)
	started, err := cpu(server.Process.Pid)
	if err != nil {
		return err
	}
	if err := control.Pause(ctx, b.warm); err != nil {
		return err
	}
	return b.measure(ctx, client, server.Process.Pid, ready, started)
}

func (b *bench) file(name string) string { return filepath.Join(b.dir, name) }

func freePort() (string, error) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		return "", err
	}
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port), l.Close()
}

// start runs lull and returns the word after a text that it prints.
func (b *bench) start(ctx context.Context, after string, args ...string) (*exec.Cmd, string, error) {
	cmd := exec.CommandContext(ctx, b.bin, args...)
	cmd.Env = append(os.Environ(), "AWS_ENDPOINT_URL="+b.sim, "AWS_ACCESS_KEY_ID=test", "AWS_SECRET_ACCESS_KEY=test", "CML_DEFAULT_PASSWORD=env:CML_PW", "CML_PW=cml")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if _, rest, ok := strings.Cut(lines.Text(), after); ok {
			go func() { _, _ = io.Copy(io.Discard, out) }() // what else it says is of no use
			return cmd, strings.Fields(rest)[0], nil
		}
	}
	end(cmd)
	return nil, "", fmt.Errorf("cannot start %s: it ended before it said %q", args[0], after)
}

func end(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // it was killed
}

// fill makes the store of a server that knows every simulated instance.
func (b *bench) fill(ctx context.Context) (err error) {
	req, err := http.NewRequestWithContext(ctx, "GET", b.sim+"/sim/instances", nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	var all []sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
		return err
	}
	db, err := etcd.OpenEmbedded(ctx, etcd.EmbeddedConfig{Dir: b.file("data"), NoSync: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	var ops []store.Op
	up := 0
	for i, in := range all {
		op, running := record(i, in)
		ops = append(ops, op)
		if running {
			up++
		}
		if len(ops) == store.MaxOps || i == len(all)-1 {
			if _, err := db.Commit(ctx, store.Txn{Then: ops}); err != nil {
				return err
			}
			ops = nil
		}
	}
	pool := fmt.Appendf(nil, `{"v":1,"up":%d}`, up)
	_, err = db.Commit(ctx, store.Txn{Then: []store.Op{store.Put("pool", pool)}})
	return err
}

// record is the worker of an instance, as it has been for a day.
func record(i int, in sim.InstanceInfo) (store.Op, bool) {
	since := time.Now().UTC().Add(-24 * time.Hour)
	timeout := 20 * 24 * 60 // nothing is paused while it is measured
	w := fleet.Worker{
		ID: fmt.Sprintf("w-%016x", i), Name: in.Name, AWSRegion: in.Region, DesiredStatus: power.WorkerStopped, Status: power.WorkerStopped,
		StatusSince: since, CreatedAt: since, IsIdleDetectionEnabled: true, IdleTimeoutMinutes: &timeout, PauseHolder: fleet.HolderController,
		Armed: true, TLSInsecure: true, EC2InstanceID: in.ID, EC2State: string(in.State), InstanceType: in.Type,
		License: fleet.License{Status: fleet.LicenseUnregistered}, RecentActivityEvents: []fleet.Event{}, AcceptedRisks: []string{fleet.RiskNoElasticIP},
	}
	running := in.State == "running"
	if running {
		w.Status, w.DesiredStatus, w.RunningSince = power.WorkerRunning, power.WorkerRunning, &since
		w.PublicIP, w.PrivateIP, w.HTTPSEndpoint, w.CMLVersion, w.CMLReady = in.PublicIP, in.PrivateIP, "https://"+in.PublicIP, in.CMLVersion, true
	}
	body, err := json.Marshal(w)
	if err != nil {
		panic(err) // a record of plain values
	}
	return store.Put("workers/"+w.ID, append([]byte(`{"v":1,`), body[1:]...)), running
}

// client waits until the server owns every part of the fleet.
func (b *bench) client(ctx context.Context, url string) (*control.Client, error) {
	token, err := os.ReadFile(b.file("token"))
	if err != nil {
		return nil, err
	}
	c, err := control.NewClient(url, strings.TrimSpace(string(token)), nil)
	if err != nil {
		return nil, err
	}
	for {
		var s control.Shards
		if _, err := c.Call(ctx, "GET", "/readyz", nil, nil); err == nil {
			if _, err := c.Call(ctx, "GET", "/admin/shards", nil, &s); err == nil && len(s.Held) == s.Total {
				return c, nil
			}
		}
		if err := control.Pause(ctx, 50*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// measured is what is counted at one moment.
type measured struct {
	calls    map[string]float64
	revision int64
}

func (b *bench) look(ctx context.Context, c *control.Client) (m measured, err error) {
	req, err := http.NewRequestWithContext(ctx, "GET", b.sim+"/sim/calls", nil)
	if err != nil {
		return m, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return m, err
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&m.calls); err != nil {
		return m, err
	}
	for try := 0; ; try++ {
		overview, err := control.Read[struct{ Revision int64 }](ctx, c, "/overview?limit=1")
		if err == nil || try == 20 {
			m.revision = overview.Revision
			return m, err
		}
		if err := control.Pause(ctx, 3*time.Second); err != nil {
			return m, err
		}
	}
}

func (b *bench) measure(ctx context.Context, c *control.Client, pid int, ready, started time.Duration) error {
	before, err := b.look(ctx, c)
	if err != nil {
		return err
	}
	span := time.Duration(b.cycles) * cycle
	used, err := cpu(pid)
	if err != nil {
		return err
	}
	profile, err := c.Profile(ctx, "cpu", int(span.Seconds()))
	if err != nil {
		return err
	}
	now, err := cpu(pid)
	if err != nil {
		return err
	}
	after, err := b.look(ctx, c)
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.file("profile"), profile, 0o600); err != nil {
		return err
	}
	if err := b.keep(ctx, c, profile); err != nil {
		return err
	}
	shares, err := b.shares(ctx)
	if err != nil {
		return err
	}
	rss, err := resident(pid)
	if err != nil {
		return err
	}
	describes := 0.0
	for name, n := range after.calls {
		if strings.Contains(name, "Describe") {
			describes += n - before.calls[name]
		}
	}
	per := float64(b.cycles)
	total := (now - used).Seconds() / per
	known := 0.0
	for _, v := range shares {
		known += v
	}
	fmt.Printf("%7d  %7.1f (%4.1f)  %15.1f  %12.1f  %16.2f  %5.2f  %9.2f  %5.2f  %5.2f  %5.2f  %8.2f  %5.2f  %5.2f  %8.0f  %10.1f\n", b.workers, ready.Seconds(), started.Seconds(), describes/per,
		float64(after.revision-before.revision)/per, total, total*shares["ec2"], total*shares["telemetry"], total*shares["idle"], total*shares["store"],
		total*shares["list"], total*shares["evidence"], total*shares["gc"], total*(1-known), rss/1024, rss/float64(b.workers))
	return nil
}

// keep leaves the profiles of the run where they were asked for.
func (b *bench) keep(ctx context.Context, c *control.Client, profile []byte) error {
	if b.profiles == "" {
		return nil
	}
	heap, err := c.Profile(ctx, "heap", 1)
	if err != nil {
		return err
	}
	name := filepath.Join(b.profiles, strconv.Itoa(b.workers))
	return errors.Join(os.WriteFile(name+"-cpu.pprof", profile, 0o600), os.WriteFile(name+"-heap.pprof", heap, 0o600))
}

// cpu is the processor time a process has used.
func cpu(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	user, err := strconv.Atoi(f[11])
	system, err2 := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err, err2)
}

// resident is the memory of a process in KiB.
func resident(pid int) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	return float64(kib), err
}

var tagLine = regexp.MustCompile(`^\s*\S+ \(\s*([0-9.]+)%\): (\w+)$`)

// focusLine tells how much of all a profile shows.
var focusLine = regexp.MustCompile(`(?m)^Active filters:(?s:.*?)accounting for [0-9.a-z]+,\s+([0-9.]+)% of`)

// shares are the parts of the processor time, each a share of 1, as the labels
// of the profile tell them.
func (b *bench) shares(ctx context.Context) (map[string]float64, error) {
	out, err := exec.CommandContext(ctx, "go", "tool", "pprof", "-tags", b.file("profile")).Output()
	if err != nil {
		return nil, fmt.Errorf("cannot read the profile: %w", err)
	}
	shares := map[string]float64{}
	for line := range strings.SplitSeq(string(out), "\n") {
		line = strings.TrimSpace(line)
		if m := tagLine.FindStringSubmatch(line); m != nil {
			v, err := strconv.ParseFloat(m[1], 64)
			if err != nil {
				return nil, err
			}
			shares[m[2]] = v / 100
		}
	}
	// Collecting garbage has no label. What of it goroutines do for themselves
	// is in their parts.
	out, err = exec.CommandContext(ctx, "go", "tool", "pprof", "-top", "-nodecount=100000", "-nodefraction=0", "-tagignore=.", "-focus=gcBgMarkWorker|bgsweep|bgscavenge", b.file("profile")).Output()
	if err != nil {
		return nil, fmt.Errorf("cannot read the profile: %w", err)
	}
	if m := focusLine.FindSubmatch(out); m != nil {
		v, err := strconv.ParseFloat(string(m[1]), 64)
		if err != nil {
			return nil, err
		}
		shares["gc"] = v / 100
	}
	return shares, nil
}
