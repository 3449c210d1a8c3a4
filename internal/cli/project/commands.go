// Package project implements lull up and lull down for a project: the services
// that a lull.yaml or Compose file describes, and the instances that lull up
// creates for them.
package project

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
	"lull/internal/protocol/hostctl"
)

// verbs holds the session that the verbs of this package use.
type verbs struct{ *client.Session }

// Commands returns the verbs lull up and lull down.
func Commands(s *client.Session) []*cobra.Command {
	v := verbs{s}
	return []*cobra.Command{v.upCommand(), v.downCommand()}
}

// source selects a project. file is the path of its file and name its name; empty
// means the default. docker is whether Docker Compose runs its services: auto, true
// or false.
type source struct{ file, name, docker string }

func (s *source) bind(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&s.file, "file", "f", "", "project file (default: lull.yaml, or compose.yaml, of the current folder)")
	cmd.Flags().StringVar(&s.name, "project", "", "name of the project (default: name: of the file, or its folder's name)")
	cmd.Flags().StringVar(&s.docker, "docker", "auto", "run the services with Docker Compose and let lull pause their containers: true, false, or auto (true unless the file is a lull.yaml or a service has neither image nor build)")
	cmd.Flags().Lookup("docker").NoOptDefVal = "true"
	term.CompleteWords(cmd, "docker", "auto", "true", "false")
}

// path returns the path of the project file.
func (s *source) path() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("cannot find the working directory: %w", err)
	}
	return find(wd, s.file)
}

// open reads the file and converts it to a project.
func (s *source) open(ctx context.Context, env []string) (*file, *project, []string, error) {
	path, err := s.path()
	if err != nil {
		return nil, nil, nil, err
	}
	f, err := read(path)
	if err != nil {
		return nil, nil, nil, err
	}
	docker := s.docker == "true"
	switch s.docker {
	case "true", "false":
	case "", "auto":
		docker = f.inDocker()
	default:
		return nil, nil, nil, fmt.Errorf("cannot use --docker=%s: want true, false or auto", s.docker)
	}
	loaded, notes, err := load(ctx, f, s.name, env, docker)
	if err != nil {
		return f, nil, nil, err
	}
	if docker {
		p, err := describeDocker(f, loaded)
		return f, p, nil, err
	}
	p, err := describe(f, loaded)
	return f, p, notes, err
}

// result is the JSON output of lull up and lull down.
type result struct {
	Project string   `json:"project"`
	File    string   `json:"file,omitempty"`
	DryRun  bool     `json:"dry_run"`
	Steps   []step   `json:"steps"`
	Notes   []string `json:"notes"`
}

const upHelp = `Create, change and start the services of a project file, so that they are as the file
says, and print what was done. What is already as the file says is left alone, asleep
or not: running lull up again does nothing.

A lull.yaml is a Compose file. Beside Compose's attributes, a service may have
pause_after, stop_after and the others of lull config --schema. Without an image,
command is a program of this machine.

A compose.yaml whose services have images is taken as it is: Docker Compose creates
their containers, and lull, which must follow Docker (lull host --docker), lets them
sleep. Its services may have the settings below x-lull, or as labels
(lull.pause-after). --docker=false runs them as containers of lull instead.

Each service is an instance with the name PROJECT-SERVICE, which ps, why, logs and
the other verbs take. Services reach each other, and you reach them, at their ports
on 127.0.0.1. A service starts after those it depends on listen.

A change of a timer, of wake or of restart takes effect while the service runs or
sleeps. Any other replaces the instance. A service that is no longer in the file is
left alone, unless --remove-orphans.`

const upExample = `  lull up
  lull up --dry-run
  lull up -f compose.yaml --watch`

