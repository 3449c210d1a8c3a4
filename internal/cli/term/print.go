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

// Lasting is a length, or that there is none.
func Lasting(d time.Duration) string {
	if d <= 0 {
		return "-"
	}
	return Span(d)
}

// Time returns t in local time, the one way in which verbs print a time.
func Time(t time.Time) string { return t.Local().Format(time.DateTime) }

var stamp = regexp.MustCompile(`\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)`)

// Localized returns a sentence of the API with its RFC 3339 times as Time
// prints them.
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

// SlowAfter is the time after which a verb of a host shows progress.
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

// Size returns a number of bytes with its unit.
func Size(n int64) string { return instance.Bytes(n) }

// Red marks what must not be overlooked, on a terminal.
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

// Print shows v in the format that was asked for, or as text. The w of text has
// the width of the terminal.
func (c *Term) Print(v any, text func(w io.Writer)) error {
	if !c.JSON {
		text(narrow{c.Out, c.width})
		return nil
	}
	if l := reflect.ValueOf(v); l.Kind() == reflect.Slice && l.IsNil() {
		v = []struct{}{} // a listing is an array even if it is empty
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

// plain returns v as the JSON of the API has it, in maps and slices.
func plain(v any) (out any, err error) {
	b, err := json.Marshal(v)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		err = d.Decode(&out)
	}
	return out, err
}

// names prints the name of an object, or of each in a listing, one per line; the
// ID of what has no name.
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

// yamlNumbers replaces the numbers of JSON by such as YAML writes as numbers.
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

// OptionalTime returns t as Time does, or "-" for nil and the zero time.
func OptionalTime(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "-"
	}
	return Time(*t)
}

// YamlText shows an object as YAML with the names that the API has.
func YamlText(w io.Writer, v any) {
	if err := writeYaml(w, v); err != nil {
		fmt.Fprintln(w, v)
	}
}
