package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/admin"
	"lull/internal/cli/agent"
	"lull/internal/cli/client"
	"lull/internal/cli/explain"
	"lull/internal/cli/hosts"
	"lull/internal/cli/instance"
	"lull/internal/cli/lease"
	"lull/internal/cli/policy"
	"lull/internal/cli/savings"
	"lull/internal/cli/setup"
	"lull/internal/cli/term"
	"lull/internal/cli/worker"
)

// version is set by the linker.
var version = "dev"

// cli is one run of the command line. Its methods are the verbs that are daemons
// or read the settings of one; the others are below internal/cli.
type cli struct{ *client.Session }

// newCLI returns a command line with these streams and environment.
func newCLI(in io.Reader, out, errw io.Writer, getenv func(string) string) *cli {
	return &cli{&client.Session{Term: term.Term{In: in, Out: out, Err: errw, Getenv: getenv}}}
}

// run is the whole program but for the process around it.
func run(ctx context.Context, args []string, in io.Reader, out, errw io.Writer, getenv func(string) string) int {
	c := newCLI(in, out, errw, getenv)
	root := c.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return term.ExitDone
	}
	if exit, ok := errors.AsType[*term.ExitError](err); ok {
		return exit.Code
	}
	c.Complain(err)
	return term.ExitCode(err)
}

func (c *cli) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "lull",
		Short: "Pause idle compute and resume it on demand",
		Long: `lull finds idle compute, pauses it safely, and resumes it the moment it is needed.

To run instances on this machine, start lull host, then use lull run.`,
		SilenceErrors: true, SilenceUsage: true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return c.CheckOutput() },
	}
	root.SetOut(c.Out)
	root.SetErr(c.Err)
	root.SetIn(c.In)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return term.Usage(fmt.Errorf("%w; see: %s --help", err, cmd.CommandPath()))
	})
	c.Bind(root.PersistentFlags())
	host := c.hostCommand()
	host.AddCommand(hosts.Commands(c.Session)...)
	add := func(id, title string, commands ...[]*cobra.Command) {
		root.AddGroup(&cobra.Group{ID: id, Title: title})
		for _, cmd := range slices.Concat(commands...) {
			cmd.GroupID = id
			root.AddCommand(cmd)
		}
	}
	one := func(commands ...*cobra.Command) []*cobra.Command { return commands }
	add("instances", "Run programs, containers and microVMs on this machine:", instance.Commands(c.Session), one(host, c.guestKernelCommand()))
	add("hold", "Keep something running, and stop everything automatic:",
		one(instance.Snooze(c.Session, worker.Protect(c.Session)), lease.Command(c.Session)), admin.Halt(c.Session))
	add("explain", "See what happens and why:", explain.Commands(c.Session), savings.Commands(c.Session))
	add("fleet", "Manage a fleet of cloud machines:", one(c.serverCommand()), worker.Commands(c.Session), policy.Commands(c.Session))
	add("agent", "Stop the machine that it runs on:", one(c.agentCommand()))
	add("admin", "Administration:", admin.Commands(c.Session), one(c.configCommand(), c.doctorCommand(), c.simCommand(), c.versionCommand(), c.referenceCommand()))
	root.SetHelpCommandGroupID("admin")
	root.SetCompletionCommandGroupID("admin")
	for _, path := range toldUnderHalt {
		cmd, _, err := root.Find(strings.Fields(path))
		if err != nil || cmd.RunE == nil || cmd.CommandPath() != "lull "+path {
			panic("unknown command " + path) // of this program's own list
		}
		c.UnderHalt(cmd)
	}
	return root
}

// agentCommand is lull agent: the daemon, and the verbs about it.
func (c *cli) agentCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "agent", Short: "Stop this machine when it is idle", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.agentRun(), c.agentDoctor(), admin.AgentHalt(c.Session))
	cmd.AddCommand(agent.Commands(c.Session)...)
	cmd.AddCommand(setup.Commands(c.Session)...)
	return cmd
}

// toldUnderHalt are the verbs that list or explain what a fleet is or does by
// itself: each says first that everything automatic is halted.
var toldUnderHalt = []string{
	"agent ls", "audit", "budget ls", "host get", "host ls", "host why", "notify dead", "notify ls", "override ls",
	"policy groups", "policy ls", "policy resolve", "savings", "schedule ls", "schedule next", "simulate",
	"template ls", "worker activity", "worker discovered", "worker get", "worker idle-status", "worker ls",
}

func (c *cli) versionCommand() *cobra.Command {
	return &cobra.Command{Use: "version", Short: "Print the version", Args: term.Args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			return c.Print(map[string]string{"version": version}, func(w io.Writer) { fmt.Fprintln(w, "lull", version) })
		}}
}
