//go:build linux && !portable

package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/demo"
	"lull/internal/cli/term"
)

// demoCommand returns the verb lull demo.
func (c *cli) demoCommand() *cobra.Command {
	var serve, visit string
	var length time.Duration
	cmd := &cobra.Command{Use: "demo", Short: "Show programs that fall asleep and wake, and a fleet", Args: term.Args(cobra.NoArgs),
		Long: `Run programs of this machine that fall asleep and wake on connections, beside a server
that watches a simulated fleet, and print what to try. It needs nothing but this program:
Redis, PostgreSQL and a microVM are shown where they are installed; a program that is left out
is listed with the reason. Nothing outside a temporary directory is changed. Ctrl-C ends
the demo and removes everything.`,
		Example: "  lull demo\n  lull demo --for 2m\n  lull demo --serve 127.0.0.1:8080",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if serve != "" {
				return demo.Serve(cmd.Context(), serve)
			}
			if visit != "" {
				said, err := demo.Visit(cmd.Context(), visit)
				if err == nil {
					fmt.Fprintln(c.Out, said)
				}
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("cannot find this program's own file: %w", err)
			}
			o := demo.Options{Term: c.Term, Program: self, For: length}
			if cfg, _, err := resolve(c.Getenv, "", cmd.Flags()); err == nil {
				o.Kernel, _ = findKernel(cfg) // the demo reports that there is none
			}
			// The demo's programs must end even if the terminal is closed or the
			// output's reader ends.
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP)
			defer stop()
			signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
			return demo.Show(ctx, o)
		}}
	term.BindSpan(cmd.Flags(), &length, "for", 0, "end after this time; 0 waits for Ctrl-C")
	cmd.Flags().StringVar(&serve, "serve", "", "only serve the demo's web page, on this address")
	cmd.Flags().StringVar(&visit, "visit", "", "only be a client of the web server at this address")
	cmd.MarkFlagsMutuallyExclusive("serve", "visit", "for")
	return cmd
}
