package instance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// runFlags are the flags of lull run.
type runFlags struct {
	spec                                                         instance.Spec // set directly by flags
	expose, probes                                               []string
	path, logMax, memory                                         string
	pause, stop, reclaim, hibernate, quiet, ready, grace, silent time.Duration
	noise                                                        instance.Noise
	detach, noStart, wake, keep                                  bool
}

func (c verbs) runCommand() *cobra.Command {
	var r runFlags
	cmd := &cobra.Command{
		Use:   "run [flags] [-- COMMAND [ARG...]]",
		Short: "Create and start an instance",
		Long: `Create and start an instance. The host daemon runs the program, freezes it when it is
idle, and wakes it on the first packet to one of its exposed ports.

  --expose 8080       the program itself listens on 127.0.0.1:8080 (direct path)
  --expose 8080:80    lull listens on 8080 and relays to 80 (relay path)

What a container or microVM writes over its image is kept until lull rm. A
microVM's /tmp, /run and /dev/shm are empty at every start.

A probe is a signal of your own. The instance is not paused while the probe reports
active, or while its answer cannot be read.

  --probe exec:'pgrep -x make'               exit code 0 is active, 1 is quiet
  --probe http:http://127.0.0.1:8080/busy    status 200 is active, 204 is quiet
  --probe http:http://127.0.0.1:8080/s#jobs  false, 0, null and empty are quiet
  --probe prometheus:http://HOST/metrics#up  active above threshold=0
  --probe prometheus:http://HOST#query=QUERY the same, from a server
  --probe file:/var/lock/job                 active if modified within window
  --probe redis:HOST:PORT                    ready-made, as are the ones below

Ready-made probes take an address or URL, and have a default: postgres, redis,
beanstalkd, rabbitmq, jupyter, jupyterhub, minecraft, ollama, vllm, actions-runner
and slurm.

Settings go behind the kind, as in exec,interval=30s,timeout=10s,inside:COMMAND.
They are name, interval (15s), timeout (5s), threshold (0), window (1m), inside
(run it in the instance, not as the user of the host daemon), token-file (sent with
requests) and missing=quiet.

Without -d, lull run shows the output until the instance has ended permanently, and
exits with its exit code, or 143 if it was removed. Ctrl-C detaches. Long steps, such
as an image download, and pauses and resumes are reported on standard error. --json
implies -d and prints the instance once it has started.

An instance that does not start is removed again, and its last output is shown.
--keep leaves it for inspection.`,
		Example: "  lull run -d --name web --expose 8080 --pause-after 30s -- python3 -m http.server 8080 --bind 127.0.0.1" +
			"\n  lull run -d --name api --runtime container --image registry.example.com/api:1 --expose 9000 --stop-after 1h" +
			"\n  lull run -d --name vm --runtime microvm --image registry.example.com/api:1 --expose 9001:9000 --hibernate-after 10m",
		Args: term.Args(cobra.ArbitraryArgs),
	}
	r.bind(cmd)
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		if err := r.complete(cmd.Flags().Changed, a); err != nil {
			return err
		}
		return c.runInstance(cmd, hostctl.Create{Spec: r.spec, Start: !r.noStart, RemoveFailed: !r.noStart && !r.keep}, r.detach)
	}
	return cmd
}