func (c verbs) upCommand() *cobra.Command {
	var s source
	var dry, orphans, watch bool
	cmd := &cobra.Command{Use: "up [SERVICE...]", Short: "Create and start the services of a lull.yaml or compose.yaml", Long: upHelp, Example: upExample,
		Args: term.Args(cobra.ArbitraryArgs)}
	s.bind(cmd)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print what would be done, and do nothing")
	cmd.Flags().BoolVar(&orphans, "remove-orphans", false, "remove instances of the project that are not in the file")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "keep running and apply the file again whenever it changes, until Ctrl-C")
	cmd.ValidArgsFunction = func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		_, p, _, err := s.open(cmd.Context(), os.Environ())
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var names []string
		for _, s := range p.services {
			names = append(names, s.name)
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	cmd.RunE = func(cmd *cobra.Command, only []string) error {
		if watch && (dry || c.JSON) {
			return term.Usage(errors.New("cannot use --watch with --dry-run or --json"))
		}
		once := func() error { return c.up(cmd.Context(), &s, only, dry, orphans) }
		if !watch {
			return once()
		}
		path, err := s.path()
		if err != nil {
			return term.Usage(err)
		}
		return c.watch(cmd.Context(), path, once)
	}
	return cmd
}

// up applies the project file once.
func (c verbs) up(ctx context.Context, s *source, only []string, dry, orphans bool) error {
	f, p, notes, err := s.open(ctx, os.Environ())
	if err != nil {
		return term.Usage(err)
	}
	cl, err := c.HostClient()
	if err != nil {
		return err
	}
	if !c.JSON {
		for _, n := range notes {
			fmt.Fprintln(c.Err, "lull:", n)
		}
	}
	var steps []step
	if p.compose != nil {
		steps, err = c.upDocker(ctx, cl, f, p, only, dry, orphans)
	} else {
		steps, err = c.upHere(ctx, cl, p, only, dry, orphans)
	}
	if steps == nil {
		return err
	}
	r := result{Project: p.name, File: f.path, DryRun: dry, Steps: steps, Notes: append([]string{}, notes...)}
	if c.JSON {
		return errors.Join(c.Print(r, nil), err)
	}
	if dry {
		return c.Print(r, func(w io.Writer) { writePlan(w, steps) })
	}
	return err
}

// upHere applies a project whose services are instances of lull, once.
func (c verbs) upHere(ctx context.Context, cl *hostctl.Client, p *project, only []string, dry, orphans bool) ([]step, error) {
	now, err := cl.List(ctx)
	if err != nil {
		return nil, err
	}
	steps, err := plan(p, now, only, orphans)
	if err != nil {
		return nil, term.Usage(err)
	}
	if dry {
		return steps, nil
	}
	return steps, c.apply(ctx, cl, steps)
}

// writePlan prints a plan, one line per step.
func writePlan(w io.Writer, steps []step) {
	wide := 0
	for _, s := range steps {
		wide = max(wide, len(s.Instance))
	}
	for _, s := range steps {
		fmt.Fprintf(w, "%s  %-*s  %s\n", map[action]string{create: "+", adopt: "+", change: "~", replace: "±", start: "+", unchanged: "=", remove: "-", orphan: "?"}[s.Action], wide, s.Instance, s.text())
	}
}

// text returns what the step does, in a few words.
func (s step) text() string {
	switch s.Action {
	case change, replace:
		return string(s.Action) + ": " + strings.Join(s.Changed, ", ")
	case unchanged:
		return "unchanged, " + s.State
	case orphan:
		return "not in the file; --remove-orphans removes it"
	}
	return string(s.Action)
}

// apply carries out a plan. It skips services whose dependency has failed, and prints
// each failure as it happens; the error only counts them.
func (c verbs) apply(ctx context.Context, cl *hostctl.Client, steps []step) error {
	failed := map[string]bool{}
	for n := range steps {
		s := &steps[n]
		var err error
		if dep := slices.IndexFunc(s.after, func(d string) bool { return failed[d] }); dep >= 0 {
			err = fmt.Errorf("%s depends on %s, which failed", s.Service, s.after[dep])
		} else {
			err = c.applyStep(ctx, cl, s)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed[s.Service], s.Error = true, err.Error()
			if !c.JSON {
				c.Complain(fmt.Errorf("%s: %w", s.Instance, err))
			}
		}
	}
	if len(failed) > 0 {
		return term.Exit(term.ExitFailed)
	}
	return nil
}

