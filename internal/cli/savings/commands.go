// Package savings has the verbs that say what pauses saved, and what another
// policy would have saved.
package savings

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Commands returns simulate and savings.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.simulateCommand(), v.savingsCommand()}
}
