// Package worker has the verbs for the workers and templates of a server.
package worker

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Commands returns the verbs worker and template.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.workerCommand(), v.templateCommand()}
}

// Protect returns a function that snoozes the worker with a name or ID until the end
// in e, or ends its snooze.
func Protect(s *client.Session) func(cmd *cobra.Command, worker string, e *term.EndFlags) error {
	return verbs{s}.protect
}
