package worker

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
)

// workerSet returns the verb that changes a worker's user settings.
func (c verbs) workerSet() *cobra.Command {
	var p worker.Profile
	var name string
	var tags, contacts []string
	cmd := &cobra.Command{Use: "set WORKER", Short: "Change a worker's own settings", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Change a worker's own settings. Settings that are not given stay as they are. An empty
value, 0 for --idle-timeout and -1 for --snooze remove the worker's own value, so that
the policy's applies. --tag and --contact replace all tags and contacts.

An operator may change how long a worker may be idle; the rest needs an admin token.`,
		Example: "  lull worker set cml-1 --idle-timeout 2h --owner ada\n  lull worker set cml-1 --policy '' --tag team=network --tag env=test",
		RunE: func(cmd *cobra.Command, a []string) error {
			if cmd.Flags().Changed("name") {
				p.Name = &name
			}
			if cmd.Flags().Changed("contact") {
				p.Contacts = contacts
			}
			var err error
			if p.Tags, err = pairs(tags); err != nil {
				return term.Usage(err)
			}
			changes := 0
			for _, f := range profileFlags {
				if cmd.Flags().Changed(f) {
					changes++
				}
			}
			if changes == 0 {
				return term.Usage(errors.New("nothing to change: give at least one setting, such as --idle-timeout 2h"))
			}
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			var changed worker.Worker // a new variable, because decoding does not clear absent fields
			if _, err := cl.Call(cmd.Context(), "PATCH", control.WorkerPath(w.ID), p, &changed); err != nil {
				return err
			}
			return c.Print(changed, func(out io.Writer) {
				fmt.Fprintf(out, "Changed %s. Show its effective policy with: lull policy resolve %s\n", changed.Name, changed.Name)
			})
		}}
	profile := bindProfile(cmd, &p)
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, a []string) error { profile(); return run(cmd, a) }
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "new name of the worker")
	f.StringSliceVar(&tags, "tag", nil, "tag name=value, instead of all present tags; repeatable")
	f.StringSliceVar(&contacts, "contact", nil, "address that receives its warnings, instead of all present ones; repeatable")
	return cmd
}

// profileFlags are the flags of lull worker set that change a setting.
var profileFlags = []string{"name", "tag", "contact", "owner", "pause-action", "idle-timeout", "snooze", "pause-holder", "source", "cml-username", "cml-password",
	"tls-ca", "tls-pin", "tls-insecure", "policy", "schedule", "accept"}

func (c verbs) workerIdleDetection() *cobra.Command {
	return &cobra.Command{Use: "idle-detection WORKER on|off", Short: "Switch idle pauses of a worker on or off", Args: term.Args(cobra.ExactArgs(2)),
		ValidArgsFunction: c.CompleteWorkers,
		Long: `Switch idle pauses of a worker on or off. While they are off, its use is still recorded,
and schedules, manual stops and its expiry still apply.`,
		Example: "  lull worker idle-detection cml-1 off",
		RunE: func(cmd *cobra.Command, a []string) error {
			verb := map[string]string{"on": "idle-detection/enable", "off": "idle-detection/disable"}[a[1]]
			if verb == "" {
				return term.Usage(fmt.Errorf("cannot set idle detection to %q: want on or off", a[1]))
			}
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			if w, _, err = cl.Do(cmd.Context(), w.ID, verb, nil); err != nil {
				return err
			}
			return c.Print(w, func(out io.Writer) {
				if a[1] == "on" {
					fmt.Fprintf(out, "%s may be paused when it is idle.\n", w.Name)
				} else {
					fmt.Fprintf(out, "%s is no longer paused when idle.\n", w.Name)
				}
			})
		}}
}

func (c verbs) workerScaleUp() *cobra.Command {
	var in control.ScaleUp
	var wait waiting
	cmd := &cobra.Command{Use: "scale-up TEMPLATE", Short: "Add a running worker of a template", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeTemplates,
		Long: `Add a running worker of a template. A stopped worker of the template is started before a
new one is launched. Refused when the region already has max_workers_per_region workers.`,
		Example: "  lull worker scale-up small --reason 'exam on friday' --wait",
		RunE: func(cmd *cobra.Command, a []string) error {
			in.Template = a[0]
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			w, err := control.Write[worker.Worker](cmd.Context(), cl, "POST", "/workers/scale-up", in)
			if err != nil {
				return err
			}
			return c.arrive(cmd.Context(), cl, w, power.WorkerRunning, wait)
		}}
	cmd.Flags().StringVar(&in.AWSRegion, "region", "", "AWS region (default: the template's, then the setting aws_default_region)")
	cmd.Flags().StringVar(&in.Reason, "reason", "", "reason, for the audit log")
	wait.bindFollow(cmd)
	return cmd
}

func (c verbs) workerWake() *cobra.Command {
	return &cobra.Command{Use: "wake WORKER-ID", Short: "Start a worker with its wake token", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Start a worker with its wake token, which can do nothing else. Give the token with --token
or $LULL_TOKEN. The call is recorded as an automatic resume and rate-limited. A wake
token cannot look up names: give the worker's ID. Make a token with lull worker wake-token.`,
		Example: "  lull worker wake w-0123456789ab",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			w, unfinished, err := cl.Do(cmd.Context(), a[0], "wake", nil)
			if err != nil {
				return err
			}
			return c.Print(w, func(out io.Writer) {
				if unfinished {
					fmt.Fprintf(out, "%s is starting.\n", w.Name)
				} else {
					fmt.Fprintf(out, "%s is %s.\n", w.Name, statusText(w.Status))
				}
			})
		}}
}

func (c verbs) workerWakeToken() *cobra.Command {
	return &cobra.Command{Use: "wake-token WORKER", Short: "Create a token that can only start this worker", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Create a token that can only start this worker, for webhooks and scripts. It is shown once
and replaces the worker's previous wake token. Needs an admin token.`,
		Example: "  lull worker wake-token cml-1",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			t, err := control.Write[control.WakeToken](cmd.Context(), cl, "POST", "/workers/"+w.ID+"/wake-token", nil)
			if err != nil {
				return err
			}
			return c.Print(t, func(out io.Writer) {
				fmt.Fprintf(out, "wake token of %s (shown once): %s\nStart the worker with: LULL_TOKEN=TOKEN lull worker wake %s\nor with POST %s%s and the header Authorization: Bearer TOKEN\n",
					w.Name, t.Token, w.ID, c.ServerURL(), t.URL)
			})
		}}
}

func (c verbs) workerDisarm() *cobra.Command {
	return &cobra.Command{Use: "disarm WORKER...", Short: "Return workers to dry-run mode", Args: term.Args(cobra.MinimumNArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long:    "Return workers to dry-run mode: lull decides and records, and takes no action.",
		Example: "  lull worker disarm cml-1",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			return c.armEach(cmd.Context(), cl, a, "disarm")
		}}
}
