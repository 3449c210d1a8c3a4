package project

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v3"

	"lull/internal/core/instance"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/hostctl"
)

// A Compose file whose services have images is run by Docker Compose. Compose
// creates, replaces and removes the containers, and supports every attribute. lull
// adopts the containers with the settings in the file, and pauses and wakes them. It
// calls Compose only if a service differs from the file, because Compose would start
// containers that are asleep.

// inDocker reports whether Docker Compose runs the services of a file by default: the
// file is not named lull.yaml, and every service has an image or a build.
func (f *file) inDocker() bool {
	if strings.HasPrefix(filepath.Base(f.path), "lull.") {
		return false
	}
	var tree struct {
		Services map[string]struct {
			Image    any `yaml:"image"`
			Build    any `yaml:"build"`
			Extends  any `yaml:"extends"`
			Provider any `yaml:"provider"`
		} `yaml:"services"`
	}
	if err := f.root.Decode(&tree); err != nil {
		return false
	}
	for _, s := range tree.Services {
		if s.Image == nil && s.Build == nil && s.Extends == nil && s.Provider == nil {
			return false
		}
	}
	return len(tree.Services) > 0
}

// describeDocker converts a loaded Compose file to specs for its containers. The
// specs have only idle settings. The error joins every fault, each with its line.
func describeDocker(f *file, p *types.Project) (*project, error) {
	out, err := inOrder(f, p, func(c *converter, s *instance.Spec) {
		for _, field := range idleFields {
			if f.line(append(slices.Clone(c.at), field.name)...) > f.line(c.at...) {
				c.bad(field.name, "write it below x-lull:, because Docker Compose reads this file too")
			}
		}
		if s.Labels = nil; c.s.Labels["lull.pause-after"] != "" {
			s.Labels = map[string]string{} // the host itself reads the container's labels
		}
		c.idle(s)
		for _, o := range []struct {
			field string
			set   bool
		}{{"probes", s.Probes != nil}, {"schedule", s.WakeSchedule != nil}, {"hibernate_after", s.HibernateAfter != 0}, {"ready_timeout", s.ReadyTimeout != 0},
			{"net", s.Net != ""}, {"wake", s.WakeFromStopped != nil}, {"wake_on_outbound", s.WakeOnOutbound && s.Labels == nil}, {"runtime", s.Runtime != instance.RuntimeDocker}} {
			if o.set {
				c.bad(xLull+"."+o.field, "not supported for a service that runs in Docker")
			}
		}
	})
	if out != nil {
		out.compose = p
	}
	return out, err
}

// composer calls Docker Compose for one project.
type composer struct {
	argv   []string // docker compose or docker-compose, with the arguments for the file and the name
	temp   string   // a copy of the file, which close removes; empty if none
	name   string   // project name
	errOut io.Writer
}

// findComposer returns a composer for version 2 or 1 of Docker Compose. f may be nil.
func findComposer(ctx context.Context, f *file, name string, errOut io.Writer) (*composer, error) {
	c := &composer{name: name, errOut: errOut}
	if exec.CommandContext(ctx, "docker", "compose", "version").Run() == nil {
		if c.argv = []string{"docker", "compose"}; f != nil {
			c.argv = append(c.argv, "-f", f.path)
		}
	} else if _, err := exec.LookPath("docker-compose"); err == nil {
		if c.argv = []string{"docker-compose"}; f != nil {
			if c.temp, err = f.withoutIdle(); err != nil {
				return nil, err
			}
			c.argv = append(c.argv, "-f", c.temp, "--project-directory", filepath.Dir(f.path))
		}
	} else {
		return nil, errors.New("cannot find Docker Compose, which runs the services of this file: install it, or use --docker=false to run them as containers of lull")
	}
	c.argv = append(c.argv, "-p", name)
	return c, nil
}

// close removes the temporary copy of the file.
func (c *composer) close() {
	if c.temp != "" {
		_ = os.Remove(c.temp)
	}
}

