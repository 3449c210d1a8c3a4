//go:build !linux || portable

package setup

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/term"
)

func (c verbs) agentInstall() *cobra.Command {
	return term.OnlyLinux("install", "Install the agent on this machine")
}

func (c verbs) agentEnroll() *cobra.Command {
	return term.OnlyLinux("enroll", "Connect this machine's agent to a server")
}

func (c verbs) agentUninstall() *cobra.Command {
	return term.OnlyLinux("uninstall", "Uninstall the agent from this machine")
}
