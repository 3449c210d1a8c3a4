// Package topics has the verb lull help, which prints the help of a command or of a
// topic that concerns several commands.
package topics

import (
	"embed"
	"fmt"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
)

//go:embed text/*.txt
var files embed.FS

// Topic is one page of help. Title is its first line.
type Topic struct{ Name, Title, Text string }

// All returns the topics by name.
func All() []Topic {
	entries, err := fs.ReadDir(files, "text")
	if err != nil {
		panic(err) // cannot fail: the topics are embedded
	}
	var out []Topic
	for _, e := range entries {
		b, err := fs.ReadFile(files, "text/"+e.Name())
		if err != nil {
			panic(err)
		}
		title, _, _ := strings.Cut(string(b), "\n")
		out = append(out, Topic{strings.TrimSuffix(e.Name(), ".txt"), title, string(b)})
	}
	return out
}

// Command returns the verb lull help.
func Command(t *term.Term) *cobra.Command {
	var list strings.Builder
	for _, topic := range All() {
		fmt.Fprintf(&list, "\n  %-12s %s", topic.Name, topic.Title)
	}
	return &cobra.Command{Use: "help [COMMAND|TOPIC]", Short: "Show help for a command or a topic",
		Long:    "Show help for a command or a topic. The topics are:\n" + list.String(),
		Example: "  lull help worker set\n  lull help states",
		ValidArgsFunction: func(cmd *cobra.Command, a []string, to string) (names []string, _ cobra.ShellCompDirective) {
			found, _, err := cmd.Root().Find(a)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			for _, sub := range found.Commands() {
				if sub.IsAvailableCommand() && strings.HasPrefix(sub.Name(), to) {
					names = append(names, sub.Name()+"\t"+sub.Short)
				}
			}
			for _, topic := range All() {
				if len(a) == 0 && strings.HasPrefix(topic.Name, to) {
					names = append(names, topic.Name+"\t"+topic.Title)
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			if len(a) == 0 {
				return cmd.Root().Help()
			}
			for _, topic := range All() {
				if len(a) == 1 && a[0] == topic.Name {
					_, err := fmt.Fprint(t.Out, topic.Text)
					return err
				}
			}
			found, rest, err := cmd.Root().Find(a)
			if err != nil {
				return term.Usage(err)
			}
			if len(rest) > 0 {
				return term.UnknownVerb(found, rest[0])
			}
			found.InitDefaultHelpFlag()
			return found.Help()
		}}
}
