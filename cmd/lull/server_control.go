package main

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"lull/internal/controller"
	"lull/internal/controller/cmlconsole"
	"lull/internal/controller/ec2cloud"
	"lull/internal/core/evidence"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/worker"
	"lull/internal/lib/task"
	"lull/internal/lib/tracing"
	"lull/internal/platform/ec2"
	"lull/internal/platform/journal"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/history"
	"lull/internal/server/peers"
	"lull/internal/server/prices"
	"lull/internal/store"
)

// controlPlane holds the controller of a process, or those parts of it that the
// process has.
type controlPlane struct {
	live    server.Live
	admin   server.Admin
	regions server.Regions
	// instances and cml look up and probe a machine at its import.
	instances server.Instances
	prices    prices.Source
	cml       func(ctx context.Context, w worker.Worker) (bool, string)
	metrics   *prometheus.Registry
	tasks     []task.Task
	log       *slog.Logger
	name      string       // name of this process among the fleet's servers
	peers     *peers.Peers // nil if there can be no other servers

	journal  *journal.Journal // nil in an API process that has no place to write
	traces   *tracing.Traces  // nil if traces are not collected
	evidence history.Evidence
}

// close releases the journal. No task may be running.
func (p *controlPlane) close() error {
	if err := p.traces.End(); err != nil {
		p.log.Warn(err.Error()) // a failing collector does not stop the server
	}
	if p.journal == nil {
		return nil
	}
	return p.journal.Close()
}

// newControl returns the controller and the adapters that it uses.
func (c *cli) newControl(cfg serverConfig, f *fleet.Fleet, seal *sealed.Sealer, log *slog.Logger) (plane controlPlane, err error) {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "lull_halted", Help: "1 while all automatic actions of the fleet are halted."}, func() float64 {
		if f.Halted().On {
			return 1
		}
		return 0
	}))
	plane.metrics, plane.log = reg, log
	host, err := os.Hostname()
	if err != nil {
		return plane, fmt.Errorf("cannot determine the name of this server: %w", err)
	}
	id := host + "-" + strings.ToLower(rand.Text()[:8])
	plane.name = id
	roots, err := cfg.peerRoots()
	if err != nil {
		return plane, err
	}
	defer func() { plane.join(cfg, roots, id, f.Store()) }()
	accounts, err := accountsOf(cfg.Accounts)
	if err != nil {
		return plane, err
	}
	limits, err := cfg.limits()
	if err != nil {
		return plane, err
	}
	set := &ec2.Set{Accounts: accounts, Limits: limits}
	plane.regions, plane.instances, plane.prices = regionsOf(set, func() string { return f.Settings().AWSDefaultRegion }), instancesOf(set), pricesOf(set)
	if cfg.Role == "api" {
		plane.keepReports(cfg)
		plane.tasks = []task.Task{task.Loop("the settings", func(ctx context.Context) error {
			return f.Run(ctx, func(err error) { log.Error("record cannot be read", "err", err) })
		})}
		if plane.journal != nil {
			plane.tasks = append(plane.tasks, task.Loop(plane.journal.String(), plane.journal.Run))
		}
		return plane, nil
	}
	owners := fields(cfg.Owners)
	if len(owners) == 0 {
		owners = []string{"self"}
	}
	aws := ec2cloud.New(set, owners)
	open := secrets(seal, c.Getenv)
	cmls := cmlconsole.New(cmlconsole.Config{Fleet: f, Secret: open, Port: cfg.CMLPort})
	plane.cml = cmls.Probe
	if plane.journal, err = journal.OpenLogged(filepath.Join(cfg.Data, "evidence"), cfg.journal(log)); err != nil {
		return plane, err
	}
	if plane.traces, err = tracing.FromEnv(context.Background(), c.Getenv, "lull-server", version, nil, log); err != nil {
		return plane, err
	}
	ctl, err := controller.New(controller.Config{
		Fleet: f, Server: id, Address: cfg.Advertise,
		Clouds: aws.Cloud, Accounts: accountNames(accounts), ImageOwners: owners, Consoles: cmls.Console, CML: cmls.Probe, Secret: open, Journal: plane.journal.Take,
		Archive: archive(filepath.Join(cfg.Data, "audit")), Shadow: cfg.Shadow, Log: log.With("part", "controller"), Tracer: plane.traces.Tracer(),
	})
	if err != nil {
		return plane, err
	}
	reg.MustRegister(ctl.Collector())
	plane.live, plane.admin, plane.tasks = observed{ctl}, controllerAdmin{ctl, cfg.Role}, []task.Task{task.Loop(plane.journal.String(), plane.journal.Run), ctl}
	plane.evidence = plane.journal
	return plane, nil
}