// withoutIdle writes a copy of the file without x-lull, because version 1 of Compose
// replaces a container if x-lull changes. The caller must remove the copy.
func (f *file) withoutIdle() (path string, err error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(f.data, &doc); err != nil {
		return "", f.malformed(err)
	}
	_, services := entry(doc.Content[0], "services")
	for i := 1; services != nil && i < len(services.Content); i += 2 {
		s := services.Content[i]
		if n, _ := entry(s, xLull); n >= 0 {
			s.Content = slices.Delete(s.Content, n, n+2)
		}
	}
	text, err := yaml.Marshal(&doc)
	if err != nil {
		return "", err
	}
	to, err := os.CreateTemp("", "lull-compose-*.yaml")
	if err != nil {
		return "", err
	}
	_, err = to.Write(text)
	return to.Name(), errors.Join(err, to.Close())
}

// entry returns the index and the value of a key in a mapping; -1 and nil if the key
// is missing.
func entry(m *yaml.Node, key string) (int, *yaml.Node) {
	for i := 0; m.Kind == yaml.MappingNode && i+1 < len(m.Content); i += 2 {
		if m.Content[i].Value == key {
			return i, m.Content[i+1]
		}
	}
	return -1, nil
}

// show runs a Compose command and shows its output.
func (c *composer) show(ctx context.Context, args ...string) error {
	cmd := c.command(ctx, args...)
	cmd.Stdout, cmd.Stderr = c.errOut, c.errOut
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("cannot finish %s %s: %w", cmd.Args[0], args[0], err)
	}
	return nil
}

func (c *composer) command(ctx context.Context, args ...string) *exec.Cmd {
	argv := slices.Concat(c.argv, args)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // interrupt, so that it can finish what it has begun
	return cmd
}

// hashes returns Compose's hash of each service in the file.
func (c *composer) hashes(ctx context.Context) (map[string]string, error) {
	out, err := output(c.command(ctx, "config", "--hash", "*"))
	if err != nil {
		return nil, err
	}
	of := map[string]string{}
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 2 {
			of[f[0]] = f[1]
		}
	}
	return of, nil
}

// made is an existing container of a Compose project.
type made struct {
	id, name, service, hash, state string
	number                         int
	labeled                        bool // has the label lull.pause-after, so the host adopts it by itself
}

// containers lists the project's containers, including stopped ones.
func (c *composer) containers(ctx context.Context) ([]made, error) {
	fields := []string{".ID", ".Names"}
	for _, l := range []string{"com.docker.compose.service", "com.docker.compose.config-hash", "com.docker.compose.container-number", "com.docker.compose.oneoff", "lull.pause-after"} {
		fields = append(fields, fmt.Sprintf("(.Label %q)", l))
	}
	format := "{{" + strings.Join(append(fields, ".State"), "}}\t{{") + "}}"
	out, err := output(exec.CommandContext(ctx, "docker", "ps", "--all", "--no-trunc", "--filter", "label=com.docker.compose.project="+c.name, "--format", format))
	if err != nil {
		return nil, err
	}
	var all []made
	for line := range strings.Lines(out) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != len(fields)+1 || strings.EqualFold(f[5], "true") {
			continue
		}
		n, _ := strconv.Atoi(f[4])
		all = append(all, made{id: f[0], name: f[1], service: f[2], hash: f[3], number: n, labeled: f[6] != "", state: f[7]})
	}
	slices.SortFunc(all, func(a, b made) int { return a.number - b.number })
	return all, nil
}

// output runs a command and returns its standard output. The error contains its
// standard error.
func output(cmd *exec.Cmd) (string, error) {
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("cannot run %s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(said.String()))
	}
	return out.String(), nil
}

