//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host"
	"lull/internal/lib/httpx"
	"lull/internal/lib/tracing"
	"lull/internal/lib/unixsock"
	"lull/internal/platform/journal"
	"lull/internal/platform/oci"
	"lull/internal/protocol/hostctl"
	"lull/internal/relay"
	"lull/internal/runtime/docker"
	"lull/internal/runtime/process"
)

func (c *cli) hostCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "host",
		Short: "Run and manage instances on this machine",
		Long: `Run instances on this machine: freeze them when idle, and wake them on the first
packet.

The host runs as root or as an ordinary user. When it exits, it thaws paused
instances and leaves running ones running. --stop-all stops them all.`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := resolve(c.getenv, file, cmd.Flags())
			if err != nil {
				return &usageError{err}
			}
			return c.runHost(cmd.Context(), cfg)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "YAML config file")
	bindFlags(cmd.Flags(), c.getenv)
	return cmd
}

// runHost is the wiring of a host daemon, in the order in which it comes up.
func (c *cli) runHost(ctx context.Context, cfg hostConfig) error {
	log := slog.New(slog.NewTextHandler(c.err, nil))
	faults := raiseFiles(uint64(cfg.Files))
	debug.SetGCPercent(50) // it keeps thousands of records and makes little garbage
	files, err := host.OpenFiles(cfg.Data)
	if err != nil {
		return err
	}
	defer files.Close()
	recs, err := files.Load()
	if err != nil {
		return err
	}
	api, guests, err := hostSockets(cfg.Socket)
	if err != nil {
		return err
	}
	defer api.Close()
	defer guests.Close()
	var scraped net.Listener
	if cfg.Metrics != "" {
		if scraped, err = net.Listen("tcp", cfg.Metrics); err != nil {
			return fmt.Errorf("cannot listen for Prometheus on %s: %w", cfg.Metrics, err)
		}
		defer scraped.Close()
	}

	var h *host.Host
	rt, err := process.New(ctx, process.Config{Dir: filepath.Join(cfg.Data, "shim"), Shim: cfg.Shim, Log: log,
		OnExit:     func(id string, run uint64, e instance.Exit) { h.OnExit(id, run, e) },
		OnThawed:   func() { h.WakeAll("supervisor", "the daemon was suspended, and the shim thawed all instances") },
		OnShimLost: func() { h.WakeAll("supervisor", "the shim died and was replaced") },
		OnGivenUp:  func(id, why string) { h.GivenUp(id, why) }})
	if err != nil {
		return err
	}
	defer rt.Close()
	var shared net.Listener
	if cfg.HTTP != "" {
		if shared, err = keepListening(ctx, rt, sharedPort, cfg.HTTP); err != nil {
			return fmt.Errorf("cannot listen for HTTP on %s: %w", cfg.HTTP, err)
		}
		defer shared.Close()
	}
	runtimes, missing := map[string]host.Runtime{"process": rt}, map[string]error{}
	images, err := oci.OpenStore(filepath.Join(cfg.Data, "images"), oci.Limits{})
	if err != nil {
		return err
	}
	if box, err := newContainers(cfg, images, rt); err != nil {
		missing["container"] = err
	} else {
		runtimes["container"] = box
		if err := box.Missing(); err != nil {
			log.Warn("no container can be started", "err", err)
		}
	}
	if vms, err := openMachines(cfg, images, log, rt, func() *host.Host { return h }); err != nil {
		missing["microvm"] = err
	} else {
		defer vms.Close()
		runtimes["microvm"] = vms
		if err := vms.Missing(); err != nil {
			log.Warn("microVMs are not available", "err", err)
		}
	}
	var containers *docker.Runtime
	if cfg.Docker != "" {
		if containers, err = docker.New(docker.Config{Socket: cfg.Docker, Process: rt, Log: log,
			OnExit: func(id string, run uint64, e instance.Exit) { h.OnExit(id, run, e) }}); err != nil {
			return err
		}
		defer containers.Close()
		runtimes["docker"] = containers
	}
	kept, err := openEvidence(filepath.Join(cfg.Data, "evidence"), journal.Options{MaxBytes: 256 << 20}, log)
	if err != nil {
		return err
	}
	defer kept.Close()
	events, err := host.OpenEventLog(filepath.Join(cfg.Data, "events"), log)
	if err != nil {
		return err
	}
	defer events.Close()
	wakeRelay, err := relay.New(relay.Config{Log: log})
	if err != nil {
		return err
	}
	front, err := relay.NewFront(relay.FrontConfig{Log: log})
	if err != nil {
		return err
	}
	gates := &gates{relay: wakeRelay, front: front, ports: rt, open: map[string]bool{}}
	traces, err := tracing.FromEnv(ctx, c.getenv, "lull-host", version, nil, log)
	if err != nil {
		return err
	}
	defer func() {
		if err := traces.End(); err != nil {
			log.Warn(err.Error())
		}
	}()
	budget, available, err := cfg.budget()
	if err != nil {
		return err
	}
	share, err := cfg.cpuPercent()
	if err != nil {
		return err
	}
	space, err := cfg.imageSpace()
	if err != nil {
		return err
	}
	keepers := map[string]instance.ImageKeeper{"images": images}
	if k, ok := runtimes["microvm"].(instance.ImageKeeper); ok {
		keepers["microvm"] = k
	}
	halted, err := files.Halted()
	if err != nil {
		return fmt.Errorf("cannot read whether the host is halted: %w", err)
	}
	var fleetHalted *idle.HaltedBy
	if cfg.Server != "" {
		fleetHalted, err = files.FleetHalt()
	} else { // a halt of a fleet that this host no longer reports to
		err = files.KeepFleetHalt(nil)
	}
	if err != nil {
		return fmt.Errorf("cannot read whether the fleet is halted: %w", err)
	}
	h = host.New(host.Config{Halted: halted, KeepHalt: files.KeepHalt, FleetHalted: fleetHalted, KeepFleetHalt: files.KeepFleetHalt, Images: keepers, ImageAge: cfg.ImageAge, ImageSpace: space, Memory: budget, Available: available, Places: int(cfg.Wakes), WakeWait: cfg.WakeWait, PauseAfter: cfg.PauseAfter, StopAfter: cfg.StopAfter, Probe: cfg.Probe, CPUPercent: share, NetBytes: float64(cfg.Net), DiskBytes: float64(cfg.Disk),
		BaseEnv: baseEnv(c.getenv), LogDir: filepath.Join(cfg.Data, "logs"), Socket: guests.Addr().String(),
		SharedHTTP: shared != nil, Runtimes: runtimes, Missing: missing, Records: files, Evidence: kept, EventLog: events, Log: log, Tracer: traces.Tracer(),
		NewGate: gates.add, HeldListeners: rt})
	reports, err := newReporter(cfg, h, faults, log)
	if err != nil {
		return err
	}

	// The relay carries connections before instances are taken over, so that
	// clients of a restarting daemon wait instead of being refused.
	g, gctx := errgroup.WithContext(context.WithoutCancel(ctx))
	relayCtx, endRelay := context.WithCancel(gctx)
	defer endRelay()
	g.Go(func() error { return wakeRelay.Run(relayCtx) })
	keepCtx, endKeeping := context.WithCancel(gctx)
	defer endKeeping()
	g.Go(func() error { return kept.Run(keepCtx) })
	rtCtx, endRuntime := context.WithCancel(gctx)
	defer endRuntime()
	g.Go(func() error { return rt.Run(rtCtx) })
	if err := h.Load(ctx, recs); err != nil {
		log.Error("some instances could not be adopted unchanged", "err", err)
	}
	if err := rt.UnholdOthers(ctx, func(id string) bool {
		return gates.has(id) || id == sharedPort && shared != nil || h.Has(id)
	}); err != nil {
		log.Warn("ports of removed instances may still be open", "err", err)
	}
	started := time.Now()
	metrics := promhttp.HandlerFor(hostMetrics(h), promhttp.HandlerOpts{})
	a := &host.API{Host: h, Version: version, Metrics: metrics,
		Status: func() hostctl.Status {
			s := hostStatus(h, rt, cfg, started, faults)
			if containers != nil {
				s.LeftAlone = containers.Faults()
			}
			if reports != nil {
				l := reports.Link()
				s.Server = &l
			}
			return s
		}}
	handler, _ := a.Handler()
	ends := []func(){serve(g, api, handler)}
	if shared != nil {
		ends = append(ends, serve(g, shared, front))
	}
	if scraped != nil {
		alone := http.NewServeMux()
		alone.Handle("GET /metrics", metrics)
		ends = append(ends, serve(g, scraped, alone))
	}
	guestCtx, endGuests := context.WithCancel(gctx)
	guestServer := &host.Guests{Host: h, Listener: guests, Identify: func(pid int) (string, error) { return identify(runtimes, pid) }}
	g.Go(func() error { return guestServer.Run(guestCtx) })
	if containers != nil {
		g.Go(func() error { return containers.Follow(guestCtx, h) })
	}
	if reports != nil {
		g.Go(func() error { return reports.Run(guestCtx) })
	}
	hostCtx, endHost := context.WithCancel(gctx)
	hostDone := make(chan struct{})
	g.Go(func() error { defer close(hostDone); return h.Run(hostCtx) })
	log.Info("host is ready", "socket", cfg.Socket, "data", cfg.Data, "freezer", rt.Freezer(), "instances", len(recs),
		"runtimes", strings.Join(slices.DeleteFunc(slices.Sorted(maps.Keys(runtimes)), func(name string) bool { return h.Missing()[name] != nil }), " "))

	g.Go(func() error { // ends everything in reverse order
		select {
		case <-ctx.Done():
		case <-gctx.Done():
		}
		if cfg.StopAll {
			h.StopAll(context.WithoutCancel(ctx))
		}
		wakeRelay.Unlisten() // new connections wait for the next daemon
		for _, end := range ends {
			end()
		}
		endGuests()
		endHost()
		<-hostDone
		endRelay()
		endRuntime()
		endKeeping()
		return nil
	})
	return g.Wait()
}

