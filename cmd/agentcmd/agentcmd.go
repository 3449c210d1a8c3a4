// Package agentcmd is the agent as a command: its verbs, its settings, and the wiring
// of its process. In lull it is the verb lull agent; lull-agent consists of it alone.
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

// verbs holds what the verbs of this package use.
type verbs struct {
	*client.Session
	Build
}

// Commands returns the verbs of lull agent. program is the name of the running
// program, under which install installs it.
func Commands(s *client.Session, b Build, program string) []*cobra.Command {
	v := verbs{s, b}
	return slices.Concat([]*cobra.Command{v.run(), v.doctor(), admin.AgentHalt(s)}, agent.Commands(s), setup.Commands(s, program))
}
