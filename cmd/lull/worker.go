package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/fleet"
	"lull/internal/link/control"
	"lull/internal/power"
)

func (c *cli) workerCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "worker", Aliases: []string{"workers"}, Short: "Cloud workers: create, watch, pause, resume, end", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.workerCreate(), c.workerImport(), c.workerDiscovered(), c.workerLs(), c.workerGet(), c.workerWhyCommand(), c.workerActivity(), c.workerIdleStatus(),
		c.workerSnooze(), c.workerArm(), c.workerLicense(), c.workerDetect())
	for _, v := range []struct {
		name, short string
		to          power.Worker
	}{
		{"start", "Start it", power.WorkerRunning},
		{"resume", "Start it: the same as start", power.WorkerRunning},
		{"stop", "Stop it", power.WorkerStopped},
		{"pause", "Stop it by a person's wish: the same as stop", power.WorkerStopped},
		{"drain", "Take nothing new, and stop it when nothing runs", power.WorkerStopped},
		{"cancel-drain", "Return a draining worker to service", power.WorkerRunning},
		{"terminate", "End it for ever, with its volumes", power.WorkerTerminated},
		{"retry", "Try a failed worker again", power.WorkerRunning},
	} {
		cmd.AddCommand(c.workerVerb(v.name, v.short, v.to))
	}
	return cmd
}

// workerVerb is a verb that a worker takes a while to follow.
func (c *cli) workerVerb(name, short string, to power.Worker) *cobra.Command {
	var wait waiting
	cmd := &cobra.Command{Use: name + " WORKER", Short: short, Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeWorkers,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.findWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			w, _, err = cl.Do(cmd.Context(), w.ID, name, nil)
			if err != nil {
				return err
			}
			return c.arrive(cmd.Context(), cl, w, to, wait)
		}}
	wait.bind(cmd)
	return cmd
}

func (c *cli) findWorker(ctx context.Context, ref string) (*control.Client, fleet.Worker, error) {
	cl, err := c.control()
	if err != nil {
		return nil, fleet.Worker{}, err
	}
	w, err := cl.Worker(ctx, ref)
	return cl, w, err
}

// waiting is what --wait says.
type waiting struct {
	on     bool
	within time.Duration
}

func (w *waiting) bind(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&w.on, "wait", "w", false, "wait until it is done, and show how it goes")
	cmd.Flags().DurationVar(&w.within, "timeout", 30*time.Minute, "how long to wait")
}

// pollEvery is how often a waiting verb looks, besides when an event comes.
const pollEvery = 2 * time.Second

// arrive shows the worker, and with --wait first waits until it is at to. It
// fails if the worker fails, or will not get there any more.
func (c *cli) arrive(ctx context.Context, cl *control.Client, w fleet.Worker, to power.Worker, wait waiting) error {
	if wait.on {
		var err error
		if w, err = c.await(ctx, cl, w, to, wait.within); err != nil {
			if ctx.Err() != nil {
				fmt.Fprintf(c.err, "lull: detached, it goes on; look again with: lull worker get %s\n", w.Name)
				return nil
			}
			return err
		}
	}
	return c.print(w, func(out io.Writer) { fmt.Fprintf(out, "%s %s\n", w.Name, w.Status) })
}

func (c *cli) await(parent context.Context, cl *control.Client, w fleet.Worker, to power.Worker, within time.Duration) (fleet.Worker, error) {
	ctx, cancel := context.WithTimeout(parent, within)
	defer cancel()
	changed := make(chan struct{}, 1)
	stream, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		// Without the stream the polls below find the change a little later.
		_ = cl.Follow(stream, control.Events{WorkerID: w.ID, Each: func(fleet.Entry) error {
			select {
			case changed <- struct{}{}:
			default:
			}
			return nil
		}})
	}()
	defer func() { stop(); <-ended }()
	type shown struct {
		status power.Worker
		reason string
	}
	last, tick := shown{}, time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if now := (shown{w.Status, w.StatusReason}); now != last { // why it does not go on is told too
			last = now
			fmt.Fprintf(c.err, "%s  %s %s %s\n", time.Now().Format(time.TimeOnly), w.Name, w.Status, w.StatusReason)
		}
		switch {
		case w.Status == to && w.Intent == nil:
			return w, nil
		case w.Status == power.WorkerFailed:
			return w, fmt.Errorf("cannot bring %s to %s: %s", w.Name, to, w.StatusReason)
		case w.Status == power.WorkerTerminated, w.DesiredStatus != to && w.DesiredStatus != "":
			return w, fmt.Errorf("cannot bring %s to %s: it is wanted to be %s now%s", w.Name, to, w.DesiredStatus, overtaken(&w, to))
		}
		select {
		case <-ctx.Done():
			return w, fmt.Errorf("cannot wait longer for %s to be %s: it is %s", w.Name, to, strings.TrimSpace(string(w.Status)+" "+w.StatusReason))
		case <-changed:
		case <-tick.C:
		}
		next, err := cl.Worker(ctx, w.ID)
		if unreachable, ok := errors.AsType[*control.UnreachableError](err); ok {
			fmt.Fprintln(c.err, "lull:", unreachable)
			continue
		}
		if err != nil && ctx.Err() == nil {
			return w, err
		}
		if err == nil {
			w = next
		}
	}
}

