package term

import (
	"fmt"
	"io"
	"strings"
	"text/template"
)

// FormatHelp is the help text of the flag --format.
const FormatHelp = "print each object with a Go template of its JSON fields, such as '{{.name}} {{.state}}'"

// Formatted prints v with a Go template over the fields of its JSON; if v is a
// listing, each object in it. It returns a usage error if the template is invalid or
// names an unknown field.
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

// templateFault returns the message of a text/template error, without the position in
// the template package's code.
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
