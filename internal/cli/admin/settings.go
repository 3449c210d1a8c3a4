package admin

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/fleet/settings"
	"lull/internal/protocol/control"
)

func (c verbs) settingsCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "settings", Short: "Show and change the fleet's settings", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	ls := &cobra.Command{Use: "ls", Short: "List effective settings and their sources", Example: "  lull settings ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			s, err := control.Read[control.Settings](cmd.Context(), cl, "/settings")
			if err != nil {
				return err
			}
			return c.Print(s.Items, func(w io.Writer) {
				term.Rows(w, "SETTING\tVALUE\t2:UNIT\t3:SOURCE\t1:MEANING", func(row func(string, ...any)) {
					for _, v := range s.Items {
						row("%s\t%s\t%s\t%s\t%s", v.Key, term.Dash(settingText(v.Value)), v.Unit, v.Source, v.Doc)
					}
				})
			})
		}}
	set := &cobra.Command{Use: "set NAME=VALUE...", Short: "Change settings, all or none", Args: term.Args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: completeSettings, Example: "  lull settings set worker_idle_timeout_minutes=30 scale_down_enabled=true",
		Long: `Change stored settings of the fleet, all or none. Values are parsed as JSON, otherwise
taken as text. A server flag or environment variable takes precedence: changing such a
setting is refused (exit code 4). Every change is recorded in the audit log.`,
		RunE: func(cmd *cobra.Command, a []string) error {
			values := map[string]any{}
			for _, kv := range a {
				k, v, found := strings.Cut(kv, "=")
				if !found {
					return term.Usage(fmt.Errorf("cannot read %q: want NAME=VALUE", kv))
				}
				var parsed any
				if json.Unmarshal([]byte(v), &parsed) != nil {
					parsed = v
				}
				values[strings.ToLower(k)] = parsed
			}
			return c.changeSettings(cmd, values)
		}}
	unset := &cobra.Command{Use: "unset NAME...", Short: "Reset settings to the config file or default", Args: term.Args(cobra.MinimumNArgs(1)),
		Example:           "  lull settings unset worker_idle_timeout_minutes",
		ValidArgsFunction: completeSettings,
		RunE: func(cmd *cobra.Command, a []string) error {
			values := map[string]any{}
			for _, k := range a {
				values[strings.ToLower(k)] = nil
			}
			return c.changeSettings(cmd, values)
		}}
	cmd.AddCommand(ls, set, unset)
	return cmd
}

func settingText(v any) string {
	switch v.(type) {
	case map[string]any, []any:
		b, err := json.Marshal(v)
		if err != nil {
			return fmt.Sprint(v)
		}
		return string(b)
	}
	return fmt.Sprint(v)
}

func completeSettings(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	var out []string
	for _, f := range settings.Fields() {
		out = append(out, f.Key+"\t"+f.Doc)
	}
	return out, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

func (c verbs) changeSettings(cmd *cobra.Command, values map[string]any) error {
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	s, err := control.Write[control.Settings](cmd.Context(), cl, "PATCH", "/settings", values)
	if err != nil {
		return err
	}
	var changed []settings.Setting
	for _, v := range s.Items {
		if _, ok := values[v.Key]; ok {
			changed = append(changed, v)
		}
	}
	return c.Print(changed, func(w io.Writer) {
		for _, v := range changed {
			fmt.Fprintf(w, "%s = %s (%s)\n", v.Key, settingText(v.Value), v.Source)
		}
	})
}
