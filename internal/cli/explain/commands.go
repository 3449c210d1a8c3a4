// Package explain has the verbs that show what happened and why: why, events and
// audit, for instances of a host and workers of a server. It also prints
// explanations, leases and policies for other packages, so that they look the same
// everywhere.
package explain

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Commands returns the verbs why, events and audit.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.OrServer(v.whyCommand(), v.workerWhy), v.OrServer(v.eventsCommand(), v.fleetEvents), v.auditCommand()}
}

// WorkerWhy returns the verb lull worker why.
func WorkerWhy(s *client.Session) *cobra.Command { return verbs{s}.workerWhyCommand() }
