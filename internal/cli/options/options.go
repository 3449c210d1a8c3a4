// Package options reads the settings of a process from flags, environment variables
// and a config file, and documents them.
package options

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"lull/internal/cli/term"
	"lull/internal/core/policy/when"
)

// Option is one setting in a struct C: its flag, its environment variable, its unit
// and its description. The flag takes precedence over the environment, the config
// file if there is one, and the default.
type Option[C any] struct {
	Name, Env, Unit, Doc string
	Value                func(*C) any // *string, *time.Duration, *uint or *bool
}

// New returns an Option.
func New[C any](name, env, unit, doc string, value func(*C) any) Option[C] {
	return Option[C]{name, env, unit, doc, value}
}

// Setting is an effective value and its source.
type Setting struct {
	Name    string `json:"name"`
	Env     string `json:"env"`
	Unit    string `json:"unit"`
	Default string `json:"default"`
	Value   string `json:"value"`
	Source  string `json:"source"`
	Doc     string `json:"doc"`
}

func text(p any) string {
	switch v := p.(type) {
	case *string:
		return *v
	case *time.Duration:
		return v.String()
	case *uint:
		return fmt.Sprint(*v)
	case *bool:
		return fmt.Sprint(*v)
	}
	return ""
}

func set(p any, s string) (err error) {
	switch v := p.(type) {
	case *string:
		*v = s
	case *time.Duration:
		*v, err = when.Span(s)
	case *uint:
		_, err = fmt.Sscanf(s, "%d", v)
		if err == nil && fmt.Sprint(*v) != s {
			err = errors.New("not a number")
		}
	case *bool:
		switch s {
		case "true", "1":
			*v = true
		case "false", "0":
			*v = false
		default:
			err = errors.New("want true or false")
		}
	}
	return err
}

// File is a flat YAML mapping, with the line of each entry. The zero File is
// empty.
type File struct {
	name    string
	Data    []byte // the whole file
	entries map[string]*yaml.Node
	keys    []string // keys in the order of the file
}

// maxFile is the maximum size of a config file in bytes.
const maxFile = 1 << 20

// ReadFile reads the file called name. If name is empty, it returns an empty File.
func ReadFile(name string) (File, error) {
	f := File{name: name, entries: map[string]*yaml.Node{}}
	if name == "" {
		return f, nil
	}
	var err error
	if f.Data, err = os.ReadFile(name); err != nil {
		return f, fmt.Errorf("cannot read the config file: %w", err)
	}
	if len(f.Data) > maxFile {
		return f, fmt.Errorf("cannot read %s: it has %d bytes, the limit is %d", name, len(f.Data), maxFile)
	}
	var doc, more yaml.Node
	in := yaml.NewDecoder(bytes.NewReader(f.Data))
	if err := in.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return f, fmt.Errorf("cannot read %s: %w", name, err)
	}
	if len(doc.Content) > 0 {
		if err := in.Decode(&more); !errors.Is(err, io.EOF) {
			return f, fmt.Errorf("cannot read %s: want one YAML document, found more than one", name)
		}
	}
	if len(doc.Content) == 0 {
		return f, nil
	}
	m := doc.Content[0]
	if m.Kind != yaml.MappingNode {
		return f, fmt.Errorf("cannot read %s, line %d: want name: value", name, m.Line)
	}
	var errs []error
	for i := 0; i+1 < len(m.Content); i += 2 {
		k, v := m.Content[i], m.Content[i+1]
		if old := f.entries[k.Value]; old != nil {
			errs = append(errs, fmt.Errorf("cannot use %s in %s, line %d: already set in line %d", k.Value, name, k.Line, old.Line))
			continue
		}
		f.entries[k.Value], f.keys = v, append(f.keys, k.Value)
	}
	return f, errors.Join(errs...)
}

