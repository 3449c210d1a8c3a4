package term

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// Args returns check with its errors converted to usage errors.
func Args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, a []string) error {
		if err := check(cmd, a); err != nil {
			return argFault(cmd, a, err)
		}
		return nil
	}
}

// Exclusive makes a verb reject more than one of some flags. Call it after RunE is
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
