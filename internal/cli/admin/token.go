package admin

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/protocol/control"
)

func (c verbs) tokenCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "token", Short: "Create, list and revoke tokens of the server", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.tokenCreate(), c.tokenLs(), c.tokenRevoke())
	return cmd
}

func (c verbs) tokenCreate() *cobra.Command {
	var in control.NewToken
	var until string
	var dur time.Duration
	cmd := &cobra.Command{Use: "create NAME", Short: "Create a token, which is shown once", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Create a token, which is shown once. A viewer reads; an operator pauses, resumes and
halts; an admin changes settings and creates tokens. An agent's or host's token only
reports, for its --machine. A token is valid until it is revoked, or until --for or
--until.`,
		Example: "  lull token create ci --role operator --for 30d\n  lull token create audit --until 2027-01-01\n  lull token create ws-1 --role agent --machine ws-1",
		RunE: func(cmd *cobra.Command, a []string) error {
			ttl, err := term.EndOr(time.Now(), until, dur, 0)
			if err != nil {
				return err
			}
			in.Name, in.TTLSeconds = a[0], int64(math.Ceil(ttl.Seconds()))
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			t, err := control.Write[control.Token](cmd.Context(), cl, "POST", "/tokens", in)
			if err != nil {
				return err
			}
			end := ""
			if t.ExpiresAt != nil {
				end = ", until " + term.Time(*t.ExpiresAt)
			}
			return c.Print(t, func(w io.Writer) {
				fmt.Fprintf(w, "%s (%s, %s%s, shown once): %s\n", t.Name, t.ID, t.Role, end, t.Secret)
			})
		}}
	cmd.Flags().StringVar(&in.Role, "role", "viewer", "role: viewer, operator, admin, agent or host")
	cmd.Flags().StringVar(&in.Machine, "machine", "", "machine that an agent's or host's token is bound to")
	term.BindEnd(cmd.Flags(), &until, &dur)
	return cmd
}

func (c verbs) tokenLs() *cobra.Command {
	return &cobra.Command{Use: "ls", Short: "List tokens", Example: "  lull token ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := c.tokens(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				term.Rows(w, "ID\tNAME\tROLE\t2:MACHINE\t1:CREATED\t3:BY\t4:EXPIRES\t5:REVOKED", func(row func(string, ...any)) {
					for _, t := range l {
						row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", t.ID, t.Name, t.Role, term.Dash(t.Machine), term.OptionalTime(&t.CreatedAt), t.CreatedBy, term.OptionalTime(t.ExpiresAt), term.OptionalTime(t.RevokedAt))
					}
				})
			})
		}}
}

func (c verbs) tokens(ctx context.Context) ([]control.Token, error) {
	cl, err := c.ServerClient()
	if err != nil {
		return nil, err
	}
	return control.All[control.Token](ctx, cl, "/api/v1/tokens", nil)
}

func (c verbs) tokenRevoke() *cobra.Command {
	return &cobra.Command{Use: "revoke ID", Short: "Revoke a token permanently", Example: "  lull token revoke ci", Args: term.Args(cobra.ExactArgs(1)),
		ValidArgsFunction: func(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
			l, err := c.tokens(cmd.Context())
			if err != nil || len(a) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			var out []string
			for _, t := range l {
				if t.RevokedAt == nil {
					out = append(out, t.ID+"\t"+t.Name)
				}
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			t, err := control.Write[control.Token](cmd.Context(), cl, "DELETE", "/tokens/"+url.PathEscape(a[0]), nil)
			if err != nil {
				return err
			}
			return c.Print(t, func(w io.Writer) { fmt.Fprintf(w, "%s (%s) revoked\n", t.Name, t.ID) })
		}}
}
