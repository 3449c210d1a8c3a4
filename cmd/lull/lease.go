package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/idle"
	"lull/internal/link/hostctl"
)

func (c *cli) leaseCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "lease", Short: "Hold an instance awake for a while", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.leaseHold(), c.leaseRelease(), c.leaseList())
	return cmd
}

func leases(w io.Writer, l []idle.Lease) {
	if len(l) == 0 {
		fmt.Fprintln(w, "no lease is held")
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "HOLDER\tFOR ANOTHER\tREASON")
	for _, x := range l {
		fmt.Fprintf(t, "%s\t%s\t%s\n", x.Holder, span(max(time.Until(x.ExpiresAt), 0)), dash(x.Reason))
	}
	t.Flush()
}

func (c *cli) leaseHold() *cobra.Command {
	var holder, reason, until string
	var dur time.Duration
	cmd := &cobra.Command{
		Use:   "hold NAME [-- COMMAND [ARG...]]",
		Short: "Take or renew a lease; with a command, for as long as it runs",
		Long: `Take or renew a lease: while anybody holds one the instance is not paused. Each
holder has its own, with a reason and an end that why shows, and releases no
other's. It lasts 5 minutes unless --for or --until says otherwise, and at most a
day. With a command it is renewed while that runs and dropped when it ends, and
the command's exit code is this one's.`,
		Example: "  lull lease hold web --holder deploy --reason \"new version\" --for 10m\n  lull lease hold web --until 18:00\n  lull lease hold web --holder backup -- tar cf web.tar web",
		Args:    args(cobra.MinimumNArgs(1)), ValidArgsFunction: c.complete,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			ttl, err := endOr(time.Now(), until, dur, 5*time.Minute)
			if err != nil {
				return err
			}
			r := hostctl.LeaseRequest{Holder: holder, Reason: reason, TTL: idle.Duration(ttl)}
			if len(a) > 1 {
				if until != "" {
					return &usageError{errors.New("cannot hold it until a time and for a command: the lease of a command lasts as long as it runs")}
				}
				return c.holdWhile(cmd.Context(), cl, a[0], r, a[1:])
			}
			l, err := cl.Hold(cmd.Context(), a[0], r)
			if err != nil {
				return err
			}
			return c.print(l, func(w io.Writer) { leases(w, l) })
		},
	}
	cmd.Flags().StringVar(&holder, "holder", "default", "who holds it")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for whoever asks")
	bindEnd(cmd.Flags(), &until, &dur)
	return cmd
}

// holdWhile runs a command under a lease that is renewed at a third of its
// time and dropped afterwards. The command's exit code is this one's.
func (c *cli) holdWhile(ctx context.Context, cl *hostctl.Client, name string, r hostctl.LeaseRequest, command []string) error {
	if _, err := cl.Hold(ctx, name, r); err != nil {
		return err
	}
	p := exec.Command(command[0], command[1:]...)
	p.Stdin, p.Stdout, p.Stderr = c.in, c.out, c.err
	sigs := make(chan os.Signal, 4)
	signal.Notify(sigs, os.Interrupt, syscall.SIGTERM) // the command gets them; the lease is dropped when it ends
	defer signal.Stop(sigs)
	if err := p.Start(); err != nil {
		return errors.Join(fmt.Errorf("cannot run %s: %w", command[0], err), c.drop(cl, name, r.Holder))
	}
	done := make(chan error, 1)
	go func() { done <- p.Wait() }()
	renew := time.NewTicker(max(time.Duration(r.TTL)/3, time.Second))
	defer renew.Stop()
	for {
		select {
		case s := <-sigs:
			if s == syscall.SIGTERM {
				p.Process.Signal(s)
			}
		case <-renew.C:
			rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			if _, err := cl.Hold(rctx, name, r); err != nil {
				fmt.Fprintln(c.err, "lull: the lease could not be renewed:", err)
			}
			cancel()
		case err := <-done:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return errors.Join(err, c.drop(cl, name, r.Holder))
			}
			if derr := c.drop(cl, name, r.Holder); derr != nil {
				fmt.Fprintln(c.err, "lull:", derr)
			}
			if exit != nil {
				return &exitError{max(exit.ExitCode(), 1)}
			}
			return nil
		}
	}
}

func (c *cli) drop(cl *hostctl.Client, name, holder string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := cl.Release(ctx, name, holder)
	return err
}

func (c *cli) leaseRelease() *cobra.Command {
	var holder string
	cmd := &cobra.Command{Use: "release NAME", Short: "Drop a lease", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.complete,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			l, err := cl.Release(cmd.Context(), a[0], holder)
			if err != nil {
				return err
			}
			return c.print(l, func(w io.Writer) { leases(w, l) })
		}}
	cmd.Flags().StringVar(&holder, "holder", "default", "whose")
	return cmd
}

func (c *cli) leaseList() *cobra.Command {
	return &cobra.Command{Use: "ls NAME", Short: "List who holds an instance", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.complete,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			o, err := cl.Get(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			return c.print(o.Leases, func(w io.Writer) { leases(w, o.Leases) })
		}}
}
