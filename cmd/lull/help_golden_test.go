package main

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/lib/errtest"
)

var update = flag.Bool("update", false, "write the golden files again")

// rendered are the commands whose rendered help is in testdata/help.txt. The texts of
// all commands are in docs/reference/cli.md.
var rendered = []string{"lull", "lull run", "lull worker", "lull worker set", "lull agent", "lull server", "lull settings set"}

// TestHelp checks that the help of every command fits 80 columns and that rendering
// it drops no word. It compares some with testdata/help.txt, which make generate
// writes.
func TestHelp(t *testing.T) {
	var all, out bytes.Buffer
	root := newCLI(nil, &out, &out, func(string) string { return "" }).root()
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
		out.Reset()
		errtest.None(t, cmd.Help())
		help := out.String()
		for line := range strings.Lines(help) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("%s --help: %d columns: %s", cmd.CommandPath(), n, line)
			}
		}
		words := strings.Join(strings.Fields(strings.ReplaceAll(help, "\\\n", " ")), " ") // a backslash continues a long example
		texts := []string{cmp.Or(cmd.Long, cmd.Short), cmd.Example}
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() {
				texts = append(texts, sub.Short)
			}
		}
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if _, usage := pflag.UnquoteUsage(f); !f.Hidden {
				texts = append(texts, usage)
			}
		})
		for _, text := range texts {
			if want := strings.Join(strings.Fields(strings.ReplaceAll(text, "\\\n", " ")), " "); !strings.Contains(words, want) {
				t.Errorf("%s --help lacks the text %q", cmd.CommandPath(), want)
			}
		}
		if slices.Contains(rendered, cmd.CommandPath()) {
			fmt.Fprintf(&all, "=== %s\n%s", cmd.CommandPath(), help)
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(root)
	const golden = "testdata/help.txt"
	if *update {
		errtest.None(t, os.WriteFile(golden, all.Bytes(), 0o644))
	}
	want, err := os.ReadFile(golden)
	errtest.None(t, err)
	if diff := gocmp.Diff(string(want), all.String()); diff != "" {
		t.Errorf("the help is not what %s says (make generate):\n%s", golden, diff)
	}
}
