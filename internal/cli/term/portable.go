package term

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
)

// OnlyLinux returns a placeholder for a verb that exists only on Linux. Help does not
// list it.
func OnlyLinux(use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short + " (Linux only)", Hidden: true, DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fmt.Errorf("cannot run %s on %s: it needs Linux; commands that use a remote server or host work here", cmd.CommandPath(), runtime.GOOS)
		}}
}
