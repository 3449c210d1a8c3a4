package worker

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/explain"
	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/control"
)

func (c verbs) workerActivity() *cobra.Command {
	return &cobra.Command{Use: "activity WORKER", Short: "Show a worker's recent activity, pauses and resumes", Example: "  lull worker activity cml-1", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			v, err := control.Read[worker.Activity](cmd.Context(), cl, "/workers/"+w.ID+"/activity")
			if err != nil {
				return err
			}
			return c.Print(v, func(out io.Writer) { activityText(out, w, v) })
		}}
}

func activityText(out io.Writer, w worker.Worker, v worker.Activity) {
	term.Rows(out, w.Name+"\t", func(row func(string, ...any)) {
		row("last activity\t%s", term.OptionalTime(v.LastActivityAt))
		row("last checked\t%s", term.OptionalTime(v.LastActivityCheckAt))
		row("last paused\t%s by %s (%s)", term.OptionalTime(v.LastPausedAt), term.Dash(v.LastPausedBy), term.Dash(string(v.PauseReason)))
		row("last resumed\t%s by %s", term.OptionalTime(v.LastResumedAt), term.Dash(v.LastResumedBy))
		row("pauses\t%d automatic, %d manual, %d external", v.AutoPauseCount, v.ManualPauseCount, v.ExternalPauseCount)
		row("resumes\t%d automatic, %d manual, %d external", v.AutoResumeCount, v.ManualResumeCount, v.ExternalResumeCount)
		row("snooze\t%s", term.OptionalTime(v.SnoozeUntil))
		row("next check\t%s", term.OptionalTime(v.NextIdleCheckAt))
		row("pause at\t%s", pauseAt(v.TargetPauseAt, false, w.Expiry))
	})
	if len(v.RecentActivityEvents) > 0 {
		fmt.Fprintln(out)
		eventTable(out, v.RecentActivityEvents)
	}
}

func (c verbs) workerIdleStatus() *cobra.Command {
	return &cobra.Command{Use: "idle-status WORKER", Short: "Show whether a worker is idle and what holds it", Example: "  lull worker idle-status cml-1", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			v, err := control.Read[worker.IdleStatus](cmd.Context(), cl, "/workers/"+w.ID+"/idle-status")
			if err != nil {
				return err
			}
			return c.Print(v, func(out io.Writer) {
				state := "active"
				if v.IsIdle {
					state = "idle"
				}
				when := pauseAt(v.TargetPauseAt, v.NotBefore(), v.Expiry)
				if !v.NotBefore() || v.Expiry.Before(v.TargetPauseAt) {
					when = "at " + when
				}
				fmt.Fprintf(out, "%s is %s for %s of %s; pause %s\n", w.Name, state, idle.HumanMinutes(v.IdleMinutes), idle.HumanMinutes(v.TimeoutMinutes), when)
				explain.VerdictText(out, v.Verdict, v.Expiry)
			})
		}}
}

