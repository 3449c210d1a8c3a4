package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

// TestDraw checks that the picture is XML with every line's text, cut to its
// width, and that a long wait is shortened.
func TestDraw(t *testing.T) {
	lines := []line{{0, "$ lull demo"}, {time.Second, ""}, {time.Hour, "a <b> & c"}, {time.Hour, strings.Repeat("w", columns+5)}}
	b := draw(lines)
	var text []string
	for d := xml.NewDecoder(bytes.NewReader(b)); ; {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, b)
		}
		if c, ok := tok.(xml.CharData); ok {
			text = append(text, strings.Split(strings.Trim(string(c), "\n"), "\n")...)
		}
	}
	got := strings.Join(text, "|")
	for _, want := range []string{"$ lull demo", "a <b> & c", strings.Repeat("w", columns) + "|"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	if want := (2*longest + still).Seconds(); !bytes.Contains(b, []byte("animation:s 7.8s")) {
		t.Errorf("it does not last %.1fs", want)
	}
	if !bytes.Equal(b, draw(lines)) {
		t.Error("drawn again it differs")
	}
}
