//go:build !linux || portable

package main

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/term"
)

// Help texts that differ between platforms.
const (
	intro = `This is the command line alone. It manages a fleet through lull server, and instances
through the socket of a lull host on Linux, such as one that ssh -L forwards.`
	where      = "on a Linux host"
	agentShort = "Show and control the agents of Linux machines"
)

// hostCommand returns a command with the verbs that need a server, so that help lists
// it.
func (c *cli) hostCommand() *cobra.Command {
	cmd := term.OnlyLinux("host", "")
	cmd.Short, cmd.Hidden, cmd.DisableFlagParsing = "Show the hosts that report to a server", false, false
	cmd.FParseErrWhitelist.UnknownFlags = true // accept the daemon's flags, which only Linux has
	return cmd
}

func (c *cli) doctorCommand() *cobra.Command {
	return term.OnlyLinux("doctor", "Check this machine for missing prerequisites")
}

func (c *cli) guestKernelCommand() *cobra.Command {
	return term.OnlyLinux("guest-kernel", "Download a kernel for microVMs")
}

func (c *cli) demoCommand() *cobra.Command {
	return term.OnlyLinux("demo", "Show programs that fall asleep and wake, and a fleet")
}

func (c *cli) referenceCommand() *cobra.Command {
	return term.OnlyLinux("reference", "Write the generated reference pages")
}
