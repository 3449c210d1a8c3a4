//go:build linux && !portable

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host"
	"lull/internal/host/api"
	"lull/internal/host/deadlines"
	"lull/internal/host/events"
	"lull/internal/host/probe"
	"lull/internal/host/records"
	"lull/internal/host/report"
	"lull/internal/lib/httpx"
	"lull/internal/lib/task"
	"lull/internal/lib/tracing"
	"lull/internal/lib/unixsock"
	"lull/internal/lib/wall"
	"lull/internal/platform/alarm"
	"lull/internal/platform/journal"
	"lull/internal/platform/oci"
	"lull/internal/protocol/hostctl"
	"lull/internal/relay"
	"lull/internal/runtime/adopted"
	"lull/internal/runtime/docker"
	"lull/internal/runtime/process"
	"lull/internal/shim"
)

// stopAllWithin is the time limit for the end of a host's parts. With --stop-all, it
// covers the stop grace of every instance.
const stopAllWithin = 30 * time.Minute

// hostDaemon holds the parts of lull host. Its open methods create them in the order
// in which runHost calls them, and close undoes that in reverse.
type hostDaemon struct {
	cli      *cli
	openPage bool // print a sign-in link
	cfg      hostConfig
	getenv   func(string) string
	log      *slog.Logger
	faults   []string // shown in the status until the daemon ends

	files   *records.Files
	recs    []instance.Record
	api     net.Listener
	guests  *unixsock.Listener
	scraped net.Listener // nil without --metrics
	shared  net.Listener // nil without --http
	docker  net.Listener // nil without --docker-socket

	processes  *process.Runtime
	running    *adopted.Runtime
	images     *oci.Store
	containers *docker.Runtime // nil without --docker
	runtimes   map[string]host.Runtime
	missing    map[string]error // why a runtime could not be opened, by runtime

	evidence *journal.Journal
	events   *events.Log
	traces   *tracing.Traces
	relay    *relay.Router
	front    *relay.Front
	gates    *gates

	h       *host.Host
	reports *report.Reporter // nil without --server
	page    net.Listener     // nil without --listen
	board   *dashboard       // nil without --listen
	closers []func()
}

func (d *hostDaemon) closeLater(f func()) { d.closers = append(d.closers, f) }

func (d *hostDaemon) close() {
	for _, f := range slices.Backward(d.closers) {
		f()
	}
}

func (d *hostDaemon) openRecords(context.Context) (err error) {
	if d.files, err = records.OpenFiles(d.cfg.Data); err != nil {
		return err
	}
	d.closeLater(func() {
		if err := d.files.Close(); err != nil {
			d.log.Warn("the record files are not up to date; the next start reads the log", "err", err)
		}
	})
	d.recs, err = d.files.Load()
	for _, damage := range d.files.Damage() {
		d.log.Warn("the log of records was damaged; changes may be missing", "damage", damage)
	}
	return err
}

func (d *hostDaemon) openListeners(context.Context) (err error) {
	if d.api, d.guests, err = hostSockets(d.cfg.Socket); err != nil {
		return err
	}
	d.closeLater(func() { d.api.Close(); d.guests.Close() })
	if d.cfg.DockerSocket != "" {
		// It gets the owner and mode of Docker's own socket once Docker answers.
		if d.docker, err = unixsock.Listen(d.cfg.DockerSocket, 0o600); err != nil {
			return err
		}
		d.closeLater(func() { d.docker.Close() })
	}
	if d.cfg.Listen != "" {
		if d.page, err = net.Listen("tcp", d.cfg.Listen); err != nil {
			return fmt.Errorf("cannot listen on %s for the dashboard: %w", d.cfg.Listen, err)
		}
		d.closeLater(func() { d.page.Close() })
	}
	if d.cfg.Metrics == "" {
		return nil
	}
	if d.scraped, err = net.Listen("tcp", d.cfg.Metrics); err != nil {
		return fmt.Errorf("cannot listen for Prometheus on %s: %w", d.cfg.Metrics, err)
	}
	d.closeLater(func() { d.scraped.Close() })
	return nil
}

