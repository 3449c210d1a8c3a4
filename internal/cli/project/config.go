package project

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

// shownProject is a project in the form in which lull config prints it: that of a
// lull.yaml.
type shownProject struct {
	Name     string                  `yaml:"name" json:"name"`
	Services map[string]shownService `yaml:"services" json:"services"`
}

// shownService has the attributes in fields.go that determine a service's spec.
type shownService struct {
	Runtime     string            `yaml:"runtime" json:"runtime"`
	Image       string            `yaml:"image,omitempty" json:"image,omitempty"`
	Entrypoint  []string          `yaml:"entrypoint,omitempty,flow" json:"entrypoint,omitempty"`
	Command     []string          `yaml:"command,omitempty,flow" json:"command,omitempty"`
	Environment map[string]string `yaml:"environment,omitempty" json:"environment,omitempty"`
	WorkingDir  string            `yaml:"working_dir,omitempty" json:"working_dir,omitempty"`
	User        string            `yaml:"user,omitempty" json:"user,omitempty"`
	Ports       []string          `yaml:"ports,omitempty" json:"ports,omitempty"`
	Path        string            `yaml:"path,omitempty" json:"path,omitempty"`
	DependsOn   []string          `yaml:"depends_on,omitempty" json:"depends_on,omitempty"`
	Volumes     []string          `yaml:"volumes,omitempty" json:"volumes,omitempty"`
	MemLimit    string            `yaml:"mem_limit,omitempty" json:"mem_limit,omitempty"`
	CPUs        float64           `yaml:"cpus,omitempty" json:"cpus,omitempty"`
	Restart     string            `yaml:"restart,omitempty" json:"restart,omitempty"`
	StopGrace   string            `yaml:"stop_grace_period,omitempty" json:"stop_grace_period,omitempty"`
	Labels      map[string]string `yaml:"labels,omitempty" json:"labels,omitempty"`

	PauseAfter           string   `yaml:"pause_after,omitempty" json:"pause_after,omitempty"`
	ReclaimAfter         string   `yaml:"reclaim_after,omitempty" json:"reclaim_after,omitempty"`
	HibernateAfter       string   `yaml:"hibernate_after,omitempty" json:"hibernate_after,omitempty"`
	StopAfter            string   `yaml:"stop_after,omitempty" json:"stop_after,omitempty"`
	QuietConnectionAfter string   `yaml:"quiet_connection_after,omitempty" json:"quiet_connection_after,omitempty"`
	ReadyTimeout         string   `yaml:"ready_timeout,omitempty" json:"ready_timeout,omitempty"`
	IdlePolicy           string   `yaml:"idle_policy,omitempty" json:"idle_policy,omitempty"`
	Wake                 *bool    `yaml:"wake,omitempty" json:"wake,omitempty"`
	WakeOnOutbound       bool     `yaml:"wake_on_outbound,omitempty" json:"wake_on_outbound,omitempty"`
	Schedule             []string `yaml:"schedule,omitempty" json:"schedule,omitempty"`
	Net                  string   `yaml:"net,omitempty" json:"net,omitempty"`

	Probes []shownProbe `yaml:"probes,omitempty" json:"probes,omitempty"`
}

// show returns the project after merging, variables and defaults have been applied.
func (p *project) show() shownProject {
	out := shownProject{Name: p.name, Services: map[string]shownService{}}
	for _, s := range p.services {
		out.Services[s.name] = showSpec(s.spec, s.after)
	}
	return out
}

func showSpec(s instance.Spec, after []string) shownService {
	out := shownService{Runtime: s.Runtime, Image: s.Image, WorkingDir: s.Workdir, User: s.User, DependsOn: after, CPUs: s.CPUs,
		Restart: string(s.Restart), StopGrace: span(s.StopGrace), Labels: s.Labels,
		ReclaimAfter: span(s.ReclaimAfter), HibernateAfter: span(s.HibernateAfter), QuietConnectionAfter: span(s.QuietConnectionAfter),
		ReadyTimeout: span(s.ReadyTimeout), IdlePolicy: s.IdlePolicy, Wake: s.WakeFromStopped, WakeOnOutbound: s.WakeOnOutbound, Net: string(s.Net), Schedule: s.WakeSchedule, Probes: showProbes(s.Probes)}
	if s.Image == "" {
		out.Command = s.Command
	} else {
		out.Entrypoint = s.Command
	}
	for _, e := range s.Env {
		if out.Environment == nil {
			out.Environment = map[string]string{}
		}
		k, v, _ := strings.Cut(e, "=")
		out.Environment[k] = v
	}
	for _, e := range s.Expose {
		_, target, _ := net.SplitHostPort(e.Target)
		text := e.Listen + ":" + target
		if e.Proto != "" {
			text += "/" + e.Proto
		}
		out.Ports = append(out.Ports, text)
		if e.Path != instance.PathAuto {
			out.Path = string(e.Path)
		}
	}
	if s.Workspace != "" {
		out.Volumes = []string{s.Workspace}
	}
	if s.Memory > 0 {
		out.MemLimit = fmt.Sprint(s.Memory)
	}
	for to, from := range map[*string]*idle.Duration{&out.PauseAfter: s.PauseAfter, &out.StopAfter: s.StopAfter} {
		if from != nil {
			*to = time.Duration(*from).String()
		}
	}
	return out
}

// span formats a duration; "" for 0, so that the attribute is omitted.
func span(d idle.Duration) string {
	if d == 0 {
		return ""
	}
	return time.Duration(d).String()
}

// write prints the project in such a form that load reads the same project again. It
// escapes what load would take for a variable.
func (p shownProject) write(w io.Writer) error {
	var text strings.Builder
	out := yaml.NewEncoder(&text)
	out.SetIndent(2)
	if err := out.Encode(p); err != nil {
		return err
	}
	_, err := io.WriteString(w, strings.ReplaceAll(text.String(), "$", "$$"))
	return err
}

// Effective makes cmd, which is lull config, print the effective project of the file
// that is its argument or, with --schema, the JSON schema of project files.
func Effective(s *client.Session, cmd *cobra.Command) {
	schema := cmd.Flags().Bool("schema", false, "print the JSON schema of lull.yaml, for editors")
	cmd.Args = term.Args(cobra.MaximumNArgs(1))
	cmd.ValidArgsFunction = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
	}
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		switch {
		case *schema:
			if s.JSON {
				return s.Print(json.RawMessage(Schema()), nil)
			}
			_, err := s.Out.Write(Schema())
			return err
		case len(a) == 0:
			return cmd.Help()
		}
		_, p, notes, err := (&source{file: a[0]}).open(cmd.Context(), os.Environ())
		if err != nil {
			return term.Usage(err)
		}
		for _, n := range slices.Compact(notes) {
			fmt.Fprintln(s.Err, "lull:", n)
		}
		if p.compose != nil {
			text, err := p.compose.MarshalYAML()
			if err == nil && s.JSON {
				text, err = p.compose.MarshalJSON()
			}
			if err != nil {
				return err
			}
			return s.Print(json.RawMessage(text), func(w io.Writer) { _, err = w.Write(text) })
		}
		shown := p.show()
		return errors.Join(s.Print(shown, func(w io.Writer) { err = shown.write(w) }), err)
	}
}
