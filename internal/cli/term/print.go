package term

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"
	"gopkg.in/yaml.v3"

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

// SlowAfter is how long a verb of a host may take before it shows what happens.
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
	fmt.Fprintln(c.Err, "lull: "+strings.TrimSuffix(err.Error(), "\n"))
}

// Print shows v as JSON when asked to, or as text.
func (c *Term) Print(v any, text func(w io.Writer)) error {
	if !c.JSON {
		text(c.Out)
		return nil
	}
	if l := reflect.ValueOf(v); l.Kind() == reflect.Slice && l.IsNil() {
		v = []struct{}{} // a listing is an array, with nothing in it too
	}
	e := json.NewEncoder(c.Out)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("cannot print: %w", err)
	}
	return nil
}

// Table returns a writer that aligns columns separated by tabs. Its Flush prints
// the table to w.
func Table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

// Rows prints rows under a header.
func Rows(w io.Writer, header string, each func(row func(format string, a ...any))) {
	t := Table(w)
	fmt.Fprintln(t, header)
	each(func(format string, a ...any) { fmt.Fprintf(t, format+"\n", a...) })
	t.Flush()
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
	b, err := json.Marshal(v)
	var plain map[string]any
	if err == nil {
		err = json.Unmarshal(b, &plain)
	}
	if err == nil {
		b, err = yaml.Marshal(plain)
	}
	if err != nil {
		fmt.Fprintln(w, v)
		return
	}
	_, _ = w.Write(b) // as with every print to the terminal
}
