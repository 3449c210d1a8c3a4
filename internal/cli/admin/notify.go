package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/fleet/channel"
	"lull/internal/protocol/control"
)

func (c verbs) notifyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "notify", Short: "Manage notification channels and dead letters", Args: term.Args(cobra.NoArgs),
		Long: `Manage notification channels and the events that could not be delivered (dead
letters). Channels are defined by the setting notify_channels; see docs/operations.md.`,
		Example: `  lull settings set notify_channels='{"ops":{"type":"webhook","url":"https://example.com"}}'
  lull notify test ops`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.notifyLs(), c.notifyTest(), c.notifyDead(), c.notifyRetry(), c.notifyDrop())
	return cmd
}

func (c verbs) channels(ctx context.Context) (*control.Client, []channel.Delivery, error) {
	cl, err := c.ServerClient()
	if err != nil {
		return nil, nil, err
	}
	l, err := control.All[channel.Delivery](ctx, cl, "/api/v1/notifications/channels", nil)
	return cl, l, err
}

func (c verbs) letters(ctx context.Context) (*control.Client, []channel.DeadLetter, error) {
	cl, err := c.ServerClient()
	if err != nil {
		return nil, nil, err
	}
	l, err := control.All[channel.DeadLetter](ctx, cl, "/api/v1/notifications/dead", nil)
	return cl, l, err
}

func (c verbs) notifyLs() *cobra.Command {
	return &cobra.Command{Use: "ls", Short: "List notification channels and their status", Example: "  lull notify ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, l, err := c.channels(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				term.Rows(w, "CHANNEL\tTYPE\tPENDING\t2:DELIVERED\t1:LAST\tDEAD\t3:FAILING SINCE\t4:ERROR", func(row func(string, ...any)) {
					for _, d := range l {
						row("%s\t%s\t%d\t%d\t%s\t%d\t%s\t%s", d.Channel, d.Type, d.Pending, d.Delivered, term.OptionalTime(d.LastDeliveredAt), d.Dead, term.OptionalTime(d.FailingSince), term.Dash(d.LastError))
					}
				})
			})
		}}
}

func (c verbs) notifyTest() *cobra.Command {
	return &cobra.Command{Use: "test CHANNEL", Short: "Send a test notification to a channel", Args: term.Args(cobra.ExactArgs(1)), Example: "  lull notify test ops",
		ValidArgsFunction: func(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
			_, l, err := c.channels(cmd.Context())
			if err != nil || len(a) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			var out []string
			for _, d := range l {
				out = append(out, d.Channel+"\t"+d.Type)
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			if _, err := cl.Call(cmd.Context(), "POST", "/api/v1/notifications/channels/"+url.PathEscape(a[0])+"/test", nil, nil); err != nil {
				return err
			}
			return c.Print(map[string]any{"channel": a[0], "delivered": true}, func(w io.Writer) { fmt.Fprintf(w, "%s accepted the test\n", a[0]) })
		}}
}

func (c verbs) notifyDead() *cobra.Command {
	return &cobra.Command{Use: "dead", Short: "List dead letters", Example: "  lull notify dead", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, l, err := c.letters(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				term.Rows(w, "LETTER\tEVENT\t4:WORKER\t2:HAPPENED\t1:TO\tTRIES\t3:ERROR", func(row func(string, ...any)) {
					for _, d := range l {
						row("%s/%s\t%s\t%s\t%s\t%s\t%d\t%s", d.Channel, d.ID, d.Event, term.Dash(d.Entry.WorkerName), term.OptionalTime(&d.Entry.At), term.Dash(d.To), d.Tries, d.Error)
					}
				})
			})
		}}
}

func (c verbs) notifyRetry() *cobra.Command {
	return c.eachLetter("retry", "Retry dead letters", func(ctx context.Context, cl *control.Client, path string) error {
		_, err := cl.Call(ctx, "POST", path+"/retry", nil, nil)
		return err
	}, "is queued for delivery")
}

func (c verbs) notifyDrop() *cobra.Command {
	return c.eachLetter("drop", "Delete dead letters permanently", func(ctx context.Context, cl *control.Client, path string) error {
		_, err := cl.Call(ctx, "DELETE", path, nil, nil)
		return err
	}, "is deleted")
}

// eachLetter returns a verb that calls do for the named dead letters, or for all of
// them.
func (c verbs) eachLetter(verb, short string, do func(context.Context, *control.Client, string) error, done string) *cobra.Command {
	var all bool
	cmd := &cobra.Command{Use: verb + " {CHANNEL/ID... | --all}", Short: short, Args: term.Args(cobra.ArbitraryArgs), Example: "  lull notify " + verb + " --all",
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			_, l, err := c.letters(cmd.Context())
			var out []string
			for _, d := range l {
				out = append(out, d.Channel+"/"+d.ID+"\t"+d.Event+" of "+d.Entry.WorkerName)
			}
			if err != nil {
				return nil, cobra.ShellCompDirectiveError
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			if all == (len(a) > 0) {
				return term.Usage(errors.New("no dead letter selected: give IDs from lull notify dead, or --all"))
			}
			cl, l, err := c.letters(cmd.Context())
			if err != nil {
				return err
			}
			if all {
				for _, d := range l {
					a = append(a, d.Channel+"/"+d.ID)
				}
			}
			for _, name := range a {
				channel, id, ok := strings.Cut(name, "/")
				if !ok {
					return term.Usage(fmt.Errorf("cannot read %q: want CHANNEL/ID", name))
				}
				if err := do(cmd.Context(), cl, "/api/v1/notifications/dead/"+url.PathEscape(channel)+"/"+url.PathEscape(id)); err != nil {
					return err
				}
			}
			if a == nil {
				a = []string{}
			}
			return c.Print(a, func(w io.Writer) {
				for _, name := range a {
					fmt.Fprintln(w, name, done)
				}
			})
		}}
	cmd.Flags().BoolVar(&all, "all", false, "all dead letters")
	return cmd
}
