package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/core/idle"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/protocol/control"
)

// fleetFlags are those of every verb that asks a server.
type fleetFlags struct {
	server string
	token  string
}

func (f *fleetFlags) bind(flags *pflag.FlagSet) {
	flags.StringVar(&f.server, "server", "", "server URL (default $LULL_SERVER, then http://127.0.0.1:7070)")
	flags.StringVar(&f.token, "token", "", "server token (default $LULL_TOKEN, which process listings do not show)")
}

// serverURL is where the server is.
func (c *cli) serverURL() string {
	return cmp.Or(c.server, c.getenv("LULL_SERVER"), "http://127.0.0.1:7070")
}

// control finds the server.
func (c *cli) control() (*control.Client, error) {
	where := c.serverURL()
	token := c.token
	if token == "" {
		token = c.getenv("LULL_TOKEN")
	}
	if token == "" {
		var err error
		if token, err = c.loggedIn(where); err != nil {
			return nil, err
		}
	}
	return control.NewClient(where, token, nil)
}

// asksServer reports whether a verb that a host and a server both have is meant
// for the server: --server is given, or only LULL_SERVER is set (spec,
// section 9).
func (c *cli) asksServer() bool {
	return c.server != "" || c.getenv("LULL_SERVER") != "" && c.host == "" && c.getenv("LULL_HOST") == ""
}

// orServer gives a verb of the host its meaning for a server.
func (c *cli) orServer(cmd *cobra.Command, ask func(cmd *cobra.Command, a []string) error) *cobra.Command {
	host := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		if c.asksServer() {
			return ask(cmd, a)
		}
		err := host(cmd, a)
		if len(a) == 0 || err == nil || exitCode(err) != exitNotFound || c.getenv("LULL_SERVER") == "" {
			return err
		}
		// A name that the host does not know may be one of the server's.
		if err = ask(cmd, a); err != nil {
			err = fmt.Errorf("%w; checked the host (%s) and the server (%s)", err, c.hostAddress(), c.serverURL())
		}
		return err
	}
	complete := cmd.ValidArgsFunction
	if complete != nil {
		cmd.ValidArgsFunction = func(cmd *cobra.Command, a []string, to string) ([]string, cobra.ShellCompDirective) {
			if c.asksServer() {
				return c.completeWorkers(cmd, a, to)
			}
			return complete(cmd, a, to)
		}
	}
	return cmd
}

func (c *cli) completeWorkers(cmd *cobra.Command, a []string, to string) ([]string, cobra.ShellCompDirective) {
	if len(a) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	cl, err := c.control()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	q := url.Values{"sort": {"name"}, "limit": {"500"}, "q": {to}} // as many as anybody reads
	l, err := control.Read[control.List[fleet.Worker]](cmd.Context(), cl, "/workers?"+q.Encode())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names := make([]string, 0, len(l.Items))
	for _, w := range l.Items {
		names = append(names, w.Name+"\t"+string(w.Status))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// rows prints rows under a header.
func rows(w io.Writer, header string, each func(row func(format string, a ...any))) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, header)
	each(func(format string, a ...any) { fmt.Fprintf(t, format+"\n", a...) })
	t.Flush()
}

func moment0(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "-"
	}
	return t.Local().Format(time.DateTime)
}

// workerWhy is lull why for a worker.
func (c *cli) workerWhy(cmd *cobra.Command, a []string) error {
	at, err := atTime(cmd)
	if err != nil {
		return err
	}
	cl, err := c.control()
	if err != nil {
		return err
	}
	w, err := cl.Known(cmd.Context(), a[0])
	if err != nil {
		return err
	}
	y, err := cl.Why(cmd.Context(), w.ID, at)
	if err != nil {
		return err
	}
	c.tellHalt(cmd.Context())
	return c.print(y, func(w io.Writer) {
		if at.IsZero() && y.Readings == "unknown" {
			fmt.Fprintln(w, "Live readings are not available: the server that observes it did not answer. Shown from its record.")
		}
		accountText(w, y.Account, at)
		now, then := y.Policy, y.PolicyThen
		if then != nil {
			fmt.Fprintf(w, "\npolicy then: %s\n", policyThen(then))
		} else if c := y.Checked; now == nil && c != nil {
			fmt.Fprintf(w, "\npolicy then: unknown, no check was recorded at that time; the last one was at %s\n", clockTime(c.At))
		} else if now == nil {
			fmt.Fprintln(w, "\npolicy then: unknown, no check was recorded at or before that time")
		}
		if now != nil {
			fmt.Fprintf(w, "\npolicy %s (%s)\n", now.Name, now.From["idle_timeout"])
			rulesText(w, *now)
			if y.ActivitySourcesReason != "" {
				fmt.Fprintf(w, "sources: %s\n", y.ActivitySourcesReason)
			}
		}
		if len(y.Last) > 0 {
			fmt.Fprintln(w)
			entryTable(w, y.Last)
		}
	})
}

