// Lull-agent is lull agent alone, for machines that use nothing else of lull. It
// contains neither the server, nor the store, nor the runtimes.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"lull/cmd/agentcmd"
	"lull/internal/cli/client"
	"lull/internal/cli/setup"
	"lull/internal/cli/term"
)

// version and buildDate are set by the linker; the date is RFC 3339.
var version, buildDate = "dev", ""

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	c := &client.Session{Term: term.Term{In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv}}
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "agent" {
		args = args[1:] // for lull agent status, where lull is a link to this program
	}
	code := c.Execute(ctx, root(c), args)
	stop()
	os.Exit(code)
}

func root(c *client.Session) *cobra.Command {
	cmd := &cobra.Command{
		Use:   setup.Slim,
		Short: "Stop this machine when it is idle",
		Long: `Stop this machine when it is idle.

This program is lull agent alone. Its verbs are those of lull agent; "lull-agent
status" and "lull agent status" are the same. For everything else, install lull.`,
		Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.Prepare(cmd)
	cmd.AddCommand(agentcmd.Commands(c, agentcmd.Build{Version: version, Date: buildDate}, setup.Slim)...)
	cmd.AddCommand(agentcmd.Config(c, "config"), c.VersionCommand(version))
	return cmd
}
