//go:build linux && !portable

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/cmd/agentcmd"
	"lull/internal/cli/term"
	"lull/internal/host"
	"lull/internal/host/api"
)

// referencePages returns the pages of docs/reference that are generated from the
// command line's own code, by file name.
func (c *cli) referencePages() (map[string][]byte, error) {
	_, api := (&api.API{Version: "1"}).Handler()
	doc, err := json.MarshalIndent(api.OpenAPI(), "", "  ")
	if err != nil {
		return nil, fmt.Errorf("cannot encode the API's description: %w", err)
	}
	pages, err := serverPages()
	if err != nil {
		return nil, err
	}
	fleetwide, err := c.serverMetrics()
	if err != nil {
		return nil, err
	}
	local, err := catalogue(hostMetrics(host.New(host.Config{Runtimes: map[string]host.Runtime{"process": nil}})))
	if err != nil {
		return nil, err
	}
	maps.Copy(pages, map[string][]byte{
		"config-host.md":    []byte(hostSettingsPage()),
		"config-agent.md":   []byte(agentcmd.SettingsPage()),
		"cli.md":            cliPage(c.root()),
		"host-openapi.json": append(doc, '\n'),
		"metrics.md":        metricsPage(fleetwide, local),
	})
	return pages, nil
}

// referenceCommand returns the verb that writes them, for make generate.
func (c *cli) referenceCommand() *cobra.Command {
	return &cobra.Command{Use: "reference DIR", Short: "Write the generated reference pages", Hidden: true, Args: term.Args(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, a []string) error {
			pages, err := c.referencePages()
			if err != nil {
				return err
			}
			for name, b := range pages {
				if err := os.WriteFile(filepath.Join(a[0], name), b, 0o644); err != nil {
					return fmt.Errorf("cannot write a reference page: %w", err)
				}
			}
			return nil
		}}
}

// cliPage returns the reference of every verb with its flags.
func cliPage(root *cobra.Command) []byte {
	var b bytes.Buffer
	b.WriteString("# Command line\n\nGenerated from cmd/lull. Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 refused with a reason.\n" +
		"`--json` (or `-o json`) prints the API's own objects and nothing else on standard output.\n")
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Hidden || cmd.Name() == "help" || cmd.Name() == "completion" {
			return
		}
		if cmd != root {
			text := strings.TrimSuffix(cmd.Short, ".") + "."
			if head, _, _ := strings.Cut(cmd.Short, ";"); strings.HasPrefix(strings.ReplaceAll(cmd.Long, "\n", " "), head) {
				text = ""
			}
			text = strings.Trim(text+"\n\n"+strings.ReplaceAll(cmd.Long, "\n  ", "\n    "), "\n")
			fmt.Fprintf(&b, "\n## %s\n\n    %s\n\n%s\n", cmd.CommandPath(), cmd.UseLine(), text)
			if cmd.Example != "" {
				b.WriteString("\nFor example:\n\n")
				for line := range strings.Lines(cmd.Example) {
					fmt.Fprintf(&b, "    %s\n", strings.TrimSpace(line))
				}
			}
			flagTable(&b, cmd.NonInheritedFlags())
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(root)
	return b.Bytes()
}

// ofUser reports whether a flag's default depends on the user who runs the command.
func ofUser(def string) bool {
	return strings.HasPrefix(def, "/run/") || strings.Contains(def, "lull-0") || strings.HasSuffix(def, "/host.sock")
}

func flagTable(w io.Writer, f *pflag.FlagSet) {
	first := true
	f.VisitAll(func(x *pflag.Flag) {
		if x.Name == "help" || x.Hidden {
			return
		}
		if first {
			fmt.Fprintf(w, "\n| flag | default | meaning |\n|---|---|---|\n")
			first = false
		}
		def := x.DefValue
		if ofUser(def) {
			def = "by user"
		}
		fmt.Fprintf(w, "| `--%s` | %s | %s |\n", x.Name, def, strings.ReplaceAll(x.Usage, "|", "\\|"))
	})
}
