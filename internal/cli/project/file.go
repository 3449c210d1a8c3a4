package project

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/compose-spec/compose-go/v2/dotenv"
	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/sirupsen/logrus"
	"go.yaml.in/yaml/v3"
)

// names are the default names of the project file, in order of preference.
var names = []string{"lull.yaml", "lull.yml", "compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml"}

// maxFile is the maximum size of a project file in bytes.
const maxFile = 1 << 20

// nothing is a placeholder image for services without an image, because
// compose-go requires one.
const nothing = "lull.invalid/process"

// xLull is the extension attribute of a service that contains its idle settings.
const xLull = "x-lull"

// file is a project file as YAML nodes, which have line numbers.
type file struct {
	path string // absolute
	data []byte
	root *yaml.Node // the top-level mapping
}

// find returns the path of the project file: given if not empty, otherwise the first
// of names that exists in folder.
func find(folder, given string) (string, error) {
	if given != "" {
		return filepath.Abs(given)
	}
	for _, name := range names {
		path := filepath.Join(folder, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("cannot find lull.yaml or compose.yaml in %s: name a file with -f", folder)
}

// read reads a project file. The error for invalid YAML names the line.
func read(path string) (*file, error) {
	data, err := os.ReadFile(path)
	switch {
	case err != nil:
		return nil, fmt.Errorf("cannot read the project: %w", err)
	case len(data) > maxFile:
		return nil, fmt.Errorf("cannot read %s: it has %d bytes, the limit is %d", path, len(data), maxFile)
	}
	f := &file{path: path, data: data}
	var doc, more yaml.Node
	in := yaml.NewDecoder(bytes.NewReader(data))
	if err := in.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return nil, f.malformed(err)
	}
	if len(doc.Content) == 0 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, f.fault(nil, "want a mapping with services:")
	}
	if err := in.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, f.fault(nil, "want one YAML document, found more than one")
	}
	f.root = doc.Content[0]
	return f, nil
}

// yamlFault matches an error of the YAML package; its groups are the line and the
// message.
var yamlFault = regexp.MustCompile(`(?s)^yaml: (?:unmarshal errors:\s*)?line (\d+): ([^\n]*)`)

// malformed adds the file name to an error of the YAML package.
func (f *file) malformed(err error) error {
	name := filepath.Base(f.path)
	if m := yamlFault.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Errorf("%s:%s: %s", name, m[1], m[2])
	}
	return fmt.Errorf("%s: %s", name, strings.TrimPrefix(err.Error(), "yaml: "))
}

// line returns the line of path in the file or, if path does not exist, of its
// deepest existing parent; 0 if there is none.
func (f *file) line(path ...string) (line int) {
	for at := f.root; len(path) > 0 && at != nil; path = path[1:] {
		for at.Kind == yaml.AliasNode {
			at = at.Alias
		}
		next := (*yaml.Node)(nil)
		for i := 0; at.Kind == yaml.MappingNode && i+1 < len(at.Content); i += 2 {
			if at.Content[i].Value == path[0] {
				line, next = at.Content[i].Line, at.Content[i+1]
			}
		}
		if n, err := strconv.Atoi(path[0]); at.Kind == yaml.SequenceNode && err == nil && n < len(at.Content) {
			next = at.Content[n]
			line = next.Line
		}
		at = next
	}
	return line
}

// fault returns an error about path, with its line.
func (f *file) fault(path []string, format string, args ...any) error {
	where := filepath.Base(f.path)
	if n := f.line(path...); n > 0 {
		where += ":" + strconv.Itoa(n)
	}
	if len(path) > 0 {
		where += ": " + strings.Join(path, ".")
	}
	return fmt.Errorf("%s: %s", where, fmt.Sprintf(format, args...))
}

// load parses a project with compose-go. name, if not empty, is the project's name.
// Variables come from env, as KEY=VALUE, and from .env beside the file. notes name
// attributes that have no effect. With any set, attributes that lull does not support
// are accepted.
func load(ctx context.Context, f *file, name string, env []string, any bool) (p *types.Project, notes []string, err error) {
	logrus.SetOutput(io.Discard) // discards compose-go's warnings, because our own have lines
	tree, err := f.tree()
	if err != nil {
		return nil, nil, err
	}
	vars, err := variables(filepath.Dir(f.path), env)
	if err != nil {
		return nil, nil, err
	}
	l := reading{f: f, name: name, vars: vars}
	p, unfit, err := l.read(ctx, tree)
	if err != nil {
		return nil, nil, f.explain(err, l.culprit(ctx, err))
	}
	if any {
		return p, nil, nil
	}
	var errs []error
	for _, path := range unfit {
		if _, active := p.Services[path[1]]; active {
			errs = append(errs, f.fault(path, "lull does not support this attribute for its own containers; with --docker, Docker Compose does"))
		}
	}
	if len(errs) > 0 {
		slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
		return nil, nil, errors.Join(errs...)
	}
	for _, name := range p.ServiceNames() {
		for _, attr := range ignoredFields {
			if n := f.line("services", name, attr); n > f.line("services", name) {
				notes = append(notes, fmt.Sprintf("%s:%d: services.%s.%s has no effect", filepath.Base(f.path), n, name, attr))
			}
		}
	}
	return p, notes, nil
}

// reading is one parse of a file by compose-go.
type reading struct {
	f    *file
	name string // project name; empty selects the name in the file or the folder's
	vars types.Mapping
}

