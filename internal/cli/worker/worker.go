package worker

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/explain"
	"lull/internal/cli/term"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
)

func (c verbs) workerCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "worker", Aliases: []string{"workers"}, Short: "Manage cloud workers", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.workerCreate(), c.workerImport(), c.workerDiscovered(), c.Watchable(c.workerLs()), c.workerGet(), explain.WorkerWhy(c.Session), c.workerActivity(), c.workerIdleStatus(),
		c.workerSnooze(), c.workerTTL(), c.workerArm(), c.workerDisarm(), c.workerLicense(), c.workerDetect(), c.workerForget(), c.workerTerminate(),
		c.workerSet(), c.workerIdleDetection(), c.workerScaleUp(), c.workerWake(), c.workerWakeToken(),
		c.workerMetrics(), c.workerEC2State(), c.workerTelemetry(), c.workerAgent(), explain.WorkerTimeline(c.Session))
	for _, v := range []struct {
		name, short, long string
		to                power.Worker
	}{
		{"start", "Start a worker", "", power.WorkerRunning},
		{"resume", "Start a worker (alias for start)", "", power.WorkerRunning},
		{"stop", "Stop a worker", "Disks are kept. A manual stop takes effect even if the worker is in use or snoozed.", power.WorkerStopped},
		{"pause", "Stop a worker (alias for stop)", "", power.WorkerStopped},
		{"drain", "Drain a worker, then stop it", "A draining worker is hidden from placement, and running labs may finish. It is stopped when it is quiet, at the latest after drain_timeout_seconds.", power.WorkerStopped},
		{"cancel-drain", "Return a draining worker to service", "", power.WorkerRunning},
		{"retry", "Retry a failed worker", "lull launches the worker again only after it has verified that the failed attempt left no EC2 instance.", power.WorkerRunning},
	} {
		verb := c.workerVerb(v.name, v.short, v.to)
		verb.Long, verb.Example = v.long, "  lull worker "+v.name+" cml-1\n  lull worker "+v.name+" cml-1 --no-wait"
		cmd.AddCommand(verb)
	}
	return cmd
}

// workerTerminate returns the verb that terminates a worker after a confirmation: on
// a terminal the user types the worker's name, elsewhere --yes is required.
func (c verbs) workerTerminate() *cobra.Command {
	var wait waiting
	var yes, leave bool
	cmd := &cobra.Command{Use: "terminate WORKER", Short: "Terminate a worker and delete its volumes", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Terminate a worker and delete its volumes. This cannot be undone. An idle worker is
never terminated automatically for idleness. Needs an admin token.

On a terminal, type the worker's name to confirm. Elsewhere, pass --yes.

The license of its CML is released first, for up to two minutes. A stopped CML cannot
release its license: start the worker first, or keep the seat taken with
--leave-license.`,
		Example: "  lull worker terminate cml-1\n  lull worker terminate cml-1 --yes --wait\n  lull worker terminate cml-1 --leave-license",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			if !yes {
				if err := c.confirm(w); err != nil {
					return err
				}
			}
			verb := "terminate"
			if leave {
				verb += "?leave_license=true"
			}
			w, _, err = cl.Do(cmd.Context(), w.ID, verb, control.Confirmation{Confirm: w.Name})
			if err != nil {
				return err
			}
			return c.arrive(cmd.Context(), cl, w, power.WorkerTerminated, wait)
		}}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask for confirmation")
	cmd.Flags().BoolVar(&leave, "leave-license", false, "terminate a stopped worker even though its CML license stays registered")
	wait.bindFollow(cmd)
	return cmd
}

// confirm asks the user to type the name of the worker to be terminated.
func (c verbs) confirm(w worker.Worker) error {
	if !term.IsTerminal(c.In) {
		return term.Usage(fmt.Errorf("cannot terminate %s without confirmation: no terminal; pass --yes", w.Name))
	}
	what := strings.Join(slices.DeleteFunc([]string{w.EC2InstanceID, w.AWSRegion, strings.ToLower(string(w.Status))}, func(s string) bool { return s == "" }), ", ")
	fmt.Fprintf(c.Err, "This terminates %s (%s) and deletes its volumes. It cannot be undone.\nType the worker's name to confirm: ", w.Name, what)
	line, err := bufio.NewReader(io.LimitReader(c.In, 1024)).ReadString('\n')
	if err != nil && line == "" {
		return fmt.Errorf("cannot read the confirmation: %w", err)
	}
	if strings.TrimSpace(line) != w.Name {
		return fmt.Errorf("%s was not terminated: %q is not its name", w.Name, strings.TrimSpace(line))
	}
	return nil
}

// workerForget returns the verb that removes the record of a worker that no longer
// exists, or for which EC2 does not answer.
func (c verbs) workerForget() *cobra.Command {
	var force bool
	cmd := &cobra.Command{Use: "forget WORKER", Short: "Remove the record of a terminated worker", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Remove the record of a terminated worker. Its audit log entries are kept.

With --force, also remove a worker that is TERMINATING, or that was imported and never
seen by EC2, for example in a region or account that is no longer reachable. EC2 is not
called: if the EC2 instance exists, it keeps running and costing money.`,
		Example: "  lull worker forget cml-1\n  lull worker forget i-0123456789abcdef0 --force",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			w, err := cl.Known(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			q := url.Values{"force": {strconv.FormatBool(force)}}
			if _, err := cl.Call(cmd.Context(), "DELETE", "/api/v1/workers/"+url.PathEscape(w.ID)+"?"+q.Encode(), nil, nil); err != nil {
				return err
			}
			return c.Print(w, func(out io.Writer) {
				fmt.Fprintf(out, "%s forgotten\n", w.Name)
				if left := w.LeftBehind(); left != "" {
					fmt.Fprintln(out, left)
				}
			})
		}}
	cmd.Flags().BoolVar(&force, "force", false, "even if EC2 has not confirmed the termination")
	return cmd
}

