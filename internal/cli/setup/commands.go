// Package setup has the verbs that set the agent up on a machine: its rights in
// the cloud, its files and unit, and its enrollment with a server.
package setup

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Commands returns the verbs of lull agent that set it up: iam, install, enroll
// and uninstall.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.agentIAM(), v.agentInstall(), v.agentEnroll(), v.agentUninstall()}
}
