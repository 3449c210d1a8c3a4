//go:build !linux || portable

package agentcmd

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
)

// Config returns a placeholder for the verb that shows the settings of an agent.
func Config(_ *client.Session, use string) *cobra.Command {
	return term.OnlyLinux(use, "Show the settings of lull agent run")
}

func (c verbs) run() *cobra.Command {
	return term.OnlyLinux("run", "Stop this machine when it is idle")
}

func (c verbs) doctor() *cobra.Command {
	return term.OnlyLinux("doctor", "Check this machine for what the agent needs")
}
