// Package lease has the verbs that hold and release leases of instances, from
// this machine or from inside an instance.
package lease

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Command returns lull lease.
func Command(s *client.Session) *cobra.Command { return verbs{s}.leaseCommand() }