func (d *hostDaemon) openProcesses(ctx context.Context) (err error) {
	supervisor, err := findHelper(d.cfg.Shim, d.cfg.Data, shim.Name)
	if err != nil {
		return err
	}
	d.processes, err = process.New(ctx, process.Config{Dir: filepath.Join(d.cfg.Data, "shim"), Shim: supervisor, Log: d.log,
		OnExit:     d.onExit,
		OnThawed:   func() { d.h.WakeAll("supervisor", "the daemon was suspended, and the shim thawed all instances") },
		OnShimLost: func() { d.h.WakeAll("supervisor", "the shim died and was replaced") },
		OnGivenUp:  func(id, why string) { d.givenUp(id, why) }})
	if err != nil {
		return err
	}
	d.closeLater(func() { d.processes.Close() })
	d.runtimes["process"] = d.processes
	running, err := adopted.New(adopted.Config{Dir: filepath.Join(d.cfg.Data, "adopted"), Process: d.processes, Log: d.log,
		OnExit: d.onExit, Observe: func(id, why string) { d.observe(id, why) },
		Started: func(id, why string) { d.started(id, why) }, Unwatch: func(id string) { d.h.Unwatch(id) }})
	if err != nil {
		return err
	}
	d.closeLater(running.Close)
	d.runtimes[instance.RuntimeAdopted], d.running = running, running
	return nil
}

// givenUp handles a kept socket that cannot be handed to its program.
func (d *hostDaemon) givenUp(id, why string) {
	d.running.GivenUp(id)
	d.h.GivenUp(id, why)
}

// observe compares an instance with its workload, unless the instance is gone.
func (d *hostDaemon) observe(id, why string) {
	if err := d.h.Observe(id, why); err != nil {
		d.log.Debug("not observed", "instance", id, "err", err)
	}
}

// started adopts a unit that was started outside lull. If that fails, the unit's
// runtime calls it again.
func (d *hostDaemon) started(id, why string) {
	if err := d.h.StartedOutside(context.Background(), id, why); err != nil {
		d.log.Warn("cannot adopt a running unit yet; trying again", "instance", id, "err", err)
	}
}

func (d *hostDaemon) onExit(id string, run uint64, e instance.Exit) { d.h.OnExit(id, run, e) }

func (d *hostDaemon) openSharedPort(ctx context.Context) (err error) {
	if d.cfg.HTTP == "" {
		return nil
	}
	if d.shared, err = keepListening(ctx, d.processes, sharedPort, d.cfg.HTTP); err != nil {
		return fmt.Errorf("cannot listen for HTTP on %s: %w", d.cfg.HTTP, err)
	}
	d.closeLater(func() { d.shared.Close() })
	return nil
}

// openGuests opens the runtimes of containers and microVMs. A host works without
// them; missing has the reasons.
func (d *hostDaemon) openGuests(context.Context) (err error) {
	if d.images, err = oci.OpenStore(filepath.Join(d.cfg.Data, "images"), oci.Limits{}); err != nil {
		return err
	}
	if box, err := newContainers(d.cfg, d.images, d.processes); err != nil {
		d.missing["container"] = err
	} else {
		d.runtimes["container"] = box
		if err := box.Missing(); err != nil {
			d.log.Warn("no container can be started", "err", err)
		}
	}
	if vms, err := openMachines(d.cfg, d.images, d.log, d.processes, func() *host.Host { return d.h }); err != nil {
		d.missing["microvm"] = err
	} else {
		d.closeLater(func() { vms.Close() })
		d.runtimes["microvm"] = vms
		if err := vms.Missing(); err != nil {
			d.log.Warn("microVMs are not available", "err", err)
		}
	}
	return nil
}

func (d *hostDaemon) openDocker(context.Context) (err error) {
	if d.cfg.Docker == "" {
		return nil
	}
	if d.containers, err = docker.New(docker.Config{Socket: d.cfg.Docker, Front: d.cfg.DockerSocket, Process: d.processes, Log: d.log, OnExit: d.onExit}); err != nil {
		return err
	}
	d.closeLater(func() { d.containers.Close() })
	d.runtimes["docker"] = d.containers
	return nil
}

func (d *hostDaemon) openLogs(ctx context.Context) (err error) {
	if d.evidence, err = journal.OpenLogged(filepath.Join(d.cfg.Data, "evidence"), journal.Options{MaxBytes: 256 << 20, Lazy: true, Log: d.log}); err != nil {
		return err
	}
	d.closeLater(func() { d.evidence.Close() })
	if d.events, err = events.Open(filepath.Join(d.cfg.Data, "events"), d.log); err != nil {
		return err
	}
	d.closeLater(func() { d.events.Close() })
	if d.traces, err = tracing.FromEnv(ctx, d.getenv, "lull-host", version, nil, d.log); err != nil {
		return err
	}
	d.closeLater(func() {
		if err := d.traces.End(); err != nil {
			d.log.Warn(err.Error())
		}
	})
	return nil
}

