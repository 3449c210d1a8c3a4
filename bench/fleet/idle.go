package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"lull/bench/rig"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/sim"
	"lull/internal/sim/world"
)

// slowCML is a region whose CML hosts take 1 to 5 s for each answer and fail
// one answer in twenty.
const slowCML = `regions: [{name: us-east-1}]
timing: {background: -1s}
profiles: {quiet: {history: 100, history_span: 700h}}
workers:
  - {name: idle, count: %d, type: t3.small, profile: quiet}
faults:
  - {service: cml, kind: delay, delay: 1s}
  - {service: cml, kind: delay, delay: 2s, probability: 0.5}
  - {service: cml, kind: delay, delay: 1s, probability: 0.5}
  - {service: cml, kind: delay, delay: 1s, probability: 0.5}
  - {service: cml, kind: error, status: 503, probability: 0.05}
`

// idleFleet measures an unused fleet with slow CML hosts. The pauses of all its
// workers are due at the same time.
type idleFleet struct {
	workers  int
	interval time.Duration // interval of idle checks
	lead     time.Duration // from the start of the measurement to the deadline
	bin      string
	profiles string // directory for profiles of the time after the deadline; may be empty
}

// run returns an error unless every worker is stopped within two intervals of its
// deadline. The simulator records when each stop was sent.
func (b idleFleet) run(ctx context.Context) (err error) {
	const timeout = time.Hour
	deadline := time.Now().Add(b.lead).UTC().Round(0)
	r, err := rig.New(ctx, rig.Region{Bin: b.bin, Scenario: fmt.Sprintf(slowCML, b.workers), Each: func(_ sim.InstanceInfo, w *worker.Worker) {
		since := deadline.Add(-timeout)
		w.RunningSince, w.IdleTimeoutMinutes = &since, nil
		w.CreatedAt = since
	}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	seconds := fmt.Sprint(int(b.interval.Seconds()))
	begun := time.Now()
	if err := r.Serve(ctx, "--idle-detection-interval", seconds, "--worker-activity-detection-interval", fmt.Sprint(max(300, int(b.interval.Seconds()))),
		"--worker-idle-timeout-minutes", fmt.Sprint(int(timeout.Minutes())), "--worker-warn-before-minutes", "1"); err != nil {
		return err
	}
	ready := time.Since(begun)
	if err := delay.For(ctx, time.Until(deadline)); err != nil {
		return err
	}
	before, err := r.CPU()
	if err != nil {
		return err
	}
	end := deadline.Add(2 * b.interval)
	profiled := make(chan error, 1)
	go func() { profiled <- b.profile(ctx, r) }()
	var sent []time.Duration
	for {
		if sent, err = stops(ctx, r.Sim, deadline); err != nil {
			return err
		}
		if len(sent) == b.workers || time.Now().After(end) {
			break
		}
		if err := delay.For(ctx, time.Second); err != nil {
			return err
		}
	}
	after, err := r.CPU()
	if err != nil {
		return err
	}
	if err := <-profiled; err != nil {
		return err
	}
	rss, err := r.Resident()
	if err != nil {
		return err
	}
	at := func(share float64) string {
		if n := int(share*float64(b.workers)+0.5) - 1; n < len(sent) {
			return fmt.Sprintf("%.0f s", sent[max(n, 0)].Seconds())
		}
		return "never"
	}
	fmt.Printf("%d idle workers, an answer of CML takes 1 to 5 s and 5 %% fail, checked every %s, all due at once: %d stopped within %s; a tenth after %s, half after %s, 99 %% after %s, all after %s; ready after %.1f s, CPU %.1f s until the deadline and %.1f s after it, RSS %.0f MiB, load average %s\n",
		b.workers, b.interval, len(sent), 2*b.interval, at(0.1), at(0.5), at(0.99), at(1), ready.Seconds(), before.Seconds(), (after - before).Seconds(), rss/1024, load())
	if len(sent) < b.workers {
		return fmt.Errorf("%d of %d idle workers are not stopped %s after their deadline", b.workers-len(sent), b.workers, 2*b.interval)
	}
	if sent[0] < 0 {
		return fmt.Errorf("a worker was stopped %s before its deadline", -sent[0])
	}
	return nil
}

// profile writes a CPU profile of the next two intervals, and goroutine profiles
// of their beginning.
func (b idleFleet) profile(ctx context.Context, r *rig.Rig) error {
	if b.profiles == "" {
		return nil
	}
	save := func(kind, name string) error {
		p, err := r.Client.Profile(ctx, kind, int(2*b.interval.Seconds()))
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(b.profiles, "idle-"+name+".pprof"), p, 0o600)
	}
	cpu := make(chan error, 1)
	go func() { cpu <- save("cpu", "cpu") }()
	for n := range 4 { // stacks of its goroutines
		if err := errors.Join(delay.For(ctx, b.interval/4), save("goroutine", fmt.Sprintf("goroutines-%d", n))); err != nil {
			return err
		}
	}
	return <-cpu
}

// stops returns how long after the deadline the stop of each stopped instance was
// sent, in ascending order.
func stops(ctx context.Context, url string, deadline time.Time) ([]time.Duration, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", url+"/sim/instances", nil)
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	var all []sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
		return nil, err
	}
	var out []time.Duration
	for _, in := range all {
		for _, h := range in.History {
			if h.To == world.Stopping {
				out = append(out, h.At.Sub(deadline))
			}
		}
	}
	slices.Sort(out)
	return out, nil
}

// load returns the machine's load average over one minute.
func load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Fields(string(text))[0]
}