// Rename replaces former names of settings by the present ones, as mapped by former.
// It returns an error for each setting that is present under both names.
func (f *File) Rename(former map[string]string) error {
	var errs []error
	for i, k := range f.keys {
		now, ok := former[k]
		if !ok {
			continue
		}
		v := f.entries[k]
		if other := f.entries[now]; other != nil {
			errs = append(errs, fmt.Errorf("cannot use %s in %s, line %d: it is the former name of %s, which line %d sets", k, f.name, v.Line, now, other.Line))
			continue
		}
		delete(f.entries, k)
		f.entries[now], f.keys[i] = v, now
	}
	return errors.Join(errs...)
}

// Unknown returns an error for each entry that is not an option and for which also
// returns false.
func Unknown[C any](f File, options []Option[C], also func(key string) bool) error {
	var errs []error
	for _, k := range f.keys {
		if !slices.ContainsFunc(options, func(o Option[C]) bool { return o.Name == k }) && !also(k) {
			errs = append(errs, fmt.Errorf("cannot use %s in %s, line %d: unknown setting", k, f.name, f.entries[k].Line))
		}
	}
	return errors.Join(errs...)
}

// Read sets cfg from file, environment and flags, over the defaults that it contains.
// It returns every setting with its source, and every fault with its line, variable
// or flag.
func Read[C any](cfg *C, options []Option[C], file File, getenv func(string) string, flags *pflag.FlagSet) ([]Setting, error) {
	var out []Setting
	var errs []error
	for _, o := range options {
		p := o.Value(cfg)
		s := Setting{Name: o.Name, Env: o.Env, Unit: o.Unit, Default: text(p), Source: "default", Doc: o.Doc}
		use := func(value, source, named string) {
			s.Source = source
			if err := set(p, value); err != nil {
				errs = append(errs, fmt.Errorf("cannot use %s: %q is not a %s", named, value, o.Unit))
			}
		}
		if n, ok := file.entries[o.Name]; ok {
			at := fmt.Sprintf("%s, line %d", file.name, n.Line)
			if n.Kind != yaml.ScalarNode {
				errs = append(errs, fmt.Errorf("cannot use %s in %s: want a single value", o.Name, at))
			} else {
				use(n.Value, "file "+at, o.Name+" in "+at)
			}
		}
		if e := getenv(o.Env); e != "" {
			use(e, "environment "+o.Env, o.Env)
		}
		if f := flags.Lookup(o.Name); f != nil && f.Changed {
			use(f.Value.String(), "flag --"+o.Name, "--"+o.Name)
		}
		s.Value = text(p)
		out = append(out, s)
	}
	return out, errors.Join(errs...)
}

// Bind defines the flags of options, with the defaults in def. Read reads their
// values.
func Bind[C any](f *pflag.FlagSet, def C, options []Option[C]) {
	for _, o := range options {
		if p := o.Value(&def); isBool(p) {
			f.Bool(o.Name, false, o.Doc)
		} else {
			f.String(o.Name, text(p), fmt.Sprintf("%s ($%s)", o.Doc, o.Env))
		}
	}
}

func isBool(p any) bool { _, ok := p.(*bool); return ok }

// Rows writes the rows of a table of options, for a generated page.
func Rows[C any](b *strings.Builder, def C, options []Option[C]) {
	b.WriteString("| setting | flag | environment | unit | default | meaning |\n|---|---|---|---|---|---|\n")
	for _, o := range options {
		fmt.Fprintf(b, "| %s | `--%s` | `%s` | %s | %s | %s |\n", o.Name, o.Name, o.Env, strings.ReplaceAll(o.Unit, "|", ", "), text(o.Value(&def)), o.Doc)
	}
}

// Command returns a verb that prints the settings that read returns.
func Command(t *term.Term, use, short string, read func(flags *pflag.FlagSet) ([]Setting, error)) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := read(cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			return t.Print(l, func(w io.Writer) {
				term.Rows(w, "SETTING\tVALUE\tSOURCE\t2:VARIABLE\t1:MEANING", func(row func(string, ...any)) {
					for _, s := range l {
						row("%s\t%s\t%s\t%s\t%s", s.Name, term.Dash(s.Value), s.Source, s.Env, s.Doc)
					}
				})
			})
		}}
}