// planDocker compares a project with its containers and with the instances that
// adopted them, and returns the steps to take.
func planDocker(p *project, hashes map[string]string, made []made, now []hostctl.Instance, only []string, removeOrphans bool) ([]step, error) {
	chosen, err := p.choose(only)
	if err != nil {
		return nil, err
	}
	var steps []step
	known := map[string]bool{}
	for _, s := range p.services {
		known[s.name] = true
		if !chosen[s.name] {
			continue
		}
		st := step{Action: create, Service: s.name, Instance: s.spec.Name, spec: labeled(p.name, s.name, s.spec), after: s.after}
		for _, m := range made {
			if m.service != s.name {
				continue
			}
			o, adopted := adoptedAs(p.name, m, now)
			if adopted {
				st.Instance, st.State = o.Name, o.State
			}
			switch {
			case m.hash != hashes[s.name]:
				st.Action, st.Changed = replace, []string{"container"}
			case m.state != "running" && m.state != "paused" && !(adopted && o.StartsOnConnection):
				st.Action = start
			case !adopted && !m.labeled:
				st.Action = adopt
			case adopted && !m.labeled && o.Labels[labelApplied] != digests(s.spec), adopted && !m.labeled && len(drifted(o, s.spec)) > 0:
				st.Action, st.Changed = change, differing(o.Labels[labelApplied], s.spec)
				st.Changed = slices.Compact(slices.Sorted(slices.Values(append(st.Changed, drifted(o, s.spec)...))))
			default:
				st.Action = unchanged
			}
			if st.Action != unchanged {
				break
			}
		}
		steps = append(steps, st)
	}
	for _, m := range made {
		if known[m.service] || len(only) > 0 {
			continue
		}
		st := step{Action: orphan, Service: m.service, Instance: m.name, State: m.state}
		if removeOrphans {
			st.Action = remove
		}
		steps = append(steps, st)
	}
	return steps, nil
}

// adoptedAs returns the instance that adopted a container, if any.
func adoptedAs(project string, m made, now []hostctl.Instance) (hostctl.Instance, bool) {
	place := fmt.Sprintf("%s/%s/%d", project, m.service, m.number)
	n := slices.IndexFunc(now, func(o hostctl.Instance) bool {
		return o.Runtime == instance.RuntimeDocker && o.Image != "" && (o.Image == place || o.Image == m.name || strings.HasPrefix(m.id, o.Image))
	})
	if n < 0 {
		return hostctl.Instance{}, false
	}
	return now[n], true
}

// applyDocker carries out a plan. Compose creates and starts the services that
// differ, and then each container is adopted with its settings.
func (c verbs) applyDocker(ctx context.Context, cl *hostctl.Client, p *project, compose *composer, steps []step) error {
	var up, gone []string
	for _, s := range steps {
		switch s.Action {
		case create, replace, start:
			up = append(up, s.Service)
		case remove:
			gone = append(gone, s.Instance)
		}
	}
	if len(up) > 0 {
		if err := compose.show(ctx, append([]string{"up", "-d"}, up...)...); err != nil {
			return err
		}
	}
	if len(gone) > 0 {
		if _, err := output(exec.CommandContext(ctx, "docker", append([]string{"rm", "--force"}, gone...)...)); err != nil {
			return err
		}
	}
	all, err := compose.containers(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range steps {
		if s.Action == remove || s.Action == orphan {
			c.said(s.Instance + " " + map[action]string{remove: "removed", orphan: s.text()}[s.Action])
			continue
		}
		for _, m := range all {
			if m.service != s.Service {
				continue
			}
			o, err := c.adoptMade(ctx, cl, p.name, m, s)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", m.name, err))
				continue
			}
			done := map[action]string{create: "created", replace: "replaced", start: "started", adopt: "adopted", unchanged: "unchanged"}[s.Action]
			if s.Action == change {
				done = "changed (" + strings.Join(s.Changed, ", ") + ")"
			}
			c.said(o.Name + " " + done + ", " + o.State)
		}
	}
	return errors.Join(errs...)
}

func (c verbs) said(line string) {
	if !c.JSON {
		fmt.Fprintln(c.Out, line)
	}
}

// adoptLimit is how long the host may take to adopt a new container because of its
// label.
const adoptLimit = 10 * time.Second

