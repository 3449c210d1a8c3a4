package admin

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
	"lull/internal/protocol/control"
)

// Server returns the verbs of lull server that need a running server: stats, shards,
// reconcile, resign and profile.
func Server(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.serverStats(), v.serverShards(), v.serverReconcile(), v.serverResign(), v.serverProfile()}
}

func (c verbs) serverStats() *cobra.Command {
	return &cobra.Command{Use: "stats", Short: "Show a server's counters since its start", Args: term.Args(cobra.NoArgs), Example: "  lull server stats\n  lull server stats --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			var v map[string]any
			if _, err := cl.Call(cmd.Context(), "GET", "/admin/stats", nil, &v); err != nil {
				return err
			}
			return c.Print(v, func(w io.Writer) {
				t := term.Table(w)
				counters(t, "", v)
				t.Flush()
			})
		}}
}

// counters prints a tree of counters, one per line.
func counters(w io.Writer, under string, v map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(v)) {
		text := strings.ReplaceAll(strings.TrimSuffix(name, "_count"), "_", " ")
		if deeper, is := v[name].(map[string]any); is {
			counters(w, under+text+": ", deeper)
			continue
		}
		fmt.Fprintf(w, "%s%s\t%v\n", under, text, v[name])
	}
}

func (c verbs) serverShards() *cobra.Command {
	return &cobra.Command{Use: "shards", Short: "Show which servers share the fleet", Args: term.Args(cobra.NoArgs), Example: "  lull server shards",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			var v control.Shards
			if _, err := cl.Call(cmd.Context(), "GET", "/admin/shards", nil, &v); err != nil {
				return err
			}
			return c.Print(v, func(w io.Writer) {
				fmt.Fprintf(w, "%s (role %s) owns %d of %d parts of the fleet; its lease ends in %s unless renewed.\n", v.Server, v.Role, len(v.Held), v.Total,
					term.Span(time.Duration(v.LeaseSeconds*float64(time.Second))))
				term.Rows(w, "SERVER\tADDRESS\tSINCE", func(row func(string, ...any)) {
					for _, m := range v.Members {
						row("%s\t%s\t%s", m.ID, term.Dash(m.Address), term.OptionalTime(m.Since))
					}
				})
			})
		}}
}

// serverDo returns a verb that sends a request to the server and prints accepted.
func (c verbs) serverDo(use, short, long, path, accepted string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Long: long, Args: term.Args(cobra.NoArgs), Example: "  lull server " + use,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			if _, err := cl.Call(cmd.Context(), "POST", path, nil, nil); err != nil {
				return err
			}
			if !c.JSON {
				fmt.Fprintln(c.Out, accepted)
			}
			return nil
		}}
}

func (c verbs) serverReconcile() *cobra.Command {
	return c.serverDo("reconcile", "Reconcile all workers of a server now", "Reconcile all workers of a server now, instead of at its next sweep.", "/admin/trigger-reconcile",
		"The server reconciles all of its workers now. Follow it with: lull events -f")
}

func (c verbs) serverResign() *cobra.Command {
	return c.serverDo("resign", "Hand a server's workers over to the others", "Hand a server's workers over to the other servers of the fleet, for example before maintenance.\nA server without others takes its workers back.",
		"/admin/resign", "The server gives up its workers. Check who owns them with: lull server shards")
}

func (c verbs) serverProfile() *cobra.Command {
	var kind, file string
	var length time.Duration
	cmd := &cobra.Command{Use: "profile", Short: "Save a CPU or heap profile of a running server", Args: term.Args(cobra.NoArgs),
		Long:    "Save a CPU or heap profile of a running server. Read it with go tool pprof.",
		Example: "  lull server profile --for 30s --file cpu.pprof\n  lull server profile --kind heap --file heap.pprof",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if kind != "cpu" && kind != "heap" {
				return term.Usage(fmt.Errorf("cannot use --kind %q: want cpu or heap", kind))
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			b, err := cl.Profile(cmd.Context(), kind, int(length.Seconds()))
			if err != nil {
				return err
			}
			if err := os.WriteFile(file, b, 0o600); err != nil {
				return fmt.Errorf("save the profile: %w", err)
			}
			return c.Print(map[string]any{"file": file, "bytes": len(b)}, func(w io.Writer) {
				fmt.Fprintf(w, "Saved %s to %s. Read it with: go tool pprof %s\n", term.Size(int64(len(b))), file, file)
			})
		}}
	cmd.Flags().StringVar(&kind, "kind", "cpu", "cpu or heap")
	cmd.Flags().StringVar(&file, "file", "lull.pprof", "file to write")
	term.BindSpan(cmd.Flags(), &length, "for", 10*time.Second, "how long to measure the CPU")
	term.CompleteWords(cmd, "kind", "cpu", "heap")
	return cmd
}
