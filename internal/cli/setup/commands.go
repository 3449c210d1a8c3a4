// Package setup has the verbs that set the agent up on a machine: its rights in
// the cloud, its files and unit, and its enrollment with a server.
package setup

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// Slim is the name of the program that is the agent alone.
const Slim = "lull-agent"

// verbs are the verbs of this package for one run of the command line.
type verbs struct {
	*client.Session
	program string // lull or lull-agent, which is installed
}

// Commands returns the verbs of lull agent that set it up: iam, install, enroll
// and uninstall. program is the name of the running program, lull or
// lull-agent.
func Commands(s *client.Session, program string) []*cobra.Command {
	v := verbs{s, program}
	return []*cobra.Command{v.agentIAM(), v.agentInstall(), v.agentEnroll(), v.agentUninstall()}
}