// hostMetrics are those of lull host, and of its process.
func hostMetrics(h *host.Host) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(h.Collector(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

// identify asks every runtime whose a process is.
func identify(runtimes map[string]host.Runtime, pid int) (string, error) {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(runtimes)) {
		if r, ok := runtimes[name].(instance.Identifier); ok {
			id, err := r.Identify(pid)
			if err == nil {
				return id, nil
			}
			errs = append(errs, err)
		}
	}
	return "", errors.Join(errs...)
}

// serve runs an HTTP server in g and returns what ends it.
func serve(g *errgroup.Group, ln net.Listener, h http.Handler) (end func()) {
	s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, ConnContext: httpx.WithPeer}
	g.Go(func() error {
		if err := s.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("cannot serve on %s: %w", ln.Addr(), err)
		}
		return nil
	})
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if s.Shutdown(ctx) != nil { // streams do not end by themselves
			s.Close()
		}
	}
}

// raiseFiles raises the limit of open files to what was asked for, or as far
// as it goes, and says what that allows.
func raiseFiles(want uint64) (faults []string) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return []string{"cannot read the limit of open files: " + err.Error()}
	}
	up := unix.Rlimit{Cur: max(l.Cur, want), Max: max(l.Max, want)}
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &up) == nil {
		return nil
	}
	up = unix.Rlimit{Cur: l.Max, Max: l.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &up); err != nil || l.Max < want {
		return []string{fmt.Sprintf("open files are limited to %d, %d were requested: at most about %d instances can be paused at once; raise it with ulimit -n or LimitNOFILE=", l.Max, want, l.Max/3)}
	}
	return nil
}

