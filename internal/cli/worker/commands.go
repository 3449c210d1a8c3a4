// Package worker has the verbs for the workers and templates of a server.
package worker

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Commands returns worker and template.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.workerCommand(), v.templateCommand()}
}

// Protect snoozes the worker with this name or ID until the end that e holds, or
// ends its snooze.
func Protect(s *client.Session) func(cmd *cobra.Command, worker string, e *term.EndFlags) error {
	return verbs{s}.protect
}
