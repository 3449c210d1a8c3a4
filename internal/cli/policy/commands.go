// Package policy has the verbs for the rules of a fleet: policies, schedules,
// overrides and budgets.
package policy

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Commands returns the verbs policy, schedule, override and budget.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.policyCommand(), v.scheduleCommand(), v.overrideCommand(), v.budgetCommand()}
}
