package main

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestHelpStyle checks that every short help is one line of at most 60 characters
// that starts with a capital and has no full stop, and that the description of every
// flag starts in lower case.
func TestHelpStyle(t *testing.T) {
	seen := 0
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		seen++
		first, _ := utf8.DecodeRuneInString(cmd.Short)
		switch n := utf8.RuneCountInString(cmd.Short); {
		case n == 0, n > 60:
			t.Errorf("%s: the short help has %d characters: %q", cmd.CommandPath(), n, cmd.Short)
		case strings.HasSuffix(cmd.Short, "."), !unicode.IsUpper(first):
			t.Errorf("%s: short help %q", cmd.CommandPath(), cmd.Short)
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" || strings.HasSuffix(f.Usage, ".") {
				t.Errorf("%s --%s: help %q", cmd.CommandPath(), f.Name, f.Usage)
			}
		})
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(newCLI(nil, nil, nil, func(string) string { return "" }).root())
	if seen < 100 {
		t.Errorf("only %d commands were found", seen)
	}
}
