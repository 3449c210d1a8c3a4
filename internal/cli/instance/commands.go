// Package instance has the verbs for the instances and images of a host.
package instance

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Commands returns the verbs for instances: run, ps, start, stop and so on; instance,
// which has the same verbs; and image.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return append([]*cobra.Command{v.runCommand(), v.psCommand(), v.topCommand(), v.cpCommand(), v.logsCommand(), v.execCommand(), v.inspectCommand(), v.rmCommand(), v.instanceCommand(), v.imageCommand(), v.openCommand(), v.adoptCommand(), v.wakeAtCommand()},
		v.powerCommands()...)
}

// Snooze returns the verb lull snooze. It calls protect for a worker of a server.
func Snooze(s *client.Session, protect Protect) *cobra.Command {
	return verbs{s}.snoozeCommand(protect)
}

// Protect snoozes the worker with this name or ID, or ends its snooze.
type Protect func(cmd *cobra.Command, worker string, e *term.EndFlags) error