// adoptMade adopts a container, or updates the settings of the instance that already
// adopted it.
func (c verbs) adoptMade(ctx context.Context, cl *hostctl.Client, project string, m made, s step) (hostctl.Instance, error) {
	for began := time.Now(); ; {
		now, err := cl.List(ctx)
		if err != nil {
			return hostctl.Instance{}, err
		}
		o, adopted := adoptedAs(project, m, now)
		switch {
		case m.labeled && adopted, adopted && o.Labels[labelApplied] == s.spec.Labels[labelApplied] && len(drifted(o, s.spec)) == 0:
			return o, nil
		case m.labeled && time.Since(began) > adoptLimit:
			return o, fmt.Errorf("the host has not adopted it, although it has the label lull.pause-after. Check that the host runs with --docker, and run lull doctor")
		case m.labeled:
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
				return o, ctx.Err()
			}
			continue
		case !adopted:
			name := s.spec.Name
			if m.number > 1 {
				name += "-" + strconv.Itoa(m.number)
			}
			if o, err = cl.Adopt(ctx, hostctl.Adopt{Container: m.name, Name: name, PauseAfter: s.spec.PauseAfter, StopAfter: s.spec.StopAfter}); err != nil {
				return o, err
			}
		}
		names := []string{"reclaim_after", "quiet_connection_after", "labels"}
		for name, set := range map[string]bool{"pause_after": s.spec.PauseAfter != nil, "stop_after": s.spec.StopAfter != nil, "idle_policy": s.spec.IdlePolicy != ""} {
			if set {
				names = append(names, name)
			}
		}
		change, _ := changeOf(names, s.spec)
		change.Labels = s.spec.Labels
		return cl.Change(ctx, o.Name, change)
	}
}

// upDocker applies a project that Docker Compose runs, once.
func (c verbs) upDocker(ctx context.Context, cl *hostctl.Client, f *file, p *project, only []string, dry, orphans bool) ([]step, error) {
	status, err := cl.Status(ctx)
	if err == nil && !status.FollowsDocker {
		err = errors.New("cannot run the services of this file: this host follows no containers; start it with lull host --docker, or use --docker=false to run them as containers of lull")
	}
	if err != nil {
		return nil, err
	}
	compose, err := findComposer(ctx, f, p.name, c.Err)
	if err != nil {
		return nil, err
	}
	defer compose.close()
	hashes, err := compose.hashes(ctx)
	if err != nil {
		return nil, err
	}
	made, err := compose.containers(ctx)
	if err != nil {
		return nil, err
	}
	now, err := cl.List(ctx)
	if err != nil {
		return nil, err
	}
	steps, err := planDocker(p, hashes, made, now, only, orphans)
	if err != nil || dry {
		return steps, err
	}
	return steps, c.applyDocker(ctx, cl, p, compose, steps)
}

// downDocker releases the instances of a project and then lets Compose remove the
// containers. Released first, no instance is woken by a client. f may be nil.
func (c verbs) downDocker(ctx context.Context, cl *hostctl.Client, f *file, name string, members []hostctl.Instance, dry bool) error {
	compose, err := findComposer(ctx, f, name, c.Err)
	if err != nil {
		return err
	}
	defer compose.close()
	all, err := compose.containers(ctx)
	if err != nil {
		return err
	}
	steps := make([]step, 0, len(all))
	for _, m := range all {
		st := step{Action: remove, Service: m.service, Instance: m.name, State: m.state}
		if o, ok := adoptedAs(name, m, members); ok {
			st.Instance, st.State = o.Name, o.State
		}
		steps = append(steps, st)
	}
	if !dry {
		err = c.removeDocker(ctx, cl, compose, members)
	}
	switch {
	case c.JSON:
		return errors.Join(c.Print(result{Project: name, DryRun: dry, Steps: steps, Notes: []string{}}, nil), err)
	case len(steps) == 0:
		c.said("Nothing of " + name + " is left.")
	case dry:
		writePlan(c.Out, steps)
	case err == nil:
		for _, s := range steps {
			c.said(s.Instance + " removed")
		}
	}
	return err
}

func (c verbs) removeDocker(ctx context.Context, cl *hostctl.Client, compose *composer, members []hostctl.Instance) error {
	for _, o := range members {
		if err := cl.ReleaseAdopted(ctx, o.Name); err != nil {
			if p, ok := errors.AsType[*httpx.Problem](err); !ok || p.Status != http.StatusConflict { // an instance with a label cannot be released; it is removed with its container
				return err
			}
		}
	}
	return compose.show(ctx, "down", "--remove-orphans")
}

// dockerMembers returns the instances that adopted containers of a project.
func dockerMembers(name string, now []hostctl.Instance) (out []hostctl.Instance) {
	for _, o := range now {
		if o.Runtime == instance.RuntimeDocker && (o.Labels[labelProject] == name || strings.HasPrefix(o.Image, name+"/")) {
			out = append(out, o)
		}
	}
	return out
}
