// Package instance has the verbs for the instances and images of a host.
package instance

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Commands returns run, ps, restart, rm, snooze, instance and image. protect
// snoozes a worker of a server, for lull snooze.
func Commands(s *client.Session, protect Protect) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.runCommand(), v.psCommand(), v.restartCommand(), v.rmCommand(), v.snoozeCommand(protect), v.instanceCommand(), v.imageCommand()}
}

// Protect snoozes the worker with this name or ID, or ends its snooze.
type Protect func(cmd *cobra.Command, worker string, e *term.EndFlags) error
