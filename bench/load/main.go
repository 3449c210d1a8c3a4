// Command load measures the latencies that users see with a large fleet. It runs
// lull server over a simulated region. From this process, over loopback,
// dashboards follow the event stream and API requests are sent at a steady rate.
//
// Requests are sent on schedule, whether or not earlier ones were answered, and
// their latency counts from when they were due. The delay of an event counts from its
// timestamp, set by the server, to its arrival at a dashboard.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"lull/bench/rig"
	"lull/internal/lib/delay"
)

func main() {
	var b bench
	flag.IntVar(&b.workers, "workers", 10_000, "workers, a tenth of them running")
	flag.IntVar(&b.dashboards, "dashboards", 200, "clients on the event stream")
	flag.IntVar(&b.rate, "rate", 50, "requests of the API in a second")
	flag.DurationVar(&b.span, "for", time.Minute, "how long to measure")
	flag.DurationVar(&b.warm, "warm", 20*time.Second, "warm-up under the same load, which is not counted")
	flag.StringVar(&b.bin, "bin", "bin/lull", "the binary to measure")
	flag.StringVar(&b.profiles, "profile", "", "folder for a processor profile of the server")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := b.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench load:", err)
		os.Exit(1)
	}
}

// bench is one run.
type bench struct {
	workers, dashboards, rate int
	span, warm                time.Duration
	bin, profiles             string

	*rig.Rig
	http *http.Client
	from time.Time // earlier results are not counted

	mu     sync.Mutex
	took   map[string][]time.Duration // latencies by kind of request
	failed map[string]int
	delays []time.Duration // of events
}

func (b *bench) run(ctx context.Context) (err error) {
	before := load()
	if b.Rig, err = rig.New(ctx, rig.Region{Workers: b.workers, Events: 100, Bin: b.bin}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	if err := b.Serve(ctx); err != nil {
		return err
	}
	b.http = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: b.dashboards + 100}}
	defer b.http.CloseIdleConnections()
	b.took, b.failed = map[string][]time.Duration{}, map[string]int{}
	b.from = time.Now().Add(b.warm)
	during, cancel := context.WithCancel(ctx)
	var clients sync.WaitGroup
	lost := make(chan error, b.dashboards)
	for range b.dashboards {
		clients.Go(func() {
			if err := b.follow(during); during.Err() == nil {
				lost <- cmp.Or(err, io.ErrUnexpectedEOF)
			}
		})
	}
	done := make(chan error, 1)
	clients.Go(func() { done <- b.watchServer(during) })
	b.requests(during)
	text, err := b.used()
	cancel()
	clients.Wait()
	close(lost)
	for e := range lost {
		err = errors.Join(err, fmt.Errorf("a dashboard was cut off: %w", e))
	}
	if err = errors.Join(err, <-done); err != nil {
		return err
	}
	fmt.Printf("%d workers, %d dashboards, %d requests/s for %s; load average before %s, after %s; %s\n\n", b.workers, b.dashboards, b.rate, b.span, before, load(), text)
	b.report()
	return nil
}

// load returns the machine's load average over one minute.
func load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Fields(string(text))[0]
}

// used returns the server's resource usage during the measurement.
func (b *bench) used() (string, error) {
	cpu, err := b.CPU()
	kib, err2 := b.Resident()
	return fmt.Sprintf("server: %.1f s of CPU since its start, %.0f MiB", cpu.Seconds(), kib/1024), errors.Join(err, err2)
}

// watchServer writes a profile of the server during the measurement.
func (b *bench) watchServer(ctx context.Context) error {
	if b.profiles == "" {
		return nil
	}
	if err := delay.For(ctx, time.Until(b.from)); err != nil {
		return err
	}
	p, err := b.Client.Profile(ctx, "cpu", int((b.span - time.Second).Seconds()))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.profiles, "load-cpu.pprof"), p, 0o600)
}

// kind is one kind of request, with its share in percent.
type kind struct {
	name   string
	share  int
	method string
	path   func(id string) string
	body   func() string
}

// kinds are the requests of a dashboard and a script. Only snoozes change
// something; each causes an event for every dashboard.
var kinds = []kind{
	{name: "overview", share: 25, path: func(string) string { return "/overview?limit=100" }},
	{name: "overview, searched", share: 5, path: func(id string) string { return "/overview?limit=100&q=" + id[:6] }},
	{name: "workers, a page", share: 10, path: func(string) string { return "/workers?limit=100" }},
	{name: "worker", share: 15, path: func(id string) string { return "/workers/" + id }},
	{name: "why", share: 10, path: func(id string) string { return "/workers/" + id + "/why" }},
	{name: "timeline", share: 5, path: func(id string) string { return "/workers/" + id + "/timeline" }},
	{name: "audit of a worker", share: 5, path: func(id string) string { return "/workers/" + id + "/audit" }},
	{name: "audit, a page", share: 4, path: func(string) string { return "/audit?limit=100&newest=true" }},
	{name: "savings, without idle hours", share: 1, path: func(string) string { return "/savings?idle=false&by=region" }},
	{name: "snooze", share: 20, method: "POST", path: func(id string) string { return "/workers/" + id + "/snooze" },
		body: func() string { return fmt.Sprintf(`{"minutes":%d}`, 30+rand.IntN(60)) }},
}