// keepReports opens a journal for agents' reports in a process that makes no checks
// itself. If the data directory cannot be written or is used by another process, it
// logs a warning and nothing is kept.
func (p *controlPlane) keepReports(cfg serverConfig) {
	j, err := journal.OpenLogged(filepath.Join(cfg.Data, "evidence-api"), cfg.journal(p.log))
	if err != nil {
		p.log.Warn("agent reports are not recorded: why --at will lack them", "err", err)
		return
	}
	p.journal, p.evidence = j, j
}

// record returns the function that stores evidence from agents' reports; nil if none
// is stored.
func (p *controlPlane) record() func(evidence.Record) {
	if p.journal == nil {
		return nil
	}
	return p.journal.Take
}

// join connects this server to the other servers of the fleet, so that they can query
// each other's live readings.
func (p *controlPlane) join(cfg serverConfig, roots *x509.CertPool, id string, db store.Store) {
	if cfg.Etcd == "" {
		return
	}
	own := peers.Config{Store: db, Server: id, Address: cfg.Advertise, Local: p.live, HTTP: peers.Client(roots), Log: p.log}
	if p.journal != nil {
		own.Journal = p.journal
	}
	p.peers = peers.New(own)
	p.live, p.evidence = p.peers, p.peers
	p.tasks = append(p.tasks, task.Loop(p.peers.String(), p.peers.Run))
}

func fields(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

// observed adapts the controller to server.Live.
type observed struct{ ctl *controller.Controller }

func (o observed) Observation(_ context.Context, id string) (control.Observation, bool) {
	l, ok := o.ctl.Live(id)
	if !ok || !l.Owned {
		return control.Observation{}, false
	}
	out := control.Observation{EC2: &l.EC2, Telemetry: l.Telemetry, Status: l.Idle, Agent: l.Agent}
	m, at := l.Metrics, l.Metrics.CollectedAt
	sample := func(v *float64) control.Sample {
		if v == nil {
			why := "not published"
			if m.CloudWatchError != "" {
				why = m.CloudWatchError
			}
			return control.Sample{Error: why}
		}
		return control.Sample{Value: v, At: at}
	}
	out.Metrics = &control.Metrics{WorkerID: id, CPUUtilization: m.CPUUtilization, MemoryUtilization: m.MemoryUtilization, DiskUtilization: m.DiskUtilization,
		LabsCount: m.LabsCount, NodesCount: m.NodesCount, CMLVersion: m.CMLVersion, CollectedAt: at, Readings: "live", CMLError: m.CMLError,
		Samples: map[string]control.Sample{"cpu_utilization": sample(m.CPUUtilization), "memory_utilization": sample(m.MemoryUtilization), "disk_utilization": sample(m.DiskUtilization)}}
	if raw, ok := m.SystemInfo.(json.RawMessage); ok {
		out.Metrics.SystemInfo = raw
	}
	return out, true
}

func (o observed) Report(_ context.Context, id string, r control.AgentReport) bool {
	return o.ctl.Report(id, r)
}

func (o observed) Verdicts(context.Context) map[string]worker.IdleStatus { return o.ctl.Verdicts() }

// controllerAdmin adapts the controller to server.Admin.
type controllerAdmin struct {
	ctl  *controller.Controller
	role string
}

func (a controllerAdmin) Stats() map[string]any {
	out := map[string]any{}
	b, err := json.Marshal(a.ctl.Stats())
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		out["error"] = err.Error()
	}
	return out
}

func (a controllerAdmin) Trigger() { a.ctl.TriggerReconcile() }

func (a controllerAdmin) Resign(context.Context) error {
	a.ctl.Resign()
	return nil
}

func (a controllerAdmin) Shards(context.Context) (control.Shards, error) {
	l := a.ctl.Leadership()
	out := control.Shards{Server: l.Server, Role: a.role, Held: l.Shards, Total: l.Total, LeaseSeconds: l.Lease, Members: []control.Member{}}
	for _, id := range slices.Sorted(maps.Keys(l.Members)) {
		m := l.Members[id]
		out.Members = append(out.Members, control.Member{ID: id, Address: m.Address, Since: &m.Since})
	}
	return out, nil
}

// archive returns a function that appends audit entries to a file for their month in
// dir. The entries are on disk when it returns.
func archive(dir string) func([]audit.Entry) error {
	return func(entries []audit.Entry) error {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("cannot archive the audit log: %w", err)
		}
		byMonth := map[string][]byte{}
		for _, e := range entries {
			line, err := json.Marshal(e)
			if err != nil {
				return fmt.Errorf("cannot archive the audit log: %w", err)
			}
			month := e.At.UTC().Format("2006-01")
			byMonth[month] = append(append(byMonth[month], line...), '\n')
		}
		for month, lines := range byMonth {
			f, err := os.OpenFile(filepath.Join(dir, month+".jsonl"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
			if err != nil {
				return fmt.Errorf("cannot archive the audit log: %w", err)
			}
			_, err = f.Write(lines)
			if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
				return fmt.Errorf("cannot archive the audit log: %w", err)
			}
		}
		return nil
	}
}
