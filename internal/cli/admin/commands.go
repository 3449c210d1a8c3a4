// Package admin has the verbs that administer a fleet: tokens and logins, settings,
// notifications, and the halt of all automatic actions.
package admin

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Halt returns the verb lull halt.
func Halt(s *client.Session) []*cobra.Command { return []*cobra.Command{verbs{s}.haltCommand()} }

// Commands returns the verbs token, login, logout, settings and notify.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.tokenCommand(), v.loginCommand(), v.logoutCommand(), v.settingsCommand(), v.notifyCommand()}
}

// AgentHalt returns the verb lull agent halt.
func AgentHalt(s *client.Session) *cobra.Command { return verbs{s}.agentHalt() }
