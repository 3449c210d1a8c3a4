// Package explain has the verbs that say what happened and why: why, events and
// audit, for instances of a host and workers of a server. It also prints the
// accounts, leases and policies of the other explaining verbs, so that all of
// them look the same.
package explain

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Commands returns why, events and audit.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.OrServer(v.whyCommand(), v.workerWhy), v.OrServer(v.eventsCommand(), v.fleetEvents), v.auditCommand()}
}

// WorkerWhy returns lull worker why.
func WorkerWhy(s *client.Session) *cobra.Command { return verbs{s}.workerWhyCommand() }