func (r *runFlags) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&r.spec.Name, "name", "", "name of the instance (default from the command)")
	f.StringVar(&r.spec.Runtime, "runtime", "process", "runtime: process, container or microvm; lull doctor lists what is available")
	f.StringVar(&r.spec.Image, "image", "", "root file system: a directory, an image file or a registry reference, depending on the runtime")
	f.StringVar(&r.memory, "memory", "", "memory limit, such as 512M (default: 256M for a microVM, otherwise no limit)")
	f.Float64Var(&r.spec.CPUs, "cpus", 0, "CPUs; 0 is 1 for a microVM, otherwise no limit")
	f.StringVar((*string)(&r.spec.Net), "net", "", "network access: none; outbound, everything except this machine; or full, this machine too (192.168.127.254 in a microVM). Default: outbound where the instance has its own network")
	f.StringVar(&r.spec.Workspace, "workspace", "", "directory of this machine to share, DIR[:/PATH/INSIDE][:ro|:rw]; by default at /workspace, writable")
	f.StringArrayVarP(&r.expose, "expose", "p", nil, "expose a port or unix socket: PORT, HOST:PORT, LISTEN:TARGET or HOST:LISTEN:HOST:TARGET, /udp behind it for UDP, or unix:PATH; repeatable")
	f.StringVar(&r.path, "path", "auto", "how clients reach the exposed ports: auto, direct or relay")
	term.BindSpan(f, &r.pause, "pause-after", 0, "idle timeout until it is paused; 0 never pauses (default: 1m, or that of lull host --pause-after)")
	term.BindSpan(f, &r.stop, "stop-after", 0, "time in paused until it is stopped; 0 never stops (default: 5m, or that of lull host --stop-after)")
	term.BindSpan(f, &r.reclaim, "reclaim-after", 0, "time in paused until its memory is paged out; 0 disables it")
	term.BindSpan(f, &r.hibernate, "hibernate-after", 0, "time in paused until it is hibernated to disk; 0 disables it")
	term.BindSpan(f, &r.quiet, "quiet-connection-after", 0, "ignore connections, inbound and outbound, without traffic for this long, unless a request is unanswered (the last bytes came from the side that asks); 0 disables it")
	term.BindSpan(f, &r.ready, "ready-timeout", 0, "time limit until it listens (default 60s)")
	term.BindSpan(f, &r.grace, "stop-grace", 0, "time between the request to exit and the kill (default 10s)")
	f.BoolVar(&r.wake, "wake-from-stopped", true, "start it on a connection after lull stopped it; if set to true explicitly, also before its first start and after it exited by itself")
	f.BoolVar(&r.spec.WakeOnOutbound, "wake-on-outbound", false, "also wake it when data arrives on its outbound connections")
	f.BoolVar(&r.spec.ListenFDs, "listen-fds", false, "pass the exposed sockets to the program (LISTEN_FDS); they stay open while it is stopped")
	f.StringVar(&r.spec.IdlePolicy, "idle-policy", "default", "default, or leases_only to ignore its own activity")
	f.StringVar((*string)(&r.spec.Restart), "restart", "on-failure", "no, on-failure or always")
	f.StringArrayVarP(&r.spec.Env, "env", "e", nil, "environment variable KEY=VALUE; repeatable")
	bindSignals(cmd, &r.probes, &r.spec.WakeSchedule)
	f.StringSliceVar(&r.spec.DependsOn, "depends-on", nil, "instance that wakes before this one and stays awake as long as this one; repeatable")
	f.StringToStringVar(&r.spec.Labels, "label", nil, "label KEY=VALUE, which lull ps --filter finds; repeatable")
	f.StringVarP(&r.spec.Workdir, "workdir", "w", "", "working directory (default: the current one)")
	f.StringVarP(&r.spec.User, "user", "u", "", "user to run as: name or uid[:gid]")
	f.StringVar(&r.logMax, "log-max", "", "log size at which it is rotated, such as 10M (default 10M; one old file is kept)")
	f.StringArrayVar(&r.noise.Sources, "ignore-source", nil, "relay path: source address range that neither holds nor wakes; repeatable")
	term.BindSpan(f, &r.silent, "ignore-silent", 0, "relay path: connections that send no data neither hold nor wake, and are closed after this long")
	f.StringArrayVar(&r.noise.Paths, "ignore-path", nil, "HTTP: path, such as a health check, that neither holds nor wakes; repeatable")
	f.StringArrayVar(&r.noise.UserAgents, "ignore-agent", nil, "HTTP: user agent that neither holds nor wakes; repeatable")
	f.BoolVarP(&r.detach, "detach", "d", false, "return once it has started instead of showing its output; implied by --json")
	f.BoolVar(&r.keep, "keep", false, "keep an instance that fails to start, with its output, and restart it as --restart says")
	f.BoolVar(&r.noStart, "no-start", false, "create it stopped")
	term.CompleteWords(cmd, "runtime", "process", "container", "microvm")
	term.CompleteWords(cmd, "net", string(instance.NetNone), string(instance.NetOutbound), string(instance.NetFull))
	term.CompleteWords(cmd, "path", string(instance.PathAuto), string(instance.PathDirect), string(instance.PathRelay))
	term.CompleteWords(cmd, "idle-policy", instance.PolicyDefault, instance.PolicyLeasesOnly)
	term.CompleteWords(cmd, "restart", string(instance.RestartNo), string(instance.RestartOnFailure), string(instance.RestartAlways))
}

