//go:build !linux

package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
)

// buildDate is set by the linker.
var buildDate = ""

// onlyLinux stands for a verb that needs a Linux machine.
func onlyLinux(use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short + " (Linux only)", DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fmt.Errorf("cannot run %s on %s: it needs Linux; commands that use a remote server or host work here", cmd.CommandPath(), runtime.GOOS)
		}}
}

func (c *cli) hostCommand() *cobra.Command {
	return onlyLinux("host", "Run and manage instances on this machine")
}

func (c *cli) doctorCommand() *cobra.Command {
	return onlyLinux("doctor", "Check this machine for missing prerequisites")
}

func (c *cli) guestKernelCommand() *cobra.Command {
	return onlyLinux("guest-kernel", "Download a kernel for microVMs")
}

func (c *cli) configAgent() *cobra.Command {
	return onlyLinux("agent", "Show the settings of lull agent run")
}

func (c *cli) agentRun() *cobra.Command {
	return onlyLinux("run", "Stop this machine when it is idle")
}

func (c *cli) agentDoctor() *cobra.Command {
	return onlyLinux("doctor", "Check this machine for what the agent needs")
}

func (c *cli) agentInstall() *cobra.Command {
	return onlyLinux("install", "Install the agent on this machine")
}

func (c *cli) agentEnroll() *cobra.Command {
	return onlyLinux("enroll", "Connect this machine's agent to a server")
}

func (c *cli) agentUninstall() *cobra.Command {
	return onlyLinux("uninstall", "Uninstall the agent from this machine")
}

func (c *cli) referenceCommand() *cobra.Command {
	cmd := onlyLinux("reference", "Write the generated reference pages")
	cmd.Hidden = true
	return cmd
}
