package agent

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/explain"
	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
)

func (c verbs) agentLease() *cobra.Command {
	cmd := &cobra.Command{Use: "lease", Short: "Keep this machine running while programs need it", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.agentLeaseHold(), c.agentLeaseRelease(), c.agentLeaseList())
	return cmd
}

func (c verbs) agentLeaseHold() *cobra.Command {
	var r agentctl.LeaseRequest
	var until string
	var dur time.Duration
	cmd := c.OnAgent(&cobra.Command{Use: "hold", Short: "Take or renew a lease", Args: term.Args(cobra.NoArgs),
		Long: `Take or renew a lease. While a lease is held, this machine is not stopped for
idleness or a completion, only by its TTL. A lease lasts 10 minutes unless --for or
--until is given, at most a day. Leases survive a restart of the agent.`,
		Example: "  lull agent lease hold --holder training --reason \"epoch 3\" --for 1h\n  lull agent lease hold --until 18:00"},
		func(cmd *cobra.Command, _ []string, cl *agentctl.Client) error {
			ttl, err := term.EndOr(time.Now(), until, dur, 10*time.Minute)
			if err != nil {
				return err
			}
			r.TTL = idle.Duration(ttl)
			l, err := cl.HoldLease(cmd.Context(), r)
			if err != nil {
				return err
			}
			s, err := cl.Status(cmd.Context())
			return c.Print(l, func(w io.Writer) {
				if err != nil {
					fmt.Fprintf(w, "%s holds a lease until %s\n", l.Holder, term.Time(l.ExpiresAt))
					return
				}
				fmt.Fprintln(w, holdText(time.Now(), l.Holder+" holds this machine", l.ExpiresAt, s))
			})
		})
	cmd.Flags().StringVar(&r.Holder, "holder", "default", "holder of the lease; each holder has its own")
	cmd.Flags().StringVar(&r.Reason, "reason", "", "reason, shown by status and why")
	term.BindEnd(cmd.Flags(), &until, &dur)
	return cmd
}

func (c verbs) agentLeaseRelease() *cobra.Command {
	var holder string
	cmd := c.OnAgent(&cobra.Command{Use: "release", Short: "Release a lease", Example: "  lull agent lease release", Args: term.Args(cobra.NoArgs)},
		func(cmd *cobra.Command, _ []string, cl *agentctl.Client) error {
			if err := cl.ReleaseLease(cmd.Context(), holder); err != nil {
				return err
			}
			l, err := cl.Leases(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) { fmt.Fprintf(w, "%s holds no lease\n", holder) })
		})
	cmd.Flags().StringVar(&holder, "holder", "default", "holder of the lease")
	return cmd
}

func (c verbs) agentLeaseList() *cobra.Command {
	return c.OnAgent(&cobra.Command{Use: "ls", Short: "List leases", Example: "  lull agent lease ls", Args: term.Args(cobra.NoArgs)},
		func(cmd *cobra.Command, _ []string, cl *agentctl.Client) error {
			l, err := cl.Leases(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) { explain.Leases(w, l) })
		})
}
