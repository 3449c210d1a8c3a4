package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"lull/internal/cli/term"
)

// manCommand returns the verb that writes a manual page for each verb, for packages
// and make install. The pages have the date of the build, so that two builds of one
// commit are equal.
func (c *cli) manCommand() *cobra.Command {
	return &cobra.Command{Use: "man DIR", Short: "Write the manual pages", Hidden: true, Args: term.Args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			at, err := time.Parse(time.RFC3339, buildDate)
			if err != nil {
				at = time.Unix(0, 0).UTC()
			}
			if err := os.MkdirAll(a[0], 0o755); err != nil {
				return fmt.Errorf("cannot write the manual pages: %w", err)
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true
			return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "lull " + version, Manual: "lull", Date: &at}, a[0])
		}}
}