// policyThen describes the policy of a recorded check.
func policyThen(p *idle.Policy) string {
	text := fmt.Sprintf("%s, idle after %s", dash(p.Name), span(time.Duration(p.Timeout)))
	if p.Action != "" {
		text += ", then " + p.Action
	}
	if b := p.WarnsBefore(); b > 0 {
		text += fmt.Sprintf("; warned %s before", span(b))
	}
	if p.Snooze > 0 {
		text += fmt.Sprintf("; protected for %s after a resume", span(time.Duration(p.Snooze)))
	}
	if !p.Detection || !p.AutoPause {
		text += "; pausing was disabled"
	}
	return text
}

func entryTable(w io.Writer, l []audit.Entry) {
	rows(w, "TIME\tACTION\tWORKER\tBY\tREASON", func(row func(string, ...any)) {
		for _, e := range l {
			row("%s", entryLine(e))
		}
	})
}

func entryLine(e audit.Entry) string {
	what := e.Action
	if e.To != "" && e.From != e.To {
		what += " " + string(e.From) + ">" + string(e.To)
	}
	why := strings.TrimSpace(e.Reason + " " + e.Detail)
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%s", e.At.Local().Format(time.DateTime), what, dash(e.WorkerName), e.By.Name, why)
}

// fleetEvents is lull events for a server.
func (c *cli) fleetEvents(cmd *cobra.Command, _ []string) error {
	follow, err := cmd.Flags().GetBool("follow")
	if err != nil {
		return fmt.Errorf("cannot tell whether to follow: %w", err)
	}
	since, err := cmd.Flags().GetString("since")
	if err != nil {
		return fmt.Errorf("cannot tell from when on: %w", err)
	}
	q, most := audit.Query{}, 50
	if since != "" {
		if q.From, _, err = period(time.Now(), since, ""); err != nil {
			return err
		}
		most = maxEntries
	}
	cl, err := c.control()
	if err != nil {
		return err
	}
	return c.entries(cmd.Context(), cl, q, most, follow)
}

// entries shows the newest n audit entries that q selects and, if asked to,
// those that come.
func (c *cli) entries(ctx context.Context, cl *control.Client, which audit.Query, n int, follow bool) error {
	q := control.AuditValues(which)
	q.Set("newest", "true")
	past := func() ([]audit.Entry, error) {
		out := []audit.Entry{}
		for {
			// A page in which little is selected is short, and has a next.
			q.Set("limit", strconv.Itoa(n-len(out)))
			l, err := control.Read[control.List[audit.Entry]](ctx, cl, "/audit?"+q.Encode())
			if err != nil {
				return nil, err
			}
			out = append(out, l.Items...)
			if q.Set("after", l.Next); l.Next == "" || len(out) >= n {
				slices.Reverse(out)
				return out, nil
			}
		}
	}
	if !follow {
		l, err := past()
		if err != nil {
			return err
		}
		if len(l) == 0 && !c.json {
			fmt.Fprintln(c.err, "no entries")
		}
		return c.print(l, func(w io.Writer) {
			for _, e := range l {
				fmt.Fprintln(w, entryText(e))
			}
		})
	}
	show := c.entryPrinter()
	seen, shown := int64(0), false
	var broken error
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err := cl.Follow(ctx, control.Events{WorkerID: which.WorkerID,
		// The stream has begun when the past is read, so that nothing
		// falls between them; what both have is shown once.
		Started: func() {
			if !shown {
				shown = true
				var l []audit.Entry
				l, broken = past()
				for _, e := range l {
					seen = max(seen, e.ID)
					broken = errors.Join(broken, show(e))
				}
				if broken != nil {
					cancel()
				}
			}
		},
		Each: func(e audit.Entry) error {
			if e.ID <= seen || !which.Takes(&e) {
				return nil
			}
			return show(e)
		},
		Reset: func(why string) error {
			fmt.Fprintln(c.err, "lull: events may be missing here:", why)
			return nil
		}})
	return errors.Join(broken, err)
}