// applyStep carries out one step and prints the resulting state of the
// instance.
func (c verbs) applyStep(ctx context.Context, cl *hostctl.Client, s *step) error {
	p := c.Progress()
	p.Status(string(s.Action) + " " + s.Instance)
	var o hostctl.Instance
	var err error
	done := ""
	switch s.Action {
	case unchanged:
		done = "unchanged, " + s.State
	case orphan:
		done = s.text()
	case create:
		o, err = cl.Create(ctx, hostctl.Create{Spec: s.spec, Start: true, RemoveFailed: true})
		done = "created, "
	case replace:
		o, err = cl.Create(ctx, hostctl.Create{Spec: s.spec, Replace: true})
		done = "replaced (" + strings.Join(s.Changed, ", ") + "), "
	case change:
		if o, err = cl.Change(ctx, s.Instance, s.change); err == nil && rests(o) {
			o, err = cl.Do(ctx, s.Instance, "start", nil)
		}
		done = "changed (" + strings.Join(s.Changed, ", ") + "), "
	case start:
		o, err = cl.Do(ctx, s.Instance, "start", nil)
		done = "started, "
	case remove:
		err = cl.Remove(ctx, s.Instance)
		done = "removed"
	}
	p.Close()
	if err != nil {
		return err
	}
	if !c.JSON {
		fmt.Fprintf(c.Out, "%s %s%s\n", s.Instance, done, stateText(o))
	}
	return nil
}

// stateText formats the state of an instance and its client addresses; empty
// for the zero Instance.
func stateText(o hostctl.Instance) string {
	text := o.State
	for n, e := range o.Endpoints {
		text += map[bool]string{true: " on ", false: ", "}[n == 0] + e.Listen
	}
	return text
}

// complain prints err, unless it is nil or was already printed by apply.
func (c verbs) complain(err error) {
	if _, shown := errors.AsType[*term.ExitError](err); err != nil && !shown {
		c.Complain(err)
	}
}

// watchEvery is the interval at which a watched file is checked for changes.
const watchEvery = time.Second

// watch calls apply now and after each change of the file, until ctx ends. If apply
// fails, it waits for the next change.
func (c verbs) watch(ctx context.Context, path string, apply func() error) error {
	content := func() string {
		data, _ := os.ReadFile(path)
		vars, _ := os.ReadFile(filepath.Join(filepath.Dir(path), ".env"))
		return string(data) + "\x00" + string(vars)
	}
	last := content() // read before apply, so that no change is missed
	c.complain(apply())
	fmt.Fprintf(c.Err, "lull: watching %s; Ctrl-C stops watching; the services continue\n", path)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchEvery):
		}
		now := content()
		if now == last || strings.HasPrefix(now, "\x00") { // a NUL means that the file is missing or incomplete, as while an editor replaces it
			continue
		}
		last = now
		if err := apply(); ctx.Err() == nil {
			c.complain(err)
		}
	}
}

func (c verbs) downCommand() *cobra.Command {
	var s source
	var dry bool
	cmd := &cobra.Command{Use: "down", Short: "Stop and remove the services that lull up created", Args: term.Args(cobra.NoArgs),
		Long: `Stop and remove all instances of a project, also those that are no longer in its file,
each before the services it depends on. With --project, no file is needed.`,
		Example: "  lull down\n  lull down --project shop --dry-run"}
	s.bind(cmd)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "print what would be done, and do nothing")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		f, p, _, err := s.open(cmd.Context(), os.Environ())
		if err != nil && s.name == "" {
			return term.Usage(err)
		}
		if err != nil {
			p = nil // without the file, only the order of stopping is unknown
		} else {
			s.name = p.name
		}
		cl, err := c.HostClient()
		if err != nil {
			return err
		}
		now, err := cl.List(cmd.Context())
		if err != nil {
			return err
		}
		if members := dockerMembers(s.name, now); len(members) > 0 || p != nil && p.compose != nil {
			return c.downDocker(cmd.Context(), cl, f, s.name, members, dry)
		}
		steps := teardown(s.name, p, now)
		if !dry {
			err = c.apply(cmd.Context(), cl, steps)
		}
		if c.JSON {
			return errors.Join(c.Print(result{Project: s.name, DryRun: dry, Steps: append([]step{}, steps...), Notes: []string{}}, nil), err)
		}
		switch {
		case len(steps) == 0:
			fmt.Fprintf(c.Out, "%s has no instances anymore.\n", s.name)
		case dry:
			writePlan(c.Out, steps)
		}
		return err
	}
	return cmd
}