// overtaken says who wanted something else of a worker that was to get to a
// status.
func overtaken(w *fleet.Worker, to power.Worker) string {
	switch {
	case to == power.WorkerRunning && w.StartWithdrawnAt != nil:
		return fmt.Sprintf(": %s took the start back at %s", w.StartWithdrawnBy, w.StartWithdrawnAt.Format(time.RFC3339))
	case to == power.WorkerRunning && w.DesiredStatus == power.WorkerStopped && w.LastPausedBy != "":
		return fmt.Sprintf(": %s asked for a stop (%s)", w.LastPausedBy, w.PauseReason)
	case to == power.WorkerStopped && w.DesiredStatus == power.WorkerRunning && w.StartBy != "":
		return ": " + w.StartBy + " asked for a start"
	}
	return ""
}

func (c *cli) workerCreate() *cobra.Command {
	var in fleet.NewWorker
	var wait waiting
	var tags []string
	var profile func()
	cmd := &cobra.Command{Use: "create NAME --template TEMPLATE", Short: "Launch a worker from a template", Args: args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			in.Name = a[0]
			profile()
			var err error
			if in.Tags, err = pairs(tags); err != nil {
				return &usageError{err}
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			w, err := control.Write[fleet.Worker](cmd.Context(), cl, "POST", "/workers", in)
			if err != nil {
				return err
			}
			return c.arrive(cmd.Context(), cl, w, power.WorkerRunning, wait)
		}}
	f := cmd.Flags()
	f.StringVar(&in.TemplateName, "template", "", "template to launch from")
	f.StringVar(&in.AWSRegion, "region", "", "AWS region; empty is aws_default_region")
	f.StringVar(&in.Account, "account", "", "one of the server's aws-accounts; empty is its credentials' own")
	f.StringVar(&in.InstanceType, "instance-type", "", "instead of the template's")
	f.StringVar(&in.AMIID, "ami", "", "instead of the newest image that matches the template")
	f.StringSliceVar(&tags, "tag", nil, "name=value, repeatable")
	profile = bindProfile(cmd, &in.Profile)
	wait.bind(cmd)
	_ = cmd.RegisterFlagCompletionFunc("template", c.completeTemplates) // the flag is there: it was just made
	return cmd
}

// bindProfile gives a verb the flags that say how a worker is kept. The
// function it returns puts those that were given into p.
func bindProfile(cmd *cobra.Command, p *fleet.Profile) func() {
	f := cmd.Flags()
	owner := f.String("owner", "", "who it belongs to")
	action := f.String("pause-action", "", "stop, hibernate or auto")
	idle := f.Int("idle-timeout", 0, "minutes without activity before it is idle; 0 is the policy's")
	snooze := f.Int("snooze", 0, "minutes of protection after a resume; -1 is the policy's")
	holder := f.String("pause-holder", "", "who stops it when it is idle: controller or agent")
	sources := f.StringSlice("source", nil, "what tells of its activity: cml, agent, cloudwatch")
	pin := f.String("tls-pin", "", "SHA-256 of the public key of its CML")
	insecure := f.Bool("tls-insecure", false, "do not verify the certificate of its CML")
	named := f.String("policy", "", "a policy by name; empty takes its own away")
	hours := f.String("schedule", "", "a schedule by name; empty takes its own away")
	risks := f.StringSlice("accept", nil, "what may not keep it from being stopped: instance_store, no_elastic_ip, asg_member, spot, stop_protected")
	return func() {
		set := func(name string, do func()) {
			if f.Changed(name) {
				do()
			}
		}
		set("owner", func() { p.Owner = owner })
		set("policy", func() { p.Policy = named })
		set("schedule", func() { p.Schedule = hours })
		set("pause-action", func() { p.PauseAction = action })
		set("idle-timeout", func() { p.IdleTimeoutMinutes = idle })
		set("snooze", func() { p.SnoozeMinutes = snooze })
		set("pause-holder", func() { p.PauseHolder = holder })
		set("source", func() { p.ActivitySources = *sources })
		set("tls-pin", func() { p.TLSPin = pin })
		set("tls-insecure", func() { p.TLSInsecure = insecure })
		set("accept", func() { p.AcceptedRisks = *risks })
	}
}

func pairs(l []string) (map[string]string, error) {
	if len(l) == 0 {
		return nil, nil
	}
	out := map[string]string{}
	for _, kv := range l {
		k, v, ok := cut(kv, "=")
		if !ok {
			return nil, fmt.Errorf("cannot read tag %q: want name=value", kv)
		}
		out[k] = v
	}
	return out, nil
}

