package worker

import (
	"fmt"
	"io"
	"net/url"
	"os"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"lull/internal/cli/term"
	"lull/internal/fleet/launch"
	"lull/internal/protocol/control"
)

func (c verbs) templateCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "template", Short: "Manage launch templates of workers", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	ls := &cobra.Command{Use: "ls", Short: "List templates", Example: "  lull template ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			l, err := control.All[launch.Template](cmd.Context(), cl, "/api/v1/templates", nil)
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				term.Rows(w, "NAME\tTYPE\t2:IMAGE\tENABLED\t1:DESCRIPTION", func(row func(string, ...any)) {
					for _, t := range l {
						row("%s\t%s\t%s\t%t\t%s", t.Name, t.InstanceType, t.AMINameFilter, t.Enabled, t.Description)
					}
				})
			})
		}}
	get := &cobra.Command{Use: "get NAME", Short: "Show a template", Example: "  lull template get small", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeTemplates,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			t, err := control.Read[launch.Template](cmd.Context(), cl, "/templates/"+url.PathEscape(a[0]))
			if err != nil {
				return err
			}
			return c.Print(t, func(w io.Writer) { term.YamlText(w, t) })
		}}
	rm := &cobra.Command{Use: "rm NAME", Short: "Remove a template; its workers are kept", Example: "  lull template rm small", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeTemplates,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			_, err = cl.Call(cmd.Context(), "DELETE", "/api/v1/templates/"+url.PathEscape(a[0]), nil, nil)
			if err == nil && !c.JSON {
				fmt.Fprintln(c.Out, a[0], "removed")
			}
			return err
		}}
	cmd.AddCommand(ls, get, c.templateApply(), rm)
	return cmd
}

func (c verbs) templateApply() *cobra.Command {
	var file string
	cmd := &cobra.Command{Use: "apply -f FILE", Short: "Create or replace templates from a YAML or JSON file", Args: term.Args(cobra.NoArgs),
		Long: `Create or replace templates from YAML or JSON, one or more documents. Each needs a
name, an instance_type and an ami_name_filter; lull template get shows the other
fields. Documents are applied in order up to the first fault, which is reported with
its field.`,
		Example: "  lull template apply -f templates.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			in := c.In
			if file != "-" {
				f, err := os.Open(file)
				if err != nil {
					return fmt.Errorf("cannot read the templates: %w", err)
				}
				defer f.Close()
				in = f
			}
			docs, err := templatesOf(io.LimitReader(in, 1<<20))
			if err != nil {
				return term.Usage(err)
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			out := []launch.Template{}
			for _, d := range docs {
				name, _ := d["name"].(string)
				t, err := control.Write[launch.Template](cmd.Context(), cl, "PUT", "/templates/"+url.PathEscape(name), d)
				if err != nil {
					return err
				}
				out = append(out, t)
			}
			return c.Print(out, func(w io.Writer) {
				for _, t := range out {
					fmt.Fprintln(w, t.Name, "applied")
				}
			})
		}}
	cmd.Flags().StringVarP(&file, "file", "f", "-", "file, or - for standard input")
	return cmd
}

// templatesOf reads all YAML documents in r. Each must have a name; the server
// validates the rest.
func templatesOf(r io.Reader) ([]map[string]any, error) {
	d := yaml.NewDecoder(r)
	var out []map[string]any
	for {
		doc := map[string]any{}
		err := d.Decode(&doc)
		if err == io.EOF {
			if len(out) == 0 {
				return nil, fmt.Errorf("no template in the input")
			}
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("cannot read the templates: %w", err)
		}
		if name, _ := doc["name"].(string); name == "" {
			return nil, fmt.Errorf("cannot use template %d of the input: name is missing", len(out)+1)
		}
		out = append(out, doc)
	}
}

func (c verbs) completeTemplates(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	cl, err := c.ServerClient()
	if err != nil || len(a) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	l, err := control.All[launch.Template](cmd.Context(), cl, "/api/v1/templates", nil)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var out []string
	for _, t := range l {
		out = append(out, t.Name+"\t"+t.Description)
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
