package client

import (
	"github.com/spf13/cobra"

	"lull/internal/protocol/agentctl"
)

// OnAgent adds --socket to cmd, and makes cmd run f with a client of the agent at
// that socket.
func (c *Session) OnAgent(cmd *cobra.Command, f func(cmd *cobra.Command, a []string, cl *agentctl.Client) error) *cobra.Command {
	socket := cmd.Flags().String("socket", "", "the agent's control socket (default $LULL_AGENT_SOCKET, then /run/lull/agent.sock)")
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		return f(cmd, a, agentctl.Dial(c.AgentSocket(*socket)))
	}
	return cmd
}

// AgentSocket returns the path of the agent's control socket: flag if not empty,
// otherwise the default.
func (c *Session) AgentSocket(flag string) string {
	if flag != "" {
		return flag
	}
	if e := c.Getenv("LULL_AGENT_SOCKET"); e != "" {
		return e
	}
	return agentctl.DefaultSocket
}