// complete fills in the spec from the other flags and the command. changed
// reports whether a flag was given.
func (r *runFlags) complete(changed func(string) bool, command []string) error {
	s := &r.spec
	s.Command = command
	if len(command) == 0 && s.Image == "" {
		return term.Usage(errors.New("nothing to run: give a command after --, or an --image that has one"))
	}
	if s.Name == "" {
		s.Name = nameFrom(append(command, s.Image)[0])
	}
	for _, e := range r.expose {
		ep, err := instance.ParseExpose(e, instance.Path(r.path))
		if err != nil {
			return term.Usage(err)
		}
		s.Expose = append(s.Expose, ep)
	}
	probes, err := parseProbes(r.probes)
	if err != nil {
		return term.Usage(err)
	}
	s.Probes = probes
	if changed("pause-after") {
		d := idle.Duration(r.pause)
		s.PauseAfter = &d
	}
	if changed("stop-after") {
		d := idle.Duration(r.stop)
		s.StopAfter = &d
	}
	if changed("wake-from-stopped") {
		s.WakeFromStopped = &r.wake
	}
	s.ReclaimAfter, s.HibernateAfter, s.QuietConnectionAfter = idle.Duration(r.reclaim), idle.Duration(r.hibernate), idle.Duration(r.quiet)
	s.ReadyTimeout, s.StopGrace = idle.Duration(r.ready), idle.Duration(r.grace)
	if r.noise.Silent = idle.Duration(r.silent); len(r.noise.Sources)+len(r.noise.Paths)+len(r.noise.UserAgents) > 0 || r.silent > 0 {
		s.Noise = &r.noise
	}
	if err := localPaths(s); err != nil {
		return err
	}
	if s.Memory, err = term.ParseSize(r.memory); err != nil {
		return term.Usage(fmt.Errorf("cannot use --memory: %w", err))
	}
	if s.LogMax, err = term.ParseSize(r.logMax); err != nil {
		return term.Usage(fmt.Errorf("cannot use --log-max: %w", err))
	}
	if r.path != string(instance.PathAuto) && len(r.expose) == 0 {
		return term.Usage(fmt.Errorf("cannot use --path %s without an exposed port; add one with --expose", r.path))
	}
	if err := s.CheckNew(); err != nil {
		return term.Usage(err)
	}
	return nil
}

// localPaths makes paths in s absolute, because the daemon has another working
// directory. If the image is a file here, that file is meant.
func localPaths(s *instance.Spec) error {
	wd, err := os.Getwd()
	if err != nil {
		return fmt.Errorf("cannot find the working directory: %w", err)
	}
	if s.Workdir == "" && s.Runtime == "process" {
		s.Workdir = wd
	}
	if s.Workspace != "" && !filepath.IsAbs(s.Workspace) {
		s.Workspace = filepath.Join(wd, s.Workspace)
	}
	if s.Image != "" && !filepath.IsAbs(s.Image) {
		_, err := os.Stat(s.Image)
		if err == nil { // otherwise it is an image reference
			s.Image = filepath.Join(wd, s.Image)
		} else if strings.HasPrefix(s.Image, ".") {
			return term.Usage(fmt.Errorf("cannot use image: %w", err))
		}
	}
	return nil
}

func (c verbs) runInstance(cmd *cobra.Command, r hostctl.Create, detach bool) error {
	cl, err := c.HostClient()
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	var o hostctl.Instance
	if err := c.watched(ctx, cl, r.Name, func() error { o, err = cl.Create(ctx, r); return err }); err != nil {
		return err
	}
	if s := wakeNotice(r.Spec, o); s != "" {
		fmt.Fprintln(c.Err, "lull:", s)
	}
	if detach || !r.Start || c.JSON {
		return c.Print(o, func(w io.Writer) {
			fmt.Fprintf(w, "%s %s%s\n%s\n", o.Name, o.State, endpointsText(o), ladderText(r.Spec, o))
			c.caveats(o)
		})
	}
	fmt.Fprintf(c.Err, "lull: %s is running%s; Ctrl-C detaches, and lull rm %s removes it\nlull: %s\n", o.Name, endpointsText(o), o.Name, ladderText(r.Spec, o))
	c.caveats(o)
	return c.watchOutput(ctx, cl, o)
}

// ladderText returns one line about when an instance is paused, hibernated and
// stopped, and whether a connection wakes it.
func ladderText(s instance.Spec, o hostctl.Instance) string {
	span := func(s float64) string { return idle.Human(time.Duration(s * float64(time.Second))) }
	switch {
	case o.PauseAfter == 0:
		return "never pauses automatically"
	case len(s.Expose) == 0 && s.PauseAfter == nil:
		return "is not paused when idle unless something can wake it"
	}
	parts := []string{"pauses after " + span(o.PauseAfter) + " idle"}
	for _, step := range []struct {
		does  string
		after float64
	}{{"pages memory out", o.ReclaimAfter}, {"hibernates", o.HibernateAfter}, {"stops", o.StopAfter}} {
		if step.after > 0 {
			parts = append(parts, step.does+" "+span(step.after)+" later")
		}
	}
	switch {
	case len(s.Expose) == 0: // wakeNotice covers this case
	case o.StopAfter > 0 && (!o.Wakes || o.Deaf != ""):
		parts = append(parts, "wakes on connect until it is stopped")
	default:
		parts = append(parts, "wakes on connect")
	}
	return strings.Join(parts, ", ")
}

