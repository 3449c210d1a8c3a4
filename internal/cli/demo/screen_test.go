package demo

import (
	"errors"
	"strings"
	"testing"
)

// TestLines checks that without a terminal each event and each change of state is
// printed as a line, and that a running countdown is not.
func TestLines(t *testing.T) {
	var out strings.Builder
	c := newScreen(&out, func(string) string { return "" }, func() { t.Error("broken") })
	for _, detail := range []string{"pauses in 2s", "pauses in 1s"} {
		c.show([]row{{name: "web", state: "running", detail: detail}})
	}
	c.happened("web", "woken")
	c.show([]row{{name: "web", state: "paused"}})
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line)[1:], " "))
	}
	if want := "web running|web woken|web paused"; strings.Join(got, "|") != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestPicture checks that on a terminal the rows are redrawn in place, fit the
// terminal's width and show the last events, and that permanent text is printed above
// them.
func TestPicture(t *testing.T) {
	var out strings.Builder
	c := newScreen(&out, func(string) string { return "" }, func() {})
	c.live, c.width = true, 40
	for range lastEvents + 3 {
		c.happened("web", "%s", strings.Repeat("x", 100))
	}
	c.show([]row{{name: "web", state: "running", detail: strings.Repeat("y", 100)}})
	first := out.String()
	lines := strings.Split(strings.TrimSuffix(first, "\n"), "\n")
	if len(lines) != 2+1+lastEvents || c.drawn != len(lines) {
		t.Errorf("%d lines, %d noted as drawn:\n%s", len(lines), c.drawn, first)
	}
	for _, l := range lines {
		if len(l) > 40 {
			t.Errorf("wider than the terminal: %q", l)
		}
	}
	out.Reset()
	c.say("stays")
	if got := out.String(); got != "\x1b[11A\x1b[Jstays\n" || c.drawn != 0 {
		t.Errorf("got %q", got)
	}
}

type gone struct{}

func (gone) Write([]byte) (int, error) { return 0, errors.New("gone") }

func TestReaderGone(t *testing.T) {
	ended := false
	newScreen(gone{}, func(string) string { return "" }, func() { ended = true }).say("x")
	if !ended {
		t.Error("the demo continues without a reader")
	}
}
