package control

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"lull/internal/fleet/audit"
)

func TestReadGivesWholeChanges(t *testing.T) {
	entry := func(detail string) string { return "event: event\ndata: {\"detail\":\"" + detail + "\"}\n" }
	for name, c := range map[string]struct {
		body string
		got  []string
		at   int64
		err  bool
	}{
		"one":                 {"id: 5\n" + entry("a") + "\n", []string{"a"}, 5, false},
		"two of one change":   {entry("a") + "\nid: 5\n" + entry("b") + "\n", []string{"a", "b"}, 5, false},
		"cut within a change": {"id: 4\n" + entry("x") + "\n" + entry("a") + "\n", []string{"x"}, 4, false},
		"cut within an event": {"id: 4\n" + entry("x") + "\nid: 5\n" + entry("a"), []string{"x"}, 4, false},
		"progress":            {"id: 9\n: so far\n\n", nil, 9, false},
		"bad id":              {"id: x\n\n", nil, 1, true},
		"bad data":            {"id: 2\nevent: event\ndata: {\n\n", nil, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			at := int64(1)
			var got []string
			err := read(strings.NewReader(c.body), &at, Events{Each: func(e audit.Entry) error { got = append(got, e.Detail); return nil }})
			if !slices.Equal(got, c.got) || at != c.at || errors.Is(err, io.ErrUnexpectedEOF) == c.err {
				t.Errorf("got %q at %d, %v", got, at, err)
			}
		})
	}
}

// FuzzRead reads random streams. Reading must end with an error, and must not
// pass on an event without an ID.
func FuzzRead(f *testing.F) {
	for _, s := range []string{"", "id: 1\nevent: event\ndata: {}\n\n", "id: 1\nevent: reset\ndata: {\"reason\":\"x\"}\n\n", ": so far\n\n", "id:\n\n", "data\n\n", "id: 99999999999999999999\n\n", "event: event\ndata: null\nid: 3\n\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		at, n := int64(7), 0
		err := read(strings.NewReader(body), &at, Events{Each: func(audit.Entry) error { n++; return nil }, Reset: func(string) error { return nil }})
		if err == nil {
			t.Error("a stream ended without an error")
		}
		if n > 0 && !strings.Contains(body, "id") {
			t.Errorf("%d events were given without an id", n)
		}
	})
}
