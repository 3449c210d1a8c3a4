package main

import (
	"context"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"lull/cmd/agentcmd"
	"lull/internal/cli/admin"
	"lull/internal/cli/client"
	"lull/internal/cli/explain"
	"lull/internal/cli/hosts"
	"lull/internal/cli/instance"
	"lull/internal/cli/lease"
	"lull/internal/cli/policy"
	"lull/internal/cli/project"
	"lull/internal/cli/savings"
	"lull/internal/cli/status"
	"lull/internal/cli/term"
	"lull/internal/cli/topics"
	"lull/internal/cli/worker"
)

// version and buildDate are set by the linker; the date is RFC 3339.
var version, buildDate = "dev", ""

// cli is one run of the command line. Its methods are the verbs that run daemons or
// show a daemon's settings; the other verbs are in internal/cli.
type cli struct{ *client.Session }

// newCLI returns a command line with these streams and this environment.
func newCLI(in io.Reader, out, errw io.Writer, getenv func(string) string) *cli {
	return &cli{&client.Session{Term: term.Term{In: in, Out: out, Err: errw, Getenv: getenv}}}
}

// run runs the command line args and returns the exit code. It is the whole program
// except for the process around it.
func run(ctx context.Context, args []string, in io.Reader, out, errw io.Writer, getenv func(string) string) int {
	c := newCLI(in, out, errw, getenv)
	return c.Execute(ctx, c.root(), args)
}

func (c *cli) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "lull",
		Short: "Pause idle compute and resume it on demand",
		Long: `lull finds idle compute, pauses it safely, and resumes it the moment it is needed.

` + intro + `

Help on a topic: lull help states, signals, ports, exit-codes, environment or filters.`,
	}
	c.Prepare(root)
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
	add("instances", "Run programs, containers and microVMs "+where+":", instance.Commands(c.Session), project.Commands(c.Session), one(host, c.guestKernelCommand(), c.demoCommand()))
	add("hold", "Keep something running, or halt all automatic actions:",
		one(instance.Snooze(c.Session, worker.Protect(c.Session)), lease.Command(c.Session)), admin.Halt(c.Session))
	add("explain", "See what happens and why:", one(status.Command(c.Session)), explain.Commands(c.Session), savings.Commands(c.Session))
	add("fleet", "Manage a fleet of cloud machines:", one(c.serverCommand()), worker.Commands(c.Session), policy.Commands(c.Session))
	add("agent", "Machines that stop themselves:", one(c.agentCommand()))
	add("admin", "Administration:", admin.Commands(c.Session), one(c.configCommand(), c.doctorCommand(), c.simCommand(), c.VersionCommand(version), c.referenceCommand(), c.manCommand()))
	root.SetHelpCommand(topics.Command(&c.Term))
	root.SetHelpCommandGroupID("admin")
	root.SetCompletionCommandGroupID("admin")
	for _, path := range toldUnderHalt {
		cmd, _, err := root.Find(strings.Fields(path))
		if err != nil || cmd.RunE == nil || cmd.CommandPath() != "lull "+path {
			panic("unknown command " + path) // cannot happen: the paths are listed above
		}
		c.UnderHalt(cmd)
	}
	return root
}

// agentCommand returns lull agent: the daemon, and the verbs about it.
func (c *cli) agentCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "agent", Short: agentShort, Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(agentcmd.Commands(c.Session, agentcmd.Build{Version: version, Date: buildDate}, "lull")...)
	return cmd
}

// toldUnderHalt are the verbs that list or explain a fleet's automatic actions. Each
// first prints the halt, if there is one.
var toldUnderHalt = []string{
	"agent ls", "audit", "budget ls", "host get", "host ls", "host why", "notify dead", "notify ls", "override ls",
	"policy groups", "policy ls", "policy resolve", "savings", "schedule ls", "schedule next", "simulate",
	"template ls", "worker activity", "worker discovered", "worker get", "worker idle-status", "worker ls",
}

// configCommand returns lull config.
func (c *cli) configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config [FILE]", Short: "Show effective settings and their sources",
		Long: `Show the settings that a process would use with these flags and this environment,
and the source of each. With a FILE, such as lull.yaml or compose.yaml, show the
services that lull up makes of it. A fault is reported with its flag, variable or
line, and makes the exit code 2.`}
	project.Effective(c.Session, cmd)
	cmd.AddCommand(c.configHost(), agentcmd.Config(c.Session, "agent"), c.configServer())
	for _, sub := range cmd.Commands() {
		sub.Example = "  lull config " + sub.Name() + "\n  lull config " + sub.Name() + " --json"
	}
	return cmd
}
