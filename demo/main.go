// Demo draws the recording in the README: it runs lull demo, and writes what it
// printed, and when, as an animated SVG. Long waits are shortened.
//
//	go run ./demo -lull bin/lull -out docs/pictures/demo.svg
package main

import (
	"bufio"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

// line is a printed line, and when it was printed.
type line struct {
	at   time.Duration
	text string
}

func main() {
	lull := flag.String("lull", "bin/lull", "program to record")
	out := flag.String("out", "docs/pictures/demo.svg", "file to write")
	length := flag.Duration("for", 45*time.Second, "length of the recording")
	flag.Parse()
	lines, err := record(*lull, *length)
	if err == nil {
		err = os.WriteFile(*out, draw(lines), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// secret matches the secret of a sign-in link.
var secret = regexp.MustCompile(`#\w{20,}`)

// record runs the demo and returns what it printed.
func record(lull string, length time.Duration) ([]line, error) {
	cmd := exec.Command(lull, "demo", "--for", length.String())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	lines := []line{{0, "$ lull demo"}}
	in := bufio.NewScanner(out)
	for in.Scan() {
		lines = append(lines, line{time.Since(began), secret.ReplaceAllString(in.Text(), "#…")})
	}
	return lines, errors.Join(in.Err(), cmd.Wait())
}

// The picture's measures: characters, pixels, and the longest wait that is shown.
const (
	columns, rows  = 80, 26
	charW, lineH   = 8.4, 19.0
	margin         = 16.0
	longest, still = 900 * time.Millisecond, 6 * time.Second
)

// The colors of a line, the first that matches.
var colors = []struct {
	match *regexp.Regexp
	color string
}{
	{regexp.MustCompile(`^\$ `), "#ffffff"},
	{regexp.MustCompile(`^\d\d:\d\d:\d\d .* woken by`), "#f5c563"},
	{regexp.MustCompile(`^\d\d:\d\d:\d\d .* (paused|hibernated|stopped)`), "#7cc4e8"},
	{regexp.MustCompile(`^\d\d:\d\d:\d\d .* running`), "#8fd694"},
	{regexp.MustCompile(`^  .*# `), "#e8e8ea"},
	{regexp.MustCompile(`.`), "#b9bcc4"},
}

func colorOf(text string) string {
	for _, c := range colors {
		if c.match.MatchString(text) {
			return c.color
		}
	}
	return "none"
}

// draw returns the picture. Without animation it shows the last lines.
func draw(lines []line) []byte {
	shown := make([]time.Duration, len(lines)) // when each line appears
	for i := 1; i < len(lines); i++ {
		shown[i] = shown[i-1] + min(lines[i].at-lines[i-1].at, longest)
	}
	total := shown[len(shown)-1] + still
	width, height := columns*charW+2*margin, rows*lineH+2*margin
	var steps, scroll strings.Builder
	for i, at := range shown {
		if i+1 < len(shown) && shown[i+1]-at < 10*time.Millisecond {
			continue // they appear together
		}
		percent := 100 * float64(at) / float64(total)
		fmt.Fprintf(&steps, "%.2f%%{transform:translateY(%.0fpx)}", percent, float64(i+1)*lineH)
		fmt.Fprintf(&scroll, "%.2f%%{transform:translateY(%.0fpx)}", percent, -float64(max(0, i+1-rows))*lineH)
	}
	end := fmt.Sprintf("transform:translateY(%.0fpx)", -float64(max(0, len(lines)-rows))*lineH)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%.0f" height="%.0f" role="img" aria-label="A recording of lull demo">`+"\n", width, height, width, height)
	fmt.Fprintf(&b, `<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}
.s{%s;animation:s %.1fs step-end infinite}.c{transform:translateY(%.0fpx);animation:c %.1fs step-end infinite}
@keyframes s{%s}@keyframes c{%s}
@media (prefers-reduced-motion:reduce){.s,.c{animation:none}}</style>
`, end, total.Seconds(), float64(len(lines))*lineH, total.Seconds(), scroll.String(), steps.String())
	fmt.Fprintf(&b, `<rect width="%.0f" height="%.0f" rx="8" fill="#17191f"/><clipPath id="w"><rect x="0" y="%.0f" width="%.0f" height="%.0f"/></clipPath><g clip-path="url(#w)"><g class="s">`+"\n",
		width, height, margin, width, rows*lineH)
	for i, l := range lines {
		if l.text == "" {
			continue
		}
		fmt.Fprintf(&b, `<text x="%.0f" y="%.0f" fill="%s">%s</text>`+"\n", margin, margin+float64(i)*lineH+14, colorOf(l.text), escape(l.text))
	}
	fmt.Fprintf(&b, `<rect class="c" y="%.0f" width="%.0f" height="%.0f" fill="#17191f"/></g></g></svg>`+"\n", margin, width, float64(len(lines))*lineH)
	return []byte(b.String())
}

// escape returns text for XML, at most as wide as the picture.
func escape(text string) string {
	if r := []rune(text); len(r) > columns {
		text = string(r[:columns])
	}
	var b strings.Builder
	if err := xml.EscapeText(&b, []byte(text)); err != nil {
		panic(err) // a strings.Builder takes everything
	}
	return b.String()
}
