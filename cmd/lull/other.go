//go:build !linux

package main

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/term"
)

func (c *cli) hostCommand() *cobra.Command {
	return term.OnlyLinux("host", "Run and manage instances on this machine")
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
	cmd := term.OnlyLinux("reference", "Write the generated reference pages")
	cmd.Hidden = true
	return cmd
}