func (c verbs) workerDetect() *cobra.Command {
	return &cobra.Command{Use: "detect-idle WORKER", Short: "Check a worker now, and pause it if eligible", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Check a worker now, in the four steps of every check: read its telemetry, update its
activity, decide, and pause it if it is eligible and armed. The answer shows how far
the check got. A failed reading never leads to a pause.`,
		Example: "  lull worker detect-idle cml-1",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			r, err := cl.DetectIdle(cmd.Context(), w.ID)
			if err != nil {
				return err
			}
			if r.Error != "" && w.Status != power.WorkerRunning {
				return httpx.NewProblem(http.StatusConflict, "status", fmt.Sprintf("cannot check %s, which is %s: %s", w.Name, w.Status, r.Error))
			}
			if r.Error != "" {
				return fmt.Errorf("cannot check %s: %s", w.Name, r.Error)
			}
			return c.Print(r.Detect, func(out io.Writer) {
				if r.Detect != nil {
					fmt.Fprintln(out, detectText(w.Name, *r.Detect))
				}
			})
		}}
}

// detectText returns what a check found and did, and the first reason against a
// pause.
func detectText(name string, d worker.DetectResult) string {
	use := "in use"
	switch {
	case !d.IdleCheckPerformed:
		return fmt.Sprintf("%s was not checked: %s", name, cmp.Or(d.Error, d.TelemetryUnknownWhy, "its readings are unknown"))
	case d.IsIdle:
		use = "idle for " + idle.HumanMinutes(d.IdleMinutes)
	case d.IdleMinutes > 0:
		use = "quiet for " + idle.HumanMinutes(d.IdleMinutes)
	}
	text := fmt.Sprintf("%s is %s; ", name, use)
	switch {
	case d.AutoPauseTriggered:
		return text + "it is being paused."
	case d.WouldHavePaused:
		return text + "not paused because it is in dry-run mode."
	case len(d.Blocks) > 0:
		return text + "not paused: " + d.Blocks[0].Sentence
	case d.Guard != "":
		return text + "not paused because of a limit of the fleet (" + strings.ReplaceAll(strings.TrimPrefix(d.Guard, "skipped_"), "_", " ") + ")."
	}
	return text + "not paused."
}

// protect snoozes a worker, or ends its snooze.
func (c verbs) protect(cmd *cobra.Command, name string, e *term.EndFlags) error {
	t, err := e.End(time.Now())
	if err != nil {
		return err
	}
	var in control.Snooze
	if !e.Off {
		in.Until = t.Format(time.RFC3339Nano)
	}
	cl, w, err := c.FindWorker(cmd.Context(), name)
	if err != nil {
		return err
	}
	w, _, err = cl.Do(cmd.Context(), w.ID, "snooze", in)
	if err != nil {
		return err
	}
	return c.Print(w, func(out io.Writer) {
		if e.Off {
			fmt.Fprintf(out, "The snooze of %s has ended.\n", w.Name)
			return
		}
		fmt.Fprintf(out, "%s is snoozed until %s.\n", w.Name, term.OptionalTime(w.SnoozedUntil))
	})
}

func (c verbs) workerSnooze() *cobra.Command {
	var e term.EndFlags
	cmd := &cobra.Command{Use: "snooze WORKER [DURATION]", Short: "Protect a worker from automatic pauses until a time", Args: term.Args(cobra.RangeArgs(1, 2)), ValidArgsFunction: c.CompleteWorkers,
		Example: "  lull worker snooze cml-1 2h\n  lull worker snooze cml-1 --until 22:00",
		RunE: func(cmd *cobra.Command, a []string) error {
			if err := e.Take(a); err != nil {
				return err
			}
			return c.protect(cmd, a[0], &e)
		}}
	e.Bind(cmd.Flags(), "end the protection")
	return cmd
}

func (c verbs) workerTTL() *cobra.Command {
	var e term.EndFlags
	var action string
	cmd := &cobra.Command{Use: "ttl WORKER", Short: "Set or clear a worker's expiry time", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Set or clear a worker's expiry (ttl_deadline). At the deadline the worker is stopped or
terminated after a warning, even if it is in use. No snooze or override prevents this.
A later deadline does, and so does a halt while it lasts.

The warning period is that of the worker's policy, at least a minute. If the deadline is
nearer, the warning is sent at once and the worker expires when the period is over.

After the deadline the worker cannot start until the deadline is moved or cleared.`,
		Example: "  lull worker ttl cml-1 --for 8h\n  lull worker ttl cml-1 --until 2026-12-24 --action terminate\n  lull worker ttl cml-1 --off",
		RunE: func(cmd *cobra.Command, a []string) error {
			t, err := e.End(time.Now())
			if err != nil {
				return err
			}
			in := worker.Profile{TTLDeadline: &t}
			if cmd.Flags().Changed("action") {
				in.TTLAction = &action
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			w, err := cl.Worker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			id := w.ID
			w = worker.Worker{} // reset it: decoding does not clear absent fields
			if _, err := cl.Call(cmd.Context(), "PATCH", control.WorkerPath(id), in, &w); err != nil {
				return err
			}
			return c.Print(w, func(out io.Writer) {
				if w.TTLDeadline == nil {
					fmt.Fprintf(out, "%s has no expiry.\n", w.Name)
					return
				}
				then := "stopped"
				if w.TTLAction == "terminate" {
					then = "terminated"
				}
				fmt.Fprintf(out, "%s expires at %s and is then %s.\n", w.Name, term.OptionalTime(w.TTLDeadline), then)
				if x := w.Expiry; x != nil && x.At.After(x.Deadline) {
					fmt.Fprintln(out, term.Localized(x.Sentence(time.Now())))
				}
			})
		}}
	e.Bind(cmd.Flags(), "clear the deadline")
	cmd.Flags().StringVar(&action, "action", "", "what happens at the deadline: stop or terminate (default: as before, or stop)")
	return cmd
}

func (c verbs) workerArm() *cobra.Command {
	var sel control.Selector
	var tags []string
	var off bool
	cmd := &cobra.Command{Use: "arm [WORKER...]", Short: "Take imported workers out of dry-run mode", ValidArgsFunction: c.CompleteWorkers,
		Long: `Take workers out of dry-run mode: from now on lull acts on its decisions about them.
lull why shows what it would have done so far. --off returns them to dry-run mode.`,
		Example: "  lull worker arm cml-1\n  lull worker arm --tag team=network",
		RunE: func(cmd *cobra.Command, a []string) error {
			var err error
			if sel.Tags, err = pairs(tags); err != nil {
				return term.Usage(err)
			}
			selected := len(sel.Tags) > 0 || sel.Region != "" || sel.All
			if selected == (len(a) > 0) || off && selected {
				return term.Usage(fmt.Errorf("no workers selected: name them, or use --tag, --region or --all"))
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			if !selected {
				return c.armEach(cmd.Context(), cl, a, map[bool]string{false: "arm", true: "disarm"}[off])
			}
			list, err := control.Write[control.List[worker.Worker]](cmd.Context(), cl, "POST", "/workers/arm", sel)
			if err != nil {
				return err
			}
			return c.Print(list.Items, func(out io.Writer) { armedText(out, list.Items) })
		}}
	cmd.Flags().StringSliceVar(&tags, "tag", nil, "tag name=value; repeatable")
	cmd.Flags().StringVar(&sel.Region, "region", "", "all workers in this AWS region")
	cmd.Flags().BoolVar(&sel.All, "all", false, "all workers")
	cmd.Flags().BoolVar(&off, "off", false, "return to dry-run mode")
	return cmd
}

// armEach arms or disarms workers. It stops at the first that fails.
func (c verbs) armEach(ctx context.Context, cl *control.Client, refs []string, verb string) error {
	done := []worker.Worker{}
	for _, ref := range refs {
		w, err := cl.Worker(ctx, ref)
		if err == nil {
			w, _, err = cl.Do(ctx, w.ID, verb, nil)
		}
		if err != nil {
			if !c.JSON {
				armedText(c.Out, done)
			}
			return err
		}
		done = append(done, w)
	}
	return c.Print(done, func(out io.Writer) { armedText(out, done) })
}

func armedText(out io.Writer, l []worker.Worker) {
	for _, w := range l {
		if w.Armed {
			fmt.Fprintf(out, "%s is armed: lull acts on its decisions.\n", w.Name)
		} else {
			fmt.Fprintf(out, "%s is in dry-run mode: lull decides and records, and takes no action.\n", w.Name)
		}
	}
}

func (c verbs) workerLicense() *cobra.Command {
	cmd := &cobra.Command{Use: "license WORKER", Short: "Manage a worker's CML license", Example: "  lull worker license cml-1", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Show the state of a worker's CML license. It is read from CML with the metrics while the
worker runs. Terminating a worker releases its license.`,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			l, err := control.Read[worker.License](cmd.Context(), cl, "/workers/"+w.ID+"/license")
			if err != nil {
				return err
			}
			return c.Print(l, func(out io.Writer) {
				fmt.Fprintf(out, "%s %s", w.Name, l.Status)
				switch {
				case l.Registration != "":
					fmt.Fprintf(out, " (%s)", strings.TrimSuffix(l.Registration+", "+l.Authorization, ", "))
				case l.Status == worker.LicenseUnknown:
					fmt.Fprint(out, " (not read from CML yet)")
				}
				if l.PendingOperation != "" {
					fmt.Fprintf(out, ", %s in progress", l.PendingOperation)
				}
				if l.LastError != "" {
					fmt.Fprintf(out, ": %s", l.LastError)
				}
				fmt.Fprintln(out)
			})
		}}
	var in control.LicenseRequest
	var file string
	var wait waiting
	register := &cobra.Command{Use: "register WORKER", Short: "Register a worker's CML license", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Register a worker's CML with Smart Licensing. The registration is complete when CML
reports it as completed and in compliance; --wait waits for that. A registered CML is
left unchanged unless --reregister is given.`,
		Example: "  lull worker license register cml-1 --smart-token-file /etc/lull/smart.token --wait",
		RunE: func(cmd *cobra.Command, a []string) error {
			if file != "" {
				in.Token = "file:" + file
			}
			return c.license(cmd, a[0], in, wait)
		}}
	wait.bind(register)
	register.Flags().StringVar(&in.Token, "smart-token", "", "registration token, or env:NAME on the server")
	register.Flags().StringVar(&file, "smart-token-file", "", "file on the server with the registration token")
	register.Flags().BoolVar(&in.Reregister, "reregister", false, "register again with a new token if already registered")
	deregister := &cobra.Command{Use: "deregister WORKER", Short: "Release a worker's CML license", Example: "  lull worker license deregister cml-1 --wait", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		RunE: func(cmd *cobra.Command, a []string) error { return c.license(cmd, a[0], nil, wait) }}
	wait.bind(deregister)
	cmd.AddCommand(register, deregister)
	return cmd
}

// licensed is the goal that a license operation has ended.
var licensed = goal{"complete its license change", func(w worker.Worker) (bool, error) {
	if w.License.PendingOperation != "" {
		return false, nil
	}
	if w.License.Status == worker.LicenseFailed || w.License.FailedOperation != "" {
		return false, fmt.Errorf("cannot complete the license change of %s: %s", w.Name, w.License.LastError)
	}
	return true, nil
}}

func (c verbs) license(cmd *cobra.Command, ref string, in any, wait waiting) error {
	cl, w, err := c.FindWorker(cmd.Context(), ref)
	if err != nil {
		return err
	}
	w, _, err = cl.Do(cmd.Context(), w.ID, "license", in)
	if err != nil {
		return err
	}
	if w.Status != power.WorkerRunning {
		fmt.Fprintf(c.Err, "lull: %s is %s; the license is changed when the worker runs\n", w.Name, w.Status)
	}
	return c.follow(cmd.Context(), cl, w, licensed, wait, func(w worker.Worker) error {
		return c.Print(w.License, func(out io.Writer) {
			if op := w.License.PendingOperation; op != "" {
				fmt.Fprintf(out, "The license of %s: %s in progress. Check it with: lull worker license %s\n", w.Name, op, w.Name)
				return
			}
			fmt.Fprintf(out, "The license of %s is %s.\n", w.Name, statusText(w.License.Status))
		})
	})
}