func (d *hostDaemon) openRelay(context.Context) (err error) {
	if d.relay, err = relay.New(relay.Config{Log: d.log}); err != nil {
		return err
	}
	if d.front, err = relay.NewFront(relay.FrontConfig{Log: d.log}); err != nil {
		return err
	}
	d.gates = &gates{relay: d.relay, front: d.front, ports: d.processes, open: map[string]bool{}}
	return nil
}

func (d *hostDaemon) openHost(context.Context) error {
	budget, available, err := d.cfg.budget()
	if err != nil {
		return err
	}
	share, err := d.cfg.cpuPercent()
	if err != nil {
		return err
	}
	space, err := d.cfg.imageSpace()
	if err != nil {
		return err
	}
	keepers := map[string]instance.ImageKeeper{"images": d.images}
	if k, ok := d.runtimes["microvm"].(instance.ImageKeeper); ok {
		keepers["microvm"] = k
	}
	halted, fleetHalted, err := d.halts()
	if err != nil {
		return err
	}
	cfg := d.cfg
	d.h = host.New(host.Config{Halted: halted, KeepHalt: d.files.KeepHalt, FleetHalted: fleetHalted, KeepFleetHalt: d.files.KeepFleetHalt,
		Images: keepers, ImageAge: cfg.ImageAge, ImageSpace: space, Memory: budget, Available: available, Places: int(cfg.Wakes), WakeWait: cfg.WakeWait,
		PauseAfter: cfg.PauseAfter, StopAfter: cfg.StopAfter, Probe: cfg.Probe, Thresholds: probe.Thresholds{CPUPercent: share, NetBytes: float64(cfg.Net), DiskBytes: float64(cfg.Disk)},
		BaseEnv: baseEnv(d.getenv), LogDir: filepath.Join(cfg.Data, "logs"), Socket: d.guests.Addr().String(),
		SharedHTTP: d.shared != nil, Runtimes: d.runtimes, Missing: d.missing, Records: d.files, Evidence: d.evidence, EventLog: d.events, Log: d.log,
		Tracer: d.traces.Tracer(), NewGate: d.gates.add, HeldListeners: d.processes,
		Alarm: func() (deadlines.Alarm, error) { return alarm.New() }})
	commands, err := report.NewCommands(d.files)
	if err != nil {
		return err
	}
	if d.reports, err = newReporter(cfg, d.h, commands, d.faults, d.log); err != nil || d.page == nil {
		return err
	}
	d.board, err = newDashboard(cfg, d.page, d.h, commands, d.faults, d.log)
	return err
}

// halts reads the recorded halts of this host and of its fleet. A halt of the fleet
// is dropped if the host no longer reports to a server.
func (d *hostDaemon) halts() (own, fleet *idle.HaltedBy, err error) {
	if own, err = d.files.Halted(); err != nil {
		return nil, nil, fmt.Errorf("cannot read whether the host is halted: %w", err)
	}
	if d.cfg.Server != "" {
		fleet, err = d.files.FleetHalt()
	} else {
		err = d.files.KeepFleetHalt(nil)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("cannot read whether the fleet is halted: %w", err)
	}
	return own, fleet, nil
}

// followClock notifies the host when the wall clock is set, if the kernel reports
// that.
func (d *hostDaemon) followClock(ctx context.Context) error {
	if err := wall.OnStep(ctx, d.h.ClockStepped); err != nil {
		d.log.Warn("cannot watch for changes of the clock; timers may be late after the clock is set", "err", err)
		<-ctx.Done()
	}
	return nil
}

