package main

import (
	"testing"

	"github.com/spf13/cobra"
)

// TestEveryCommandHasAnExample checks that the help of every command that does
// something has an example.
func TestEveryCommandHasAnExample(t *testing.T) {
	for name, cmd := range leaves() {
		if cmd.Example == "" {
			t.Errorf("lull %s has no example", name)
		}
	}
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Runnable() && !cmd.HasSubCommands() && !cmd.Hidden && cmd.Example == "" {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(newCLI(nil, nil, nil, func(string) string { return "" }).root())
}
