// Package agentcmd is the agent as a command: its verbs, its settings, and the
// wiring of the process. lull has it as lull agent, and lull-agent has nothing
// else.
package agentcmd

import (
	"slices"

	"github.com/spf13/cobra"

	"lull/internal/cli/admin"
	"lull/internal/cli/agent"
	"lull/internal/cli/client"
	"lull/internal/cli/setup"
)

// Build holds a program's version and its build date in RFC 3339, both set by the
// linker.
type Build struct{ Version, Date string }

// verbs are the verbs of this package for one run of the command line.
type verbs struct {
	*client.Session
	Build
}

// Commands returns the verbs of lull agent. program is the name of the program
// that has them, under which install installs it.
func Commands(s *client.Session, b Build, program string) []*cobra.Command {
	v := verbs{s, b}
	return slices.Concat([]*cobra.Command{v.run(), v.doctor(), admin.AgentHalt(s)}, agent.Commands(s), setup.Commands(s, program))
}