// caveats prints warnings about limits of an instance: when a connection does not
// wake it, and no_new_privs.
func (c verbs) caveats(o hostctl.Instance) {
	if o.Deaf != "" && o.StopAfter > 0 && len(o.Endpoints) > 0 {
		fmt.Fprintf(c.Err, "lull: a connection will not wake %s from stopped: %s\n", o.Name, o.Deaf)
	}
	if o.NoNewPrivs {
		fmt.Fprintf(c.Err, "lull: setuid programs have no effect inside %s (no_new_privs), because the host does not run as root; --wake-from-stopped=false avoids that\n", o.Name)
	}
}

// wakeNotice returns a warning about the idle pause of a new instance without a port;
// "" if none is needed.
func wakeNotice(s instance.Spec, o hostctl.Instance) string {
	switch {
	case len(s.Expose) > 0 || o.PauseAfter == 0:
		return ""
	case s.PauseAfter != nil:
		return fmt.Sprintf("warning: %s exposes no port; once it is paused, only lull resume %s is certain to wake it", o.Name, o.Name)
	}
	return fmt.Sprintf("%s exposes no port that could wake it: add one with --expose, or set --pause-after to pause it anyway", o.Name)
}

// watchOutput prints an instance's output until the caller disconnects, the instance
// is removed, or it has ended for good. An instance that will be restarted, or that a
// connection can wake, has not.
func (c verbs) watchOutput(ctx context.Context, cl *hostctl.Client, o hostctl.Instance) error {
	reading, stop := context.WithCancel(ctx)
	ended := make(chan *hostctl.Instance, 1)
	go func() {
		defer close(ended)
		if last := c.awaitEnd(reading, cl, o); last != nil {
			ended <- last
			stop()
		}
	}()
	err := cl.Logs(reading, o.ID, hostctl.Logs{Tail: -1, Follow: true}, c.Out)
	stop()
	if last := <-ended; last != nil {
		fmt.Fprintf(c.Err, "lull: %s %s\n", last.Name, term.Localized(last.StatusReason))
		if last.ExitCode != nil && *last.ExitCode != 0 {
			return term.Exit(*last.ExitCode)
		}
		return nil
	}
	if _, gerr := cl.Get(ctx, o.ID); gerr != nil && term.ExitCode(gerr) == term.ExitNotFound {
		fmt.Fprintf(c.Err, "lull: %s was removed\n", o.Name)
		return term.Exit(128 + int(syscall.SIGTERM))
	}
	return err
}

// endEvery is the interval at which awaitEnd checks whether a program has ended.
const endEvery = 500 * time.Millisecond

// awaitEnd waits until two consecutive polls find an instance stopped with nothing to
// start it, and returns it. By then its last output has arrived. Meanwhile it prints
// when the instance is paused and runs again, which its output does not show. It
// returns nil if ctx ends first.
func (c verbs) awaitEnd(ctx context.Context, cl *hostctl.Client, o hostctl.Instance) *hostctl.Instance {
	asleep := false
	for seen := 0; seen < 2; {
		select {
		case <-time.After(endEvery):
		case <-ctx.Done():
			return nil
		}
		now, err := cl.Get(ctx, o.ID)
		if err != nil {
			seen = 0
			continue
		}
		if o = now; o.State == "stopped" && o.RestartAt == nil && !o.StartsOnConnection {
			seen++
		} else {
			seen = 0
		}
		if now := power.Instance(o.State); now.Asleep() != asleep && (now.Asleep() || now == power.Running) {
			asleep = !asleep
			fmt.Fprintln(c.Err, "lull:", sleepText(o))
		}
	}
	return &o
}

// sleepText returns a message that an instance was paused or runs again.
func sleepText(o hostctl.Instance) string {
	since := func(t *time.Time) string {
		if t == nil {
			return ""
		}
		return " since " + t.Local().Format(time.TimeOnly)
	}
	if o.State == string(power.Running) {
		return fmt.Sprintf("%s has resumed%s", o.Name, since(o.LastResumedAt))
	}
	text := fmt.Sprintf("%s is paused%s, by %s. Resume it with: lull resume %s", o.Name, since(o.LastPausedAt), term.Dash(o.LastPausedBy), o.Name)
	if len(o.Endpoints) > 0 {
		text += ", or a connection to one of its ports"
	}
	return text
}

// nameFrom derives an instance's name from its command.
func nameFrom(command string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(filepath.Base(command)) {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '.' || r == '_' {
			b.WriteRune(r)
		}
	}
	return strings.Trim(b.String(), "-._")
}

func endpointsText(o hostctl.Instance) string {
	var parts []string
	for _, e := range o.Endpoints {
		parts = append(parts, fmt.Sprintf("%s (%s)", e.Listen, e.Path))
	}
	if len(parts) == 0 {
		return ""
	}
	return " on " + strings.Join(parts, ", ")
}
