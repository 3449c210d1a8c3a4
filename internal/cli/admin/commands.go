// Package admin has the verbs that run a fleet: tokens and logins, settings,
// notifications, and the halt of everything automatic.
package admin

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Commands returns token, login, logout, settings, notify and halt.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.tokenCommand(), v.loginCommand(), v.logoutCommand(), v.settingsCommand(), v.notifyCommand(), v.haltCommand()}
}

// AgentHalt returns lull agent halt.
func AgentHalt(s *client.Session) *cobra.Command { return verbs{s}.agentHalt() }
