package demo

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	xterm "golang.org/x/term"

	"lull/internal/cli/term"
)

// row is one line of the demo's table. A change of State is an event; a change of
// Detail is not.
type row struct {
	name, state, detail, color string
}

// event is something that happened.
type event struct {
	at         time.Time
	name, text string
}

// lastEvents is how many events a terminal shows.
const lastEvents = 8

// screen prints the demo. On a terminal it redraws the rows and the last events in
// place, below permanent text from which commands can be copied. On any other output
// it prints a line for each event and each change of a state.
type screen struct {
	color, live bool
	width       int
	broken      func() // called when output fails

	mu     sync.Mutex
	out    io.Writer
	drawn  int // number of lines that the next picture replaces
	events []event
	before map[string]string // states of the rows
}

// newScreen returns a screen on out. It calls broken when writing fails, for example
// because the reader has gone.
func newScreen(out io.Writer, getenv func(string) string, broken func()) *screen {
	c := &screen{out: out, broken: broken, before: map[string]string{}}
	if f, ok := out.(*os.File); ok && term.IsTerminal(out) && getenv("TERM") != "dumb" {
		width, height, err := xterm.GetSize(int(f.Fd()))
		c.live, c.width = err == nil && height >= lastEvents+12 && width >= 40, width
		c.color = getenv("NO_COLOR") == ""
	}
	return c
}

// write prints text. c.mu must be held.
func (c *screen) write(text string) {
	if _, err := io.WriteString(c.out, text); err != nil {
		c.broken()
	}
}

// say prints permanent text above the redrawn rows.
func (c *screen) say(format string, a ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.write(c.erase() + fmt.Sprintf(format, a...) + "\n")
	c.drawn = 0
}

// erase returns the control sequence that removes the redrawn rows.
func (c *screen) erase() string {
	if c.drawn == 0 {
		return ""
	}
	return fmt.Sprintf("\x1b[%dA\x1b[J", c.drawn)
}

// happened records an event. It prints the event at once unless the rows are redrawn.
func (c *screen) happened(name, format string, a ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.note(event{time.Now(), name, fmt.Sprintf(format, a...)})
}

func (c *screen) note(e event) {
	c.events = append(c.events, e)
	if len(c.events) > lastEvents {
		c.events = c.events[1:]
	}
	if !c.live {
		c.write(e.String() + "\n")
	}
}

func (e event) String() string {
	return fmt.Sprintf("%s  %-10s %s", e.at.Format(time.TimeOnly), e.name, e.text)
}

// show redraws the rows or, without a terminal, prints those whose State has changed.
func (c *screen) show(rows []row) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.live {
		for _, r := range rows {
			if c.before[r.name] != r.state {
				c.before[r.name] = r.state
				c.note(event{time.Now(), r.name, r.state})
			}
		}
		return
	}
	var b strings.Builder
	b.WriteString(c.erase() + "\n")
	for _, r := range rows {
		text := r.state
		if r.detail != "" {
			text = r.detail
		}
		fmt.Fprintf(&b, "  %-11s %s\n", r.name, c.paint(r.color, cut(text, c.width-14)))
	}
	b.WriteString("\n")
	for _, e := range c.events {
		fmt.Fprintf(&b, "  %s\n", cut(e.String(), c.width-2))
	}
	c.drawn = 2 + len(rows) + len(c.events)
	c.write(b.String())
}

// cut returns at most n characters of text.
func cut(text string, n int) string {
	if r := []rune(text); len(r) > n {
		return string(r[:n])
	}
	return text
}

// paint returns text in a color if colors are wanted.
func (c *screen) paint(code, text string) string {
	if !c.color || code == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}
