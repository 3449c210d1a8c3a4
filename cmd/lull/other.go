//go:build !linux

package main

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/term"
)

// buildDate is set by the linker.
var buildDate = ""

func (c *cli) hostCommand() *cobra.Command {
	return term.OnlyLinux("host", "Run and manage instances on this machine")
}

func (c *cli) doctorCommand() *cobra.Command {
	return term.OnlyLinux("doctor", "Check this machine for missing prerequisites")
}

func (c *cli) guestKernelCommand() *cobra.Command {
	return term.OnlyLinux("guest-kernel", "Download a kernel for microVMs")
}

func (c *cli) configAgent() *cobra.Command {
	return term.OnlyLinux("agent", "Show the settings of lull agent run")
}

func (c *cli) agentRun() *cobra.Command {
	return term.OnlyLinux("run", "Stop this machine when it is idle")
}

func (c *cli) agentDoctor() *cobra.Command {
	return term.OnlyLinux("doctor", "Check this machine for what the agent needs")
}

func (c *cli) referenceCommand() *cobra.Command {
	cmd := term.OnlyLinux("reference", "Write the generated reference pages")
	cmd.Hidden = true
	return cmd
}