// read parses a tree with compose-go. It returns the project and the paths of
// unsupported attributes.
func (l reading) read(ctx context.Context, tree map[string]any) (p *types.Project, unfit [][]string, err error) {
	folder := filepath.Dir(l.f.path)
	p, err = loader.LoadWithContext(ctx, types.ConfigDetails{WorkingDir: folder, Environment: l.vars, ConfigFiles: []types.ConfigFile{{Filename: l.f.path, Config: tree}}},
		func(o *loader.Options) {
			o.SetProjectName(loader.NormalizeProjectName(filepath.Base(folder)), false)
			if l.name != "" {
				o.SetProjectName(l.name, true)
			}
			o.ResolvePaths = true
			o.Profiles = strings.FieldsFunc(l.vars["COMPOSE_PROFILES"], func(r rune) bool { return r == ',' })
		}, loader.WithUnsupportedAttributesCheck(refused(), func(found []loader.UnsupportedAttribute) {
			for _, u := range found {
				unfit = append(unfit, u.Path.Parts())
			}
		}))
	return p, unfit, err
}

// culprit returns the path of the attribute that makes a parse fail. It looks for the
// service that fails with the same error when parsed alone, and then for the
// attribute without which that service parses. If it finds only the service, it
// returns that; otherwise nil.
func (l reading) culprit(ctx context.Context, failed error) []string {
	whole, err := l.f.tree()
	if err != nil {
		return nil
	}
	fails := func(service, without string) bool {
		tree, _ := l.f.tree()
		services, _ := tree["services"].(map[string]any)
		s, ok := services[service].(map[string]any)
		if !ok {
			return false
		}
		delete(s, "depends_on")
		delete(s, without)
		tree["services"] = map[string]any{service: s}
		_, _, err := l.read(ctx, tree)
		return err != nil && err.Error() == failed.Error()
	}
	services, _ := whole["services"].(map[string]any)
	for name, v := range services {
		if !fails(name, "") {
			continue
		}
		s, _ := v.(map[string]any)
		for attr := range s {
			if !fails(name, attr) {
				return []string{"services", name, attr}
			}
		}
		return []string{"services", name}
	}
	return nil
}

// tree returns the file in the form that compose-go parses. The caller may change it.
func (f *file) tree() (map[string]any, error) {
	var tree map[string]any
	if err := f.root.Decode(&tree); err != nil {
		return nil, f.malformed(err)
	}
	return tree, f.lift(tree)
}

// variables returns the variables in env and in the file .env in folder; those in env
// take precedence.
func variables(folder string, env []string) (types.Mapping, error) {
	own := types.NewMapping(env)
	path := filepath.Join(folder, ".env")
	if _, err := os.Stat(path); err != nil {
		return own, nil
	}
	vars, err := dotenv.ReadWithLookup(func(k string) (string, bool) { v, ok := own[k]; return v, ok }, path)
	if err != nil {
		return nil, fmt.Errorf("cannot read %s: %w", path, err)
	}
	return own.Merge(vars), nil
}

// lift moves the idle settings of each service, and those in its labels, to the
// extension attribute. The rest is a valid Compose file.
func (f *file) lift(tree map[string]any) error {
	services, _ := tree["services"].(map[string]any)
	for name, v := range services {
		s, ok := v.(map[string]any)
		if !ok {
			continue // compose-go will report this fault
		}
		idle, ok := s[xLull].(map[string]any)
		if !ok && s[xLull] != nil {
			return f.fault([]string{"services", name, xLull}, "want a mapping")
		}
		if idle == nil {
			idle = map[string]any{}
		}
		for _, field := range idleFields {
			if v, ok := s[field.name]; ok {
				if _, twice := idle[field.name]; twice {
					return f.fault([]string{"services", name, field.name}, "set twice: here and in %s", xLull)
				}
				idle[field.name] = v
				delete(s, field.name)
			}
		}
		if len(idle) > 0 {
			s[xLull] = idle
		}
		if s["image"] == nil && s["build"] == nil && s["extends"] == nil && s["provider"] == nil {
			s["image"] = nothing
		}
	}
	return nil
}

// Patterns for the path in an error of compose-go.
var (
	place = regexp.MustCompile(`services\.([\w.-]+(?:\[\d+\])?)`)
	extra = regexp.MustCompile(`additional propert\w+ '([^']+)'`)
	about = regexp.MustCompile(`service "([^"]+)"`)
)

// explain adds the line to an error of compose-go: that of the path in the error,
// otherwise that of the culprit.
func (f *file) explain(err error, culprit []string) error {
	text := strings.TrimPrefix(err.Error(), "validating "+f.path+": ")
	path := culprit
	if m := place.FindStringSubmatch(text); m != nil {
		path = append([]string{"services"}, strings.FieldsFunc(m[1], func(r rune) bool { return r == '.' || r == '[' || r == ']' })...)
	} else if m := about.FindStringSubmatch(text); m != nil && len(path) == 0 {
		path = []string{"services", m[1]}
	}
	if m := extra.FindStringSubmatch(text); m != nil {
		if !place.MatchString(text) {
			path = nil // it is a top-level attribute
		}
		return f.fault(append(path, m[1]), "unknown attribute")
	}
	if len(path) > 0 {
		text = strings.TrimLeft(strings.TrimPrefix(text, strings.Join(path, ".")), ": ")
	}
	if text == "false schema" {
		text = "unknown attribute"
	}
	return f.fault(path, "%s", strings.ReplaceAll(text, f.path, filepath.Base(f.path)))
}
