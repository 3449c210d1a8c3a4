package term

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/term"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

// Lasting formats a duration; "-" if it is not positive.
func Lasting(d time.Duration) string {
	if d <= 0 {
		return "-"
	}
	return Span(d)
}

// Time formats t in local time. All verbs use it to print times.
func Time(t time.Time) string { return t.Local().Format(time.DateTime) }

var stamp = regexp.MustCompile(`\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)`)

// Localized returns a sentence of the API with its RFC 3339 times formatted by Time.
func Localized(sentence string) string {
	return stamp.ReplaceAllStringFunc(sentence, func(s string) string {
		t, err := time.Parse(time.RFC3339, s)
		if err != nil {
			return s
		}
		return Time(t)
	})
}

// Count returns n and a noun, with an s unless n is 1.
func Count(n uint64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// SlowAfter is how long a verb of a host runs before it shows progress.
const SlowAfter = 2 * time.Second

// IsTerminal reports whether a stream of this process is a terminal.
func IsTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Dash returns s, or "-" for an empty column.
func Dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// Span formats a duration for users.
func Span(d time.Duration) string { return idle.Human(d) }

// Size formats a number of bytes with a unit.
func Size(n int64) string { return instance.Bytes(n) }

// Red returns s in red if Out is a terminal.
func (c *Term) Red(s string) string {
	if c.Getenv("NO_COLOR") != "" || c.Getenv("TERM") == "" || !IsTerminal(c.Out) {
		return s
	}
	return "\x1b[1;31m" + s + "\x1b[0m"
}

// Complain prints err to standard error.
func (c *Term) Complain(err error) {
	fmt.Fprintln(c.Err, "lull: "+Localized(strings.TrimSuffix(err.Error(), "\n")))
}

// Print prints v in the requested output format; for text it calls text. The writer
// that text gets has the width of the terminal.
func (c *Term) Print(v any, text func(w io.Writer)) error {
	if !c.JSON {
		text(narrow{c.Out, c.width})
		return nil
	}
	if l := reflect.ValueOf(v); l.Kind() == reflect.Slice && l.IsNil() {
		v = []struct{}{} // an empty listing is still an array
	}
	var err error
	switch c.output {
	case "yaml":
		err = writeYaml(c.Out, v)
	case "name":
		err = names(c.Out, v)
	default:
		e := json.NewEncoder(c.Out)
		e.SetIndent("", "  ")
		err = e.Encode(v)
	}
	if err != nil {
		return fmt.Errorf("cannot print: %w", err)
	}
	return nil
}

// plain returns v as maps and slices, with the fields of its JSON.
func plain(v any) (out any, err error) {
	b, err := json.Marshal(v)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		err = d.Decode(&out)
	}
	return out, err
}

// names prints the name of an object, or of each object in a listing, one per line.
// An object without a name is printed by its ID.
func names(w io.Writer, v any) error {
	p, err := plain(v)
	if err != nil {
		return err
	}
	l, is := p.([]any)
	if !is {
		l = []any{p}
	}
	for _, o := range l {
		fields, _ := o.(map[string]any)
		name := ""
		for _, key := range []string{"name", "key", "ec2_instance_id", "id"} {
			if s, is := fields[key].(string); is && s != "" {
				name = s
				break
			}
		}
		if name == "" {
			return errors.New("the object has no name; use -o json")
		}
		if _, err := fmt.Fprintln(w, name); err != nil {
			return err
		}
	}
	return nil
}

func writeYaml(w io.Writer, v any) error {
	p, err := plain(v)
	if err != nil {
		return err
	}
	b, err := yaml.Marshal(yamlNumbers(p))
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}

// yamlNumbers replaces the JSON numbers in v by values that YAML writes as numbers.
func yamlNumbers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = yamlNumbers(v[k])
		}
	case []any:
		for i := range v {
			v[i] = yamlNumbers(v[i])
		}
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		f, _ := v.Float64() // the decoder accepted it
		return f
	}
	return v
}

// OptionalTime is like Time, and returns "-" for nil and the zero time.
func OptionalTime(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "-"
	}
	return Time(*t)
}

// YamlText prints an object as YAML, with the field names of its JSON.
func YamlText(w io.Writer, v any) {
	if err := writeYaml(w, v); err != nil {
		fmt.Fprintln(w, v)
	}
}