func (c *cli) workerImport() *cobra.Command {
	var in fleet.ImportedWorker
	var profile func()
	cmd := &cobra.Command{Use: "import INSTANCE-ID", Short: "Take an instance that exists into the fleet; it is in shadow until it is armed", Args: args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			in.EC2InstanceID = a[0]
			profile()
			if in.Name == "" {
				in.Name = a[0]
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			w, err := control.Write[fleet.Worker](cmd.Context(), cl, "POST", "/workers/import", in)
			if err != nil {
				return err
			}
			return c.print(w, func(out io.Writer) {
				fmt.Fprintf(out, "%s imported (%s), in shadow; let lull act on it with: lull worker arm %s\n", w.Name, w.ID, w.Name)
			})
		}}
	cmd.Flags().StringVar(&in.Name, "name", "", "name of the worker; empty is the instance id")
	cmd.Flags().StringVar(&in.AWSRegion, "region", "us-east-1", "AWS region of the instance")
	cmd.Flags().StringVar(&in.Account, "account", "", "one of the server's aws-accounts; empty is its credentials' own")
	cmd.Flags().StringVar(&in.TemplateName, "template", "", "template whose idle settings it takes")
	profile = bindProfile(cmd, &in.Profile)
	return cmd
}

func (c *cli) workerLs() *cobra.Command {
	var region, status, template, owner, name, text string
	var tags []string
	var terminated bool
	cmd := &cobra.Command{Use: "ls", Short: "List workers", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q := url.Values{}
			for k, v := range map[string]string{"aws_region": region, "status": status, "template": template, "owner": owner, "name": name, "q": text} {
				if v != "" {
					q.Set(k, v)
				}
			}
			for _, t := range tags {
				q.Add("tag", t)
			}
			if terminated {
				q.Set("terminated", "true")
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			l, err := cl.Workers(cmd.Context(), q)
			if err != nil {
				return err
			}
			slices.SortFunc(l, func(a, b fleet.Worker) int { return compare(a.Name, b.Name) })
			return c.print(l, func(w io.Writer) { workerTable(w, l) })
		}}
	f := cmd.Flags()
	f.StringVar(&region, "region", "", "of this AWS region only")
	f.StringVar(&status, "status", "", "in this status only")
	f.StringVar(&template, "template", "", "of this template only")
	f.StringVar(&owner, "owner", "", "of this owner only")
	f.StringVar(&name, "name", "", "with this name only")
	f.StringVar(&text, "search", "", "with this text in the name, an id, an address, a tag, the owner or the template")
	f.StringArrayVar(&tags, "tag", nil, "name or name=value, repeatable")
	f.BoolVar(&terminated, "terminated", false, "terminated ones too")
	return cmd
}

func workerTable(w io.Writer, l []fleet.Worker) {
	rows(w, "NAME\tSTATUS\tREGION\tTYPE\tLAST ACTIVITY\tPAUSE AT\tPAUSED BY\tMODE\tID", func(row func(string, ...any)) {
		for _, v := range l {
			mode := "armed"
			if !v.Armed {
				mode = "shadow"
			}
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", v.Name, v.Status, v.AWSRegion, dash(v.InstanceType), moment0(v.LastActivityAt),
				moment0(v.TargetPauseAt), dash(v.LastPausedBy), mode, v.ID)
		}
	})
}

// workerDiscovered lists what discovery found and nobody took in.
func (c *cli) workerDiscovered() *cobra.Command {
	return &cobra.Command{Use: "discovered", Short: "List instances that look like workers and are none yet; import takes one in", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.control()
			if err != nil {
				return err
			}
			l, err := control.Read[control.List[fleet.Discovered]](cmd.Context(), cl, "/workers/discovered")
			if err != nil {
				return err
			}
			return c.print(l.Items, func(w io.Writer) {
				rows(w, "INSTANCE\tNAME\tSTATE\tREGION\tACCOUNT\tFOUND BY\tSINCE", func(row func(string, ...any)) {
					for _, d := range l.Items {
						by := "image"
						if d.Orphan {
							by = "tag"
						}
						row("%s\t%s\t%s\t%s\t%s\t%s\t%s", d.EC2InstanceID, dash(d.Name), d.State, d.Region, dash(d.Account), by, moment0(&d.FirstSeenAt))
					}
				})
			})
		}}
}

func (c *cli) workerGet() *cobra.Command {
	return &cobra.Command{Use: "get WORKER", Aliases: []string{"info"}, Short: "Show everything about a worker", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeWorkers,
		RunE: func(cmd *cobra.Command, a []string) error {
			_, w, err := c.findWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			return c.print(w, func(out io.Writer) { yamlText(out, w) })
		}}
}

func (c *cli) workerWhyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "why WORKER", Short: "Say why a worker runs, or why and by whom it was stopped; now or at a past time", Args: args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeWorkers, RunE: c.workerWhy}
	atFlag(cmd)
	return cmd
}
