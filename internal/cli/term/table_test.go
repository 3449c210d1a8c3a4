package term

import (
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// TestRowsFit checks which columns a table leaves out at various widths.
func TestRowsFit(t *testing.T) {
	long := strings.Repeat("é", 60)
	show := func(width int) (titles []string, widest int) {
		var b strings.Builder
		Rows(narrow{&b, width}, "NAME\t2:ONE\t1:TWO\tLAST", func(row func(string, ...any)) {
			row("%s\t%s\t%s\t%s", long, "aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc")
			row("%s\t%s", "short", "a")
		})
		for l := range strings.Lines(b.String()) {
			widest = max(widest, utf8.RuneCountInString(strings.TrimRight(l, "\n")))
		}
		return strings.Fields(strings.SplitN(b.String(), "\n", 2)[0]), widest
	}
	for _, c := range []struct {
		width int
		want  []string
	}{
		{0, []string{"NAME", "ONE", "TWO", "LAST"}},
		{96, []string{"NAME", "ONE", "TWO", "LAST"}},
		{95, []string{"NAME", "ONE", "LAST"}},
		{84, []string{"NAME", "ONE", "LAST"}},
		{83, []string{"NAME", "LAST"}},
		{40, []string{"NAME", "LAST"}},
	} {
		got, widest := show(c.width)
		if !slices.Equal(got, c.want) || c.width > 0 && widest > c.width {
			t.Errorf("at %d: %v, %d wide; want %v", c.width, got, widest, c.want)
		}
	}
}

// TestFormats checks the output of one listing in every format.
func TestFormats(t *testing.T) {
	type object struct {
		ID   string `json:"id"`
		Name string `json:"name,omitempty"`
		N    int64  `json:"n"`
	}
	l := []object{{"1", "web", 1 << 60}, {"2", "", 3}}
	for format, want := range map[string]string{
		"name": "web\n2\n",
		"yaml": "- id: \"1\"\n  \"n\": 1152921504606846976\n  name: web\n- id: \"2\"\n  \"n\": 3\n",
	} {
		var b strings.Builder
		c := Term{Out: &b, Getenv: func(string) string { return "" }, output: format}
		if err := c.CheckOutput(); err != nil || !c.JSON {
			t.Errorf("%s: %v, JSON %t", format, err, c.JSON)
		}
		if err := c.Print(l, nil); err != nil || b.String() != want {
			t.Errorf("%s: %q, %v", format, b.String(), err)
		}
	}
	var b strings.Builder
	if err := Formatted(&b, `{{.id}}\t{{.n}}`, l); err != nil || b.String() != "1\t1152921504606846976\n2\t3\n" {
		t.Errorf("%q, %v", b.String(), err)
	}
	for _, bad := range []string{"{{", "{{.none}}", "{{.id.x}}"} {
		if err := Formatted(&b, bad, l); err == nil || ExitCode(err) != ExitUsage {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// TestLocalized checks that times in sentences are formatted as in tables, and that
// the rest of a sentence is unchanged.
func TestLocalized(t *testing.T) {
	at := time.Date(2026, 11, 26, 19, 10, 25, 0, time.UTC)
	for sentence, want := range map[string]string{
		"It was paused at 2026-11-26T19:10:25Z: idle.":            "It was paused at " + Time(at) + ": idle.",
		"until 2026-11-26T20:10:25.000000001+01:00.":              "until " + Time(at) + ".",
		"2026-11-26T19:10:25Z and 2026-11-26T19:10:25Z":           Time(at) + " and " + Time(at),
		"release 2026-11-26, id x2026-11-26T19:10:25Z, 1:2:3 9Z":  "release 2026-11-26, id x2026-11-26T19:10:25Z, 1:2:3 9Z",
		"2026-13-45T19:10:25Z, 2026-11-26T19:10:25, 26T19:10:25Z": "2026-13-45T19:10:25Z, 2026-11-26T19:10:25, 26T19:10:25Z",
	} {
		if got := Localized(sentence); got != want {
			t.Errorf("%q became %q, want %q", sentence, got, want)
		}
	}
}

// TestWrapped checks that no line is wider than the writer unless one word is, that
// no word is lost, and that further lines are indented.
func TestWrapped(t *testing.T) {
	const text = "a program that was killed by another one, at 2026-11-26 and/or_a_very_long_word_that_fits_nowhere later"
	for width := range 60 {
		var b strings.Builder
		Wrapped(narrow{&b, width}, "host  ", text)
		lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
		for n, l := range lines {
			body := l[6:]
			if head := l[:6]; (head != "host  ") != (n > 0) || n > 0 && head != "      " {
				t.Errorf("width %d, line %d: %q", width, n, l)
			}
			if width > 0 && len(l) > width && strings.Contains(body, " ") {
				t.Errorf("width %d: %q", width, l)
			}
		}
		if got := strings.Join(strings.Fields(b.String()), " "); got != "host "+text {
			t.Errorf("width %d: %q", width, got)
		}
		if width == 0 && len(lines) != 1 {
			t.Errorf("unlimited, it has %d lines", len(lines))
		}
	}
}
