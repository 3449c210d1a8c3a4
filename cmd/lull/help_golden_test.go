package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write the golden files again")

// TestHelp compares the help of every command with testdata/help.txt, which make
// generate writes, and holds every line to 80 columns.
func TestHelp(t *testing.T) {
	var all bytes.Buffer
	root := newCLI(nil, &all, &all, func(string) string { return "" }).root()
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Name() == "help" || cmd.Name() == "completion" {
			return
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if ofUser(f.DefValue) {
				f.DefValue = ""
			}
		})
		from := all.Len()
		fmt.Fprintf(&all, "=== %s\n", cmd.CommandPath())
		if err := cmd.Help(); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(all.String()[from:]) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("%s --help: %d columns: %s", cmd.CommandPath(), n, line)
			}
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(root)
	const golden = "testdata/help.txt"
	if *update {
		if err := os.WriteFile(golden, all.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), all.String()); diff != "" {
		t.Errorf("the help is not what %s says (make generate):\n%s", golden, diff)
	}
}
