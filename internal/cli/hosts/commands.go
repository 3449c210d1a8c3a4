// Package hosts has the verbs for the hosts that report to a server.
package hosts

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Commands returns the verbs of lull host that need a server: ls, get, why, and those
// that act on an instance of a host.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return append([]*cobra.Command{v.Watchable(v.hostLs()), v.hostGet(), v.hostWhy()}, v.commands()...)
}
