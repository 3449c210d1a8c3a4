// Package admin has the verbs that run a fleet: tokens and logins, settings,
// notifications, and the halt of everything automatic.
package admin

import (
	"github.com/spf13/cobra"

	"lull/internal/cli/client"
)

// verbs are the verbs of this package for one run of the command line.
type verbs struct{ *client.Session }

// Halt returns lull halt.
func Halt(s *client.Session) []*cobra.Command { return []*cobra.Command{verbs{s}.haltCommand()} }

// Commands returns token, login, logout, settings and notify.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.tokenCommand(), v.loginCommand(), v.logoutCommand(), v.settingsCommand(), v.notifyCommand()}
}

// AgentHalt returns lull agent halt.
func AgentHalt(s *client.Session) *cobra.Command { return verbs{s}.agentHalt() }
