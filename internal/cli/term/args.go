package term

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// Args turns cobra's complaint about arguments into a usage error.
func Args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, a []string) error {
		if err := check(cmd, a); err != nil {
			if near := nearVerbs(cmd, a); near != "" {
				return Usage(fmt.Errorf("%w; did you mean %s?", err, near))
			}
			return Usage(fmt.Errorf("%w; see: %s --help", err, cmd.CommandPath()))
		}
		return nil
	}
}

// nearVerbs are verbs of cmd that sound like what was given as one.
func nearVerbs(cmd *cobra.Command, a []string) string {
	if len(a) == 0 || !cmd.HasSubCommands() {
		return ""
	}
	cmd.SuggestionsMinimumDistance = max(cmd.SuggestionsMinimumDistance, 2) // cobra sets it for the root alone
	return strings.Join(cmd.SuggestionsFor(a[0]), " or ")
}

// Exclusive makes a verb refuse more than one of some flags. Call it after RunE is
// set.
func Exclusive(cmd *cobra.Command, flags ...string) {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		var given []string
		for _, name := range flags {
			if f := cmd.Flags().Lookup(name); f != nil && f.Changed {
				given = append(given, "--"+name)
			}
		}
		if len(given) > 1 {
			return Usage(fmt.Errorf("cannot combine %s: leave out all but one", strings.Join(given, " and ")))
		}
		return run(cmd, a)
	}
}