// draw picks a kind at random, according to the shares.
func draw() *kind {
	n := rand.IntN(100)
	for i := range kinds {
		if n -= kinds[i].share; n < 0 {
			return &kinds[i]
		}
	}
	return &kinds[0]
}

// requests sends requests on schedule and waits for all answers.
func (b *bench) requests(ctx context.Context) {
	var asked sync.WaitGroup
	defer asked.Wait()
	every := time.Second / time.Duration(b.rate)
	begun := time.Now()
	for n := 0; ; n++ {
		due := begun.Add(time.Duration(n) * every)
		if due.After(b.from.Add(b.span)) || delay.For(ctx, time.Until(due)) != nil {
			return
		}
		k := draw()
		asked.Go(func() { b.ask(ctx, k, due) })
	}
}

func (b *bench) ask(ctx context.Context, k *kind, due time.Time) {
	id := b.IDs[rand.IntN(b.Up)] // a running worker, because it has more to explain
	err := b.call(ctx, k, id)
	took := time.Since(due)
	if due.Before(b.from) {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.took[k.name] = append(b.took[k.name], took)
	if err != nil {
		if b.failed[k.name]++; b.failed[k.name] == 1 {
			fmt.Fprintf(os.Stderr, "%s: %v\n", k.name, err)
		}
	}
}

// send sends a request and returns the body of the answer, which must be a
// success.
func (b *bench) send(ctx context.Context, method, path, body string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, b.URL+"/api/v1"+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+b.Token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Idempotency-Key", crand.Text())
	}
	res, err := b.http.Do(req)
	if err == nil && res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(res.Body, 1000)) // the beginning of the body explains the failure
		err = errors.Join(fmt.Errorf("%s %s: %s %s", method, path, res.Status, text), res.Body.Close())
	}
	return res, err
}

func (b *bench) call(ctx context.Context, k *kind, id string) error {
	body := ""
	if k.body != nil {
		body = k.body()
	}
	res, err := b.send(ctx, cmp.Or(k.method, "GET"), k.path(id), body)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, res.Body)
	return errors.Join(err, res.Body.Close())
}

// follow simulates a dashboard: it reads the event stream until ctx ends.
func (b *bench) follow(ctx context.Context) error {
	res, err := b.send(ctx, "GET", "/events", "")
	if err != nil {
		return err
	}
	defer res.Body.Close()
	lines := bufio.NewReader(res.Body)
	for {
		line, err := lines.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			continue // the rest of a line that was too long
		}
		if err != nil {
			return err
		}
		if at, ok := stamp(line); ok && at.After(b.from) {
			delay := time.Since(at)
			b.mu.Lock()
			b.delays = append(b.delays, delay)
			b.mu.Unlock()
		}
	}
}

// stamp returns the time of the audit entry in a line of the stream. ok is false
// if the line has none.
func stamp(line []byte) (time.Time, bool) {
	if !bytes.HasPrefix(line, []byte("data: ")) {
		return time.Time{}, false
	}
	_, rest, ok := bytes.Cut(line, []byte(`"at":"`))
	text, _, ok2 := bytes.Cut(rest, []byte(`"`))
	if !ok || !ok2 {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, string(text))
	return at, err == nil
}

func (b *bench) report() {
	line := func(name string, l []time.Duration, failed int) {
		slices.Sort(l)
		at := func(share float64) string {
			if len(l) == 0 {
				return "-"
			}
			return fmt.Sprintf("%.1f", l[min(len(l)-1, int(share*float64(len(l))))].Seconds()*1000)
		}
		fmt.Printf("%-30s %8d %7d %9s %9s %9s\n", name, len(l), failed, at(0.5), at(0.99), at(1))
	}
	fmt.Printf("%-30s %8s %7s %9s %9s %9s\n", "ms", "count", "failed", "p50", "p99", "most")
	var all []time.Duration
	failed := 0
	for _, k := range kinds {
		line(k.name, b.took[k.name], b.failed[k.name])
		all, failed = append(all, b.took[k.name]...), failed+b.failed[k.name]
	}
	line("all requests", all, failed)
	line("events to dashboards", b.delays, 0)
}