// hostSockets opens the API's socket (mode 0600) and, beside it, LULL_SOCKET
// (any local user; who speaks is taken from the kernel).
func hostSockets(path string) (api, guests *unixsock.Listener, err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, nil, fmt.Errorf("cannot create the socket's directory: %w", err)
	}
	if api, err = unixsock.Listen(path, 0o600); err != nil {
		return nil, nil, err
	}
	if guests, err = unixsock.Listen(guestPath(path), 0o666); err != nil {
		return nil, nil, errors.Join(err, api.Close())
	}
	return api, guests, nil
}

// baseEnv returns the part of this process's environment that every instance
// gets.
func baseEnv(getenv func(string) string) []string {
	var env []string
	for _, k := range []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR"} {
		if v := getenv(k); v != "" {
			env = append(env, k+"="+v)
		}
	}
	return env
}

func hostStatus(h *host.Host, rt *process.Runtime, cfg hostConfig, started time.Time, faults []string) hostctl.Status {
	s := hostctl.Status{Version: version, PID: os.Getpid(), StartedAt: started, Halt: h.Halted(), DataDir: cfg.Data,
		Instances: map[string]int{}, Room: h.Room(), Freezer: rt.Freezer(), Shim: rt.Shim(), Goroutines: runtime.NumGoroutine(), Faults: append(append([]string{}, faults...), h.Misset()...), Missing: map[string]string{}}
	for name, why := range h.Missing() {
		s.Missing[name] = why.Error()
	}
	s.Halted = s.Halt != nil
	for _, o := range h.List(false) {
		s.Instances[o.State]++
	}
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil {
		s.FileLimit = l.Cur
	}
	if d, err := os.ReadDir("/proc/self/fd"); err == nil {
		s.OpenFiles = len(d)
	}
	return s
}
