// Package agent has the verbs that query the agent of this machine, or a server about
// agents elsewhere.
package agent

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/explain"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Commands returns the verbs of lull agent that need a running agent or a server.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.agentStatus(), v.agentWhy(), v.agentReload(), v.agentSnooze(), v.agentComplete(), v.agentLease(), v.agentTTL(),
		v.agentHistory(), v.Watchable(v.agentLs()), v.agentGet(), explain.AgentTimeline(s)}
}
