// Package savings has the verbs that show what pauses have saved, and what other
// policies would have saved.
package savings

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Commands returns the verbs simulate and savings.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.simulateCommand(), v.savingsCommand()}
}