// run starts the parts in this order and ends them in reverse. The relay accepts
// connections before instances are adopted, so that clients of a restarting daemon
// wait instead of being refused.
func (d *hostDaemon) run(ctx context.Context) error {
	metrics := promhttp.HandlerFor(hostMetrics(d.h), promhttp.HandlerOpts{})
	handler := d.apiHandler(metrics)
	guests := &api.Programs{Host: d.h, Log: d.log, Listener: d.guests, Identify: func(pid int) (string, error) { return identify(d.runtimes, pid) }}
	tasks := []task.Task{
		task.Loop("the evidence log", d.evidence.Run),
		task.Loop("the process runtime", d.processes.Run),
		task.Loop("the relay", d.relay.Run),
		task.Func("the host", d.runInstances),
		task.Loop("the guests' socket", guests.Run),
		task.Loop("the clock", d.followClock),
	}
	if d.containers != nil {
		tasks = append(tasks, task.Loop("docker", func(ctx context.Context) error { return d.containers.Follow(ctx, d.h) }))
	}
	if d.reports != nil {
		tasks = append(tasks, task.Loop("reports to the server", d.reports.Run))
	}
	if d.board != nil {
		tasks = append(tasks, d.board.tasks()...)
		tasks = append(tasks, d.cli.listener(serverConfig{TLSCert: d.cfg.TLSCert, TLSKey: d.cfg.TLSKey}, d.page, d.board.api.Handler(), d.log))
	}
	tasks = append(tasks, serve(d.api, handler))
	if d.docker != nil {
		tasks = append(tasks, serve(d.docker, d.containers.Front(d.h)))
	}
	if d.shared != nil {
		tasks = append(tasks, serve(d.shared, d.front))
	}
	if d.scraped != nil {
		alone := http.NewServeMux()
		alone.Handle("GET /metrics", metrics)
		tasks = append(tasks, serve(d.scraped, alone))
	}
	tasks = append(tasks, task.Loop("the hand-over", func(ctx context.Context) error {
		d.log.Info("host is ready", "socket", d.cfg.Socket, "data", d.cfg.Data, "freezer", d.processes.Freezer(), "instances", len(d.recs), "runtimes", d.ready())
		if d.openPage {
			if l, err := d.board.link(ctx, localUser()); err != nil {
				d.log.Error("cannot make a sign-in link", "err", err)
			} else {
				fmt.Fprintf(d.cli.Out, "dashboard (the link signs in once, within %s): %s\n", term.Span(openTTL), l.URL)
			}
		}
		<-ctx.Done()
		if d.cfg.StopAll {
			d.h.StopAll(context.WithoutCancel(ctx))
		}
		d.relay.Unlisten() // new connections queue for the next daemon
		return nil
	}))
	g := task.NewGroup("", tasks...)
	g.StopTimeout = stopAllWithin
	return g.Run(ctx)
}

// runInstances adopts the recorded instances, calls ready, and manages the instances
// until ctx ends.
func (d *hostDaemon) runInstances(ctx context.Context, ready func()) error {
	if err := d.h.Load(ctx, d.recs); err != nil {
		d.log.Error("some instances could not be adopted unchanged", "err", err)
	}
	if err := d.processes.UnholdOthers(ctx, func(id string) bool {
		return d.gates.has(id) || id == sharedPort && d.shared != nil || d.h.Has(id)
	}); err != nil {
		d.log.Warn("ports of removed instances may still be open", "err", err)
	}
	if err := d.h.KeepDropIns(ctx); err != nil {
		d.log.Warn("cannot bring the drop-ins of units up to date", "err", err)
	}
	ready()
	return d.h.Run(ctx)
}

// ready returns the names of the runtimes that can start instances.
func (d *hostDaemon) ready() string {
	missing := d.h.Missing()
	return strings.Join(slices.DeleteFunc(slices.Sorted(maps.Keys(d.runtimes)), func(name string) bool { return missing[name] != nil }), " ")
}

func (d *hostDaemon) apiHandler(metrics http.Handler) http.Handler {
	started := time.Now()
	a := &api.API{Host: d.h, Version: version, Metrics: metrics, Link: d.board.link,
		Status: func() hostctl.Status {
			s := hostStatus(d.h, d.processes, d.cfg, started, d.faults)
			if d.containers != nil {
				s.FollowsDocker, s.LeftAlone = true, d.containers.Faults()
			}
			if d.reports != nil {
				l := d.reports.Link()
				s.Server = &l
			}
			return s
		}}
	h, _ := a.Handler()
	return h
}

// serve returns a task that answers requests on ln. Streams do not end by themselves,
// so all connections are cut a second after the task was asked to end.
func serve(ln net.Listener, h http.Handler) task.Task {
	return task.Func("requests on "+ln.Addr().String(), func(ctx context.Context, ready func()) error {
		s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, ConnContext: httpx.WithPeer}
		ended := make(chan error, 1)
		go func() { ended <- s.Serve(ln) }()
		ready()
		select {
		case err := <-ended:
			return fmt.Errorf("cannot serve on %s: %w", ln.Addr(), err)
		case <-ctx.Done():
		}
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if s.Shutdown(last) != nil {
			s.Close()
		}
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("cannot serve on %s: %w", ln.Addr(), err)
		}
		return nil
	})
}
