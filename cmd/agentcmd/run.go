//go:build linux && !portable

package agentcmd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"lull/internal/agent"
	"lull/internal/cli/term"
	"lull/internal/lib/lockfile"
	"lull/internal/lib/task"
	"lull/internal/lib/tracing"
	"lull/internal/platform/desktop"
	"lull/internal/platform/journal"
	"lull/internal/protocol/tags"
)

func (c verbs) run() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Stop this machine when it is idle", Example: "  lull agent run\n  lull agent run --config /etc/lull/agent.yaml",
		Long: `Watch this machine, and stop or hibernate it when every signal has been quiet for
the idle-timeout set by its tags or /etc/lull/agent.yaml. Without an idle-timeout,
the agent only watches.

SIGHUP reloads the policy. lull agent reload does so too and shows what changed.`,
		Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := resolveAgent(c.Getenv, cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			return c.runAgent(cmd.Context(), cfg)
		},
	}
	bindAgentFlags(cmd.Flags())
	return cmd
}

// runAgent is the wiring of an agent, in the order in which it comes up.
func (c verbs) runAgent(ctx context.Context, cfg Settings) error {
	log := slog.New(slog.NewTextHandler(c.Err, nil))
	bytes := &agent.Meter{}
	o, free, err := agent.Machine(agent.Options{Version: c.Version, BuildDate: c.Date, Prefix: cfg.Prefix, ConfigPath: cfg.Config, Hooks: agent.ShellHooks{}, Log: log}, bytes, cfg.ShortestReach)
	if err != nil {
		return err
	}
	defer free()
	files := agent.Files{State: cfg.State, ConfigFile: cfg.Config, Clock: o.Clocks}
	if err := files.Prepare(); err != nil {
		return err
	}
	unlock, err := lockState(cfg.State)
	if err != nil {
		return err
	}
	defer unlock()
	history, damage, err := agent.OpenJournal(filepath.Join(cfg.State, "history"))
	if err != nil {
		return err
	}
	defer history.Close()
	for _, d := range damage {
		log.Warn("history was corrupt and has been truncated", "damage", d)
	}
	// Limited in size and rarely written, like the history.
	kept, err := journal.OpenLogged(filepath.Join(cfg.State, "evidence"), journal.Options{MaxBytes: 64 << 20, SyncEvery: 15 * time.Minute, Log: log})
	if err != nil {
		return err
	}
	defer kept.Close()
	if err := os.MkdirAll(filepath.Dir(cfg.Socket), 0o755); err != nil {
		return fmt.Errorf("cannot create the socket's directory: %w", err)
	}
	listener, err := agent.Listen(cfg.Socket)
	if err != nil {
		return err
	}

	o.Disk, o.Evidence, o.Journal = files, kept, history
	log.Info("agent is starting", "version", c.Version, "build_date", c.Date, "boot_id", o.BootID)
	addCloud(ctx, cfg, bytes, &o)
	if err := addServer(cfg, bytes, &o); err != nil {
		return errors.Join(err, listener.Close())
	}
	traces, err := tracing.FromEnv(ctx, c.Getenv, "lull-agent", c.Version, bytes.Transport(http.ProxyFromEnvironment), log)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer func() {
		if err := traces.End(); err != nil {
			log.Warn(err.Error())
		}
	}()
	o.Tracer = traces.Tracer()
	o.Warner = agent.UserWarner{Terminals: "/dev/pts", Consoles: agentConsoles(), Own: o.Own, File: filepath.Join(filepath.Dir(cfg.Socket), "warning"),
		Desktops: desktop.Runtime, HTTP: &http.Client{Transport: bytes.Transport(http.ProxyFromEnvironment)}, Host: hostName()}
	a, err := agent.New(o)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	return task.Run(ctx, task.Loop(kept.String(), kept.Run), a, agent.Control(a, listener, log), task.Loop("reload on SIGHUP", func(ctx context.Context) error {
		return reloadOnHangup(ctx, a, log)
	}))
}

// lockState locks the state directory, so that only one agent uses it at a time.
func lockState(dir string) (unlock func(), err error) {
	f, err := lockfile.Take(filepath.Join(dir, "lock"))
	if held := (*lockfile.HeldError)(nil); errors.As(err, &held) {
		return nil, fmt.Errorf("cannot use %s: another lull agent keeps its state there: %w", dir, err)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot lock the agent's state: %w", err)
	}
	return func() { f.Close() }, nil
}

// addCloud adds the cloud that the machine runs in to o. Without a cloud, it adds
// what powers the machine off.
func addCloud(ctx context.Context, cfg Settings, m *agent.Meter, o *agent.Options) {
	e, err := findCloud(ctx, cfg, m, "/")
	if err != nil {
		o.Log.Error("instance not yet known; taking no action until it is", "err", err)
	}
	if e == nil {
		o.Log.Info("no cloud detected: this machine is powered off when idle", "power_off", tags.Program(cfg.PowerOff))
		o.Power = localPower{off: cfg.PowerOff, hibernate: cfg.Hibernate}
		return
	}
	if err == nil {
		i, _ := e.identity(ctx) // the identity was read before
		o.InstanceID, o.Region = i.InstanceID, i.Region
		o.Log.Info("running on EC2", "instance_id", i.InstanceID, "region", i.Region, "type", i.Type)
	}
	o.Identify = func(ctx context.Context) (id, region string, err error) {
		i, err := e.identity(ctx)
		return i.InstanceID, i.Region, err
	}
	o.Cloud = e
	o.Tags = []agent.TagSource{e.imds, describedTags{e}}
}

// agentConsoles returns the terminals other than pseudo terminals on which users can
// log in.
func agentConsoles() []string {
	var out []string
	for _, p := range []string{"/dev/tty1", "/dev/ttyS0"} {
		if f, err := os.OpenFile(p, os.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0); err == nil {
			f.Close()
			out = append(out, p)
		}
	}
	return out
}

func hostName() string {
	n, err := os.Hostname()
	if err != nil {
		return "this machine"
	}
	return n
}

// reloadOnHangup reloads the policy on SIGHUP, and logs what has changed.
func reloadOnHangup(ctx context.Context, a *agent.Agent, log *slog.Logger) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-hup:
			r, err := a.Reload(ctx)
			if err != nil {
				log.Error("policy reload failed", "err", err)
				continue
			}
			log.Info("policy reloaded", "changed", r.Changed, "faults", r.Faults)
		}
	}
}
