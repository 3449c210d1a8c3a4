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
			return fmt.Errorf("cannot run %s on %s: it needs Linux; the verbs that ask a server or a host elsewhere work here", cmd.CommandPath(), runtime.GOOS)
		}}
}

func (c *cli) hostCommand() *cobra.Command {
	return onlyLinux("host", "Run instances on this machine")
}

func (c *cli) doctorCommand() *cobra.Command {
	return onlyLinux("doctor", "Say what this machine lacks for running instances")
}

func (c *cli) guestKernelCommand() *cobra.Command {
	return onlyLinux("guest-kernel", "Fetch a kernel for microVMs")
}

func (c *cli) configAgent() *cobra.Command {
	return onlyLinux("agent", "The agent's settings")
}

func (c *cli) agentRun() *cobra.Command {
	return onlyLinux("run", "Watch this machine and stop it when nobody uses it")
}

func (c *cli) agentDoctor() *cobra.Command {
	return onlyLinux("doctor", "Say what the agent lacks on this machine")
}

func (c *cli) agentInstall() *cobra.Command {
	return onlyLinux("install", "Install the agent on this machine")
}

func (c *cli) agentEnroll() *cobra.Command {
	return onlyLinux("enroll", "Have this machine's agent report to a server")
}

func (c *cli) agentUninstall() *cobra.Command {
	return onlyLinux("uninstall", "Remove the agent from this machine")
}

func (c *cli) referenceCommand() *cobra.Command {
	cmd := onlyLinux("reference", "Write the generated reference pages")
	cmd.Hidden = true
	return cmd
}
