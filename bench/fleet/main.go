// Command fleet measures what a steady fleet costs a server. It runs lull server
// on its embedded store, and lull sim in another process that is not counted. For
// each size it creates a simulated region and a store with its workers, starts
// the server, waits until every worker is read and owned, and measures some
// cycles: calls to the cloud, writes to the store, CPU time by part of the work,
// and memory. A tenth of the workers run. Each of those has a history of -events
// events, and its telemetry is read every 300 s, the shortest interval that the
// settings allow.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
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

	"lull/bench/rig"
	"lull/internal/lib/delay"
	"lull/internal/protocol/control"
)

func main() {
	sizes := flag.String("sizes", "1000,10000", "numbers of workers, one run for each")
	cycles := flag.Int("cycles", 4, "cycles of 30 s to measure")
	warm := flag.Duration("warm", 330*time.Second, "time between ready and the measurement; the first check of every worker, which always writes, takes 300 s")
	events := flag.Int("events", 300, "events in the history of each running worker")
	bin := flag.String("bin", "bin/lull", "the binary to measure")
	profile := flag.String("profile", "", "folder for the processor and heap profiles of each run")
	var idle idleFleet
	flag.IntVar(&idle.workers, "idle", 0, "measure instead how soon this many idle workers behind slow CML hosts are paused, and fail if one takes longer than two idle checks")
	flag.DurationVar(&idle.interval, "interval", time.Minute, "with -idle, the time between two idle checks")
	flag.DurationVar(&idle.lead, "lead", 6*time.Minute, "with -idle, the time until all of them are due")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if idle.workers > 0 {
		idle.bin, idle.profiles = *bin, *profile
		if err := idle.run(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "bench fleet:", err)
			os.Exit(1)
		}
		return
	}
	fmt.Println("workers  ready s (CPU)  describes/cycle  writes/cycle  CPU s/cycle: all    ec2  telemetry   idle  store   list  evidence     gc  other   RSS MiB  KiB/worker")
	for text := range strings.SplitSeq(*sizes, ",") {
		n, err := strconv.Atoi(text)
		if err == nil {
			err = run(ctx, bench{workers: n, cycles: *cycles, warm: *warm, profiles: *profile}, rig.Region{Workers: n, Events: *events, Bin: *bin})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench fleet:", err)
			os.Exit(1)
		}
	}
}

// bench is one run for one size.
type bench struct {
	cycles   int
	warm     time.Duration
	profiles string
	workers  int

	*rig.Rig
}

// cycle is the server's RECONCILE_INTERVAL.
const cycle = 30 * time.Second

func run(ctx context.Context, b bench, of rig.Region) (err error) {
	if b.Rig, err = rig.New(ctx, of); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	begun := time.Now()
	if err := b.Serve(ctx, "--worker-activity-detection-interval", "300"); err != nil {
		return err
	}
	ready := time.Since(begun)
	started, err := b.CPU()
	if err != nil {
		return err
	}
	if err := delay.For(ctx, b.warm); err != nil {
		return err
	}
	return b.measure(ctx, ready, started)
}

// measured contains the counters at one moment.
type measured struct {
	calls    map[string]float64
	revision int64
}

func (b *bench) readCounters(ctx context.Context) (m measured, err error) {
	req, err := http.NewRequestWithContext(ctx, "GET", b.Sim+"/sim/calls", nil)
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
		overview, err := control.Read[struct{ Revision int64 }](ctx, b.Client, "/overview?limit=1")
		if err == nil || try == 20 {
			m.revision = overview.Revision
			return m, err
		}
		if err := delay.For(ctx, 3*time.Second); err != nil {
			return m, err
		}
	}
}

func (b *bench) measure(ctx context.Context, ready, started time.Duration) error {
	before, err := b.readCounters(ctx)
	if err != nil {
		return err
	}
	span := time.Duration(b.cycles) * cycle
	used, err := b.CPU()
	if err != nil {
		return err
	}
	profile, err := b.Client.Profile(ctx, "cpu", int(span.Seconds()))
	if err != nil {
		return err
	}
	now, err := b.CPU()
	if err != nil {
		return err
	}
	after, err := b.readCounters(ctx)
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.File("profile"), profile, 0o600); err != nil {
		return err
	}
	if err := b.keep(ctx, profile); err != nil {
		return err
	}
	shares, err := b.shares(ctx)
	if err != nil {
		return err
	}
	rss, err := b.Resident()
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

// keep stores a profile of the run in the directory -profiles.
func (b *bench) keep(ctx context.Context, profile []byte) error {
	if b.profiles == "" {
		return nil
	}
	heap, err := b.Client.Profile(ctx, "heap", 1)
	if err != nil {
		return err
	}
	name := filepath.Join(b.profiles, strconv.Itoa(b.workers))
	return errors.Join(os.WriteFile(name+"-cpu.pprof", profile, 0o600), os.WriteFile(name+"-heap.pprof", heap, 0o600))
}

var tagLine = regexp.MustCompile(`^\s*\S+ \(\s*([0-9.]+)%\): (\w+)$`)

// focusLine matches the line of pprof's output with the share of samples that its
// filter selects.
var focusLine = regexp.MustCompile(`(?m)^Active filters:(?s:.*?)accounting for [0-9.a-z]+,\s+([0-9.]+)% of`)

// shares returns the parts of the CPU time by the profile's labels, as fractions
// of 1.
func (b *bench) shares(ctx context.Context) (map[string]float64, error) {
	out, err := exec.CommandContext(ctx, "go", "tool", "pprof", "-tags", b.File("profile")).Output()
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
	// Garbage collection has no label. What other goroutines do for it counts for
	// their own parts.
	out, err = exec.CommandContext(ctx, "go", "tool", "pprof", "-top", "-nodecount=100000", "-nodefraction=0", "-tagignore=.", "-focus=gcBgMarkWorker|bgsweep|bgscavenge", b.File("profile")).Output()
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