// workerVerb returns a verb whose effect on a worker takes a while.
func (c verbs) workerVerb(name, short string, to power.Worker) *cobra.Command {
	var wait waiting
	cmd := &cobra.Command{Use: name + " WORKER", Short: short, Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			w, _, err = cl.Do(cmd.Context(), w.ID, name, nil)
			if err != nil {
				return err
			}
			return c.arrive(cmd.Context(), cl, w, to, wait)
		}}
	wait.bindFollow(cmd)
	return cmd
}

func (c verbs) workerCreate() *cobra.Command {
	var in fleet.NewWorker
	var wait waiting
	var tags []string
	var profile func()
	cmd := &cobra.Command{Use: "create NAME --template TEMPLATE", Short: "Launch a worker from a template", Args: term.Args(cobra.ExactArgs(1)),
		Example: "  lull worker create cml-1 --template small --wait\n  lull worker create cml-2 --template small --tag team=network --idle-timeout 30 --pause-action hibernate",
		RunE: func(cmd *cobra.Command, a []string) error {
			in.Name = a[0]
			profile()
			var err error
			if in.Tags, err = pairs(tags); err != nil {
				return term.Usage(err)
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			w, err := control.Write[worker.Worker](cmd.Context(), cl, "POST", "/workers", in)
			if err != nil {
				return err
			}
			return c.arrive(cmd.Context(), cl, w, power.WorkerRunning, wait)
		}}
	f := cmd.Flags()
	f.StringVar(&in.TemplateName, "template", "", "template to launch from")
	f.StringVar(&in.AWSRegion, "region", "", "AWS region (default: aws_default_region)")
	f.StringVar(&in.Account, "account", "", "account from the server's aws-accounts (default: that of its credentials)")
	f.StringVar(&in.InstanceType, "instance-type", "", "instance type (default: the template's)")
	f.StringVar(&in.AMIID, "ami", "", "AMI (default: the newest that matches the template)")
	f.StringSliceVar(&tags, "tag", nil, "tag name=value; repeatable")
	profile = bindProfile(cmd, &in.Profile)
	wait.bindFollow(cmd)
	_ = cmd.RegisterFlagCompletionFunc("template", c.completeTemplates) // the flag was defined above
	return cmd
}

// bindProfile defines the flags for a worker's settings. The returned function copies
// the given ones to p.
func bindProfile(cmd *cobra.Command, p *worker.Profile) func() {
	f := cmd.Flags()
	owner := f.String("owner", "", "owner of the worker")
	action := f.String("pause-action", "", "pause action: stop, hibernate or auto")
	idle, snooze := new(int), new(int)
	f.Var((*term.NumberFlag)(idle), "idle-timeout", "idle timeout, such as 30m; a bare number is minutes, 0 uses the policy's")
	f.Var((*term.NumberFlag)(snooze), "snooze", "protection after a resume, such as 1h; a bare number is minutes, -1 uses the policy's")
	holder := f.String("pause-holder", "", "what stops it when it is idle: controller or agent")
	sources := f.StringSlice("source", nil, "activity sources: cml, agent, cloudwatch")
	user := f.String("cml-username", "", "CML user (default: the template's, or the setting cml_default_username)")
	password := f.String("cml-password", "", "CML password as file:PATH or env:NAME on the server")
	ca := f.String("tls-ca", "", "CA certificates in PEM for the worker's CML")
	pin := f.String("tls-pin", "", "SHA-256 of the public key of the worker's CML certificate")
	insecure := f.Bool("tls-insecure", false, "do not verify the certificate of the worker's CML")
	named := f.String("policy", "", "policy name; empty removes the worker's own policy")
	hours := f.String("schedule", "", "schedule name; empty removes the worker's own schedule")
	risks := f.StringSlice("accept", nil, "stop risks to accept: instance_store, no_elastic_ip, asg_member, spot, stop_protected")
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
		set("cml-username", func() { p.CMLUsername = user })
		set("cml-password", func() { p.CMLPassword = password })
		set("tls-ca", func() { p.TLSCA = ca })
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
		k, v, ok := strings.Cut(kv, "=")
		if !ok {
			return nil, fmt.Errorf("cannot read tag %q: want name=value", kv)
		}
		out[k] = v
	}
	return out, nil
}

