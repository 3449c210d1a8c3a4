// Package setup has the verbs that set up the agent on a machine: its permissions in
// the cloud, its files and unit, and its enrollment with a server.
package setup

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// Slim is the name of the program that has only the agent.
const Slim = "lull-agent"

// verbs holds the session that the verbs of this package use.
type verbs struct {
	*client.Session
	program string // lull or lull-agent, whichever is running and will be installed
}

// Commands returns the verbs of lull agent that set it up: iam, install, enroll and
// uninstall. program is the name of the running program, lull or lull-agent.
func Commands(s *client.Session, program string) []*cobra.Command {
	v := verbs{s, program}
	return []*cobra.Command{v.agentIAM(), v.agentInstall(), v.agentEnroll(), v.agentUninstall()}
}
