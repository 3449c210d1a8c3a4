// Package policy has the verbs for the rules of a fleet: policies, schedules,
// overrides and budgets.
package policy

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Commands returns policy, schedule, override and budget.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.policyCommand(), v.scheduleCommand(), v.overrideCommand(), v.budgetCommand()}
}
