// Package lease has the verbs that hold and release leases of instances, from
// this machine or from inside an instance.
package lease

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Command returns the verb lull lease.
func Command(s *client.Session) *cobra.Command { return verbs{s}.leaseCommand() }