func (c verbs) workerImport() *cobra.Command {
	var in fleet.ImportedWorker
	var wait waiting
	var profile func()
	cmd := &cobra.Command{Use: "import INSTANCE-ID", Short: "Import an EC2 instance as a worker, in dry-run mode", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Import an EC2 instance as a worker. The instance must be in --region or, if that is not
given, in one of the regions of discovery. The worker starts in dry-run mode: lull
decides and records, but takes no action until lull worker arm. lull tags the instance
before its first action.

Without --source, lull chooses the activity sources by what it can observe: cml if a CML
answers at the machine's address, agent if its agent reports to this server, otherwise
cloudwatch. A machine that is stopped or has just booted is probed once it runs. lull why
shows which sources were chosen and why.

With --wait, show the worker once EC2 has reported it.`,
		Example: "  lull worker import i-0123456789abcdef0 --name old --region eu-north-1 --wait\n  lull worker import i-0123456789abcdef0 --tls-pin SHA256 --accept no_elastic_ip",
		RunE: func(cmd *cobra.Command, a []string) error {
			in.EC2InstanceID = a[0]
			profile()
			if in.Name == "" {
				in.Name = a[0]
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			w, err := control.Write[worker.Worker](cmd.Context(), cl, "POST", "/workers/import", in)
			if err != nil {
				return err
			}
			return c.follow(cmd.Context(), cl, w, wasSeen, wait, func(w worker.Worker) error {
				return c.Print(w, func(out io.Writer) {
					fmt.Fprintf(out, "%s imported (%s) in dry-run mode. Let lull act on it with: lull worker arm %s\n", w.Name, w.ID, w.Name)
					if why := w.ActivitySourcesReason; why != "" {
						fmt.Fprintln(out, "activity sources: "+why)
					}
				})
			})
		}}
	cmd.Flags().StringVar(&in.Name, "name", "", "name of the worker (default: the instance ID)")
	cmd.Flags().StringVar(&in.AWSRegion, "region", "", "AWS region of the instance (default: searched in the regions of discovery)")
	cmd.Flags().StringVar(&in.Account, "account", "", "account from the server's aws-accounts (default: that of its credentials)")
	cmd.Flags().StringVar(&in.TemplateName, "template", "", "template that provides its idle settings")
	profile = bindProfile(cmd, &in.Profile)
	wait.bind(cmd)
	return cmd
}

// wasSeen is the goal that an imported worker's instance has been observed.
var wasSeen = goal{"be observed", func(w worker.Worker) (bool, error) {
	if w.Status == power.WorkerTerminated {
		return false, fmt.Errorf("cannot observe %s: it is terminated: %s", w.Name, w.StatusReason)
	}
	return w.Status != power.WorkerUnknown, nil
}}

func (c verbs) workerLs() *cobra.Command {
	var region, status, template, owner, name, text string
	var tags []string
	var terminated bool
	cmd := &cobra.Command{Use: "ls", Short: "List workers", Args: term.Args(cobra.NoArgs),
		Example: "  lull worker ls --status RUNNING --tag team=network\n  lull worker ls --search cml --json",
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
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			l, err := cl.Workers(cmd.Context(), q)
			if err != nil {
				return err
			}
			slices.SortFunc(l, func(a, b worker.Worker) int { return cmp.Compare(a.Name, b.Name) })
			if len(l) == 0 && len(q) > 0 && !c.JSON {
				fmt.Fprintln(c.Err, "no worker matches")
			}
			return c.Print(l, func(w io.Writer) { workerTable(w, l) })
		}}
	f := cmd.Flags()
	f.StringVar(&region, "region", "", "only workers in this AWS region")
	f.StringVar(&status, "status", "", "only workers in this status")
	f.StringVar(&template, "template", "", "only workers from this template")
	f.StringVar(&owner, "owner", "", "only workers of this owner")
	f.StringVar(&name, "name", "", "only the worker with this name")
	f.StringVar(&text, "search", "", "only workers with this text in the name, an ID, an address, a tag, the owner or the template")
	f.StringArrayVar(&tags, "tag", nil, "only workers with this tag: name or name=value, repeatable")
	f.BoolVar(&terminated, "terminated", false, "include terminated workers")
	return cmd
}

func workerTable(w io.Writer, l []worker.Worker) {
	term.Rows(w, "NAME\tSTATUS\t4:REGION\t3:TYPE\t6:LAST ACTIVITY\t7:PAUSE AT\t2:PAUSED BY\t5:MODE\t1:ID", func(row func(string, ...any)) {
		for _, v := range l {
			mode := "armed"
			if !v.Armed {
				mode = "shadow"
			}
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", v.Name, v.Status, v.AWSRegion, term.Dash(v.InstanceType), term.OptionalTime(v.LastActivityAt),
				pauseAt(v.TargetPauseAt, v.PauseNotBefore, v.Expiry), term.Dash(v.LastPausedBy), mode, v.ID)
		}
	})
}

// pauseAt returns when something is paused; with notBefore, the earliest time. If the
// expiry x comes first, it returns that.
func pauseAt(t *time.Time, notBefore bool, x *why.Expiry) string {
	switch {
	case x.Before(t):
		return term.OptionalTime(&x.At) + " (ttl)"
	case notBefore:
		return "not before " + term.OptionalTime(t)
	}
	return term.OptionalTime(t)
}

// workerDiscovered returns the verb that lists instances that discovery found and
// that are not imported yet.
func (c verbs) workerDiscovered() *cobra.Command {
	var scanOnly bool
	cmd := &cobra.Command{Use: "discovered", Short: "List EC2 instances that can be imported as workers", Args: term.Args(cobra.NoArgs),
		Long: `List the EC2 instances that discovery found and that are not workers yet: those with
this fleet's tag and those whose image name matches. Below the list is a summary of the
last scan: regions, image names, instances seen and skipped, and what to do next. With
--json only the list goes to standard output; --scan --json prints the summary.`,
		Example: "  lull worker discovered\n  lull worker discovered --scan --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			l, err := control.Read[control.ListDiscovered](cmd.Context(), cl, "/workers/discovered")
			if err != nil {
				return err
			}
			if scanOnly {
				return c.Print(l.Scan, func(w io.Writer) { scanText(w, l.Scan, len(l.Items)) })
			}
			if c.JSON && len(l.Items) == 0 && l.Scan != nil {
				scanText(c.Err, l.Scan, 0)
			}
			return c.Print(l.Items, func(w io.Writer) {
				if len(l.Items) > 0 {
					term.Rows(w, "INSTANCE\tNAME\tSTATE\t4:REGION\t1:ACCOUNT\t2:FOUND BY\t3:SINCE", func(row func(string, ...any)) {
						for _, d := range l.Items {
							by := "image"
							if d.Orphan {
								by = "tag"
							}
							row("%s\t%s\t%s\t%s\t%s\t%s\t%s", d.EC2InstanceID, term.Dash(d.Name), d.State, d.Region, term.Dash(d.Account), by, term.OptionalTime(&d.FirstSeenAt))
						}
					})
					fmt.Fprintln(w)
				}
				scanText(w, l.Scan, len(l.Items))
			})
		}}
	cmd.Flags().BoolVar(&scanOnly, "scan", false, "print only the summary of the last scan")
	return cmd
}

// skipped explains the codes for which a scan skips an instance.
var skipped = []struct{ code, text string }{
	{fleet.SkipWorker, "already workers"}, {fleet.SkipNoMatch, "without the tag or a matching image name"},
	{fleet.SkipLaunching, "just launched by lull"}, {fleet.SkipImported, "imported by this scan"}, {fleet.SkipUnread, "skipped because the store could not be read"},
}

// scanText prints what a scan covered, found and skipped, and what to do next. A nil
// scan means that none has finished.
func scanText(w io.Writer, s *fleet.Scan, found int) {
	switch {
	case s == nil:
		fmt.Fprintln(w, "No discovery scan has finished yet. The first one runs within seconds of the\nserver's start.")
		return
	case s.Import == "off":
		fmt.Fprintln(w, "Discovery is off. Switch it on with: lull settings set discovery_import=confirm")
		return
	}
	fmt.Fprintf(w, "Last scan %s, next %s. It lists instances with the tag\n%s or a matching image name.\n", term.OptionalTime(&s.At), term.OptionalTime(&s.NextAt), s.Tag)
	failed := false
	for _, r := range s.Regions {
		where := r.Region
		if r.Account != "" {
			where += " of account " + r.Account
		}
		fmt.Fprintf(w, "  %s, images %s of %s: ", where, strings.Join(r.AMINamePatterns, ", "), strings.Join(r.ImageOwners, ", "))
		if r.Error != "" {
			failed = true
			fmt.Fprintf(w, "not scanned: %s\n", r.Error)
			continue
		}
		fmt.Fprintf(w, "%d instances, %d found\n", r.Instances, r.Found)
		for _, k := range skipped {
			if n := r.Skipped[k.code]; n > 0 {
				fmt.Fprintf(w, "    %d %s\n", n, k.text)
			}
		}
	}
	fmt.Fprintln(w, "Next:")
	next := func(what, how string) { fmt.Fprintf(w, "  %-24s %s\n", what, how) }
	if failed {
		next("check AWS access", "lull server doctor")
	}
	if found > 0 {
		next("import an instance", "lull worker import INSTANCE-ID")
		return
	}
	next("import any instance", "lull worker import INSTANCE-ID --region REGION")
	next("match other images", "lull settings set 'discovery_ami_name_patterns=*cml*,*NAME*'")
	next("scan other regions", "lull settings set discovery_regions=us-east-1,eu-north-1")
}

func (c verbs) workerGet() *cobra.Command {
	return &cobra.Command{Use: "get WORKER", Aliases: []string{"info"}, Short: "Show a worker in detail", Example: "  lull worker get cml-1", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		RunE: func(cmd *cobra.Command, a []string) error {
			_, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			return c.Print(w, func(out io.Writer) { term.YamlText(out, w) })
		}}
}
