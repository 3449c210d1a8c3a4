package term

import (
	"fmt"
	"io"
	"strings"
	"text/template"
)

// FormatHelp is the help text of every --format.
const FormatHelp = "print each object with a Go template of its JSON fields, such as '{{.name}} {{.state}}'"

// Formatted prints each object of v, a listing or one object, with a Go template
// over the fields that its JSON has. It returns a usage error for a template that
// cannot be read or names an unknown field.
func Formatted(w io.Writer, text string, v any) error {
	text = strings.NewReplacer(`\t`, "\t", `\n`, "\n").Replace(text)
	t, err := template.New("format").Option("missingkey=error").Parse(text)
	if err != nil {
		return Usage(fmt.Errorf("cannot read --format: %s", templateFault(err)))
	}
	p, err := plain(v)
	if err != nil {
		return fmt.Errorf("cannot print: %w", err)
	}
	l, is := p.([]any)
	if !is {
		l = []any{p}
	}
	for _, o := range l {
		var b strings.Builder
		if err := t.Execute(&b, o); err != nil {
			return Usage(fmt.Errorf("cannot use --format: %s; see the fields with: -o json", templateFault(err)))
		}
		if _, err := fmt.Fprintln(w, b.String()); err != nil {
			return fmt.Errorf("cannot print: %w", err)
		}
	}
	return nil
}

// templateFault returns the fault that text/template found, without the position in its code.
func templateFault(err error) string {
	s := strings.TrimPrefix(err.Error(), "template: format:")
	if _, after, ok := strings.Cut(s, ">: "); ok {
		s = after
	}
	if key, ok := strings.CutPrefix(s, "map has no entry for key "); ok {
		s = "there is no field " + key
	}
	return s
}
