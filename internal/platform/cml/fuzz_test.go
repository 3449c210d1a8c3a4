package cml

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// FuzzFilter checks that the filter accepts exactly the texts that encoding/json
// accepts as an array, and that its result does not depend on how the text is cut
// into reads.
func FuzzFilter(f *testing.F) {
	f.Add([]byte(history(3)), uint8(7))
	f.Add([]byte(`[{"category":"start_lab","timestamp":"2025-11-19T10:25:32.810Z","data":{"a":[1,-2.5e3,"\u00e9\n"]}}]`), uint8(1))
	f.Add([]byte(`[{"category":"user_activity","timestamp":"2025-11-19T10:25:32","data":{"user_id":"00000000-0000-1"}},null]`), uint8(3))
	f.Add([]byte(` [ ] `), uint8(2))
	f.Add([]byte(`[{"category":"start_lab"`), uint8(0))
	cfg := defaultFilterConfig()
	cfg.MaxEventBytes = 300
	filter, err := NewFilter(cfg)
	if err != nil {
		f.Fatal(err)
	}
	filter.buffers.New = func() any { b := make([]byte, cfg.MaxEventBytes+readAhead+40); return &b }
	f.Fuzz(func(t *testing.T, text []byte, piece uint8) {
		whole := filter.Read(bytes.NewReader(text), testNow, exact, nil)
		var pieces []int
		if piece > 0 {
			pieces = []int{int(piece)}
		}
		cut := filter.Read(&chunks{text, pieces}, testNow, exact, nil)
		if whole.Unknown != cut.Unknown || !whole.Newest.Equal(cut.Newest) || len(whole.Recent) != len(cut.Recent) {
			t.Fatalf("read at once: %q, %v; in pieces of %d: %q, %v", whole.Unknown, whole.Newest, piece, cut.Unknown, cut.Newest)
		}
		var events []json.RawMessage
		valid := json.Unmarshal(text, &events) == nil && !strings.HasPrefix(strings.TrimSpace(string(text)), "null")
		if (whole.Unknown == ReasonNone) != valid && nesting(text) < maxDepth {
			t.Fatalf("filter says %q (%v), encoding/json says valid: %v", whole.Unknown, whole.Err, valid)
		}
		if valid && whole.Unknown == ReasonNone && whole.Counts.Events != int64(len(events)) {
			t.Fatalf("%d events counted of %d", whole.Counts.Events, len(events))
		}
	})
}

// nesting returns an upper bound of the nesting depth of text.
func nesting(text []byte) int { return bytes.Count(text, []byte("[")) + bytes.Count(text, []byte("{")) }

func FuzzTimestamp(f *testing.F) {
	for _, s := range []string{
		"2025-11-19T10:25:32.810Z", "2025-11-19T10:25:32Z", "2025-11-19T10:25:32.810", "2025-11-19T10:25:32",
		"2025-11-19T10:25:32+00:00", "2025-11-19t10:25:32.123456789-05:30", "2025-11-19 10:25:32z", "2024-02-29T23:59:59Z",
		"0000-01-01T00:00:00", "9999-12-31T23:59:59.9999999999Z", "2025-02-30T00:00:00Z", "2025-11-19T10:25:32,5Z",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, ok := parseTimestamp([]byte(s))
		want, valid := refTime(s)
		if valid && strings.ContainsAny(s, "+-") && len(s) > 6 && strings.ContainsAny(s[len(s)-6:len(s)-5], "+-") && s[len(s)-5:] > "23:59" {
			return // time.Parse accepts offsets beyond 23:59, the filter does not
		}
		if ok != valid || ok && !got.Equal(want) {
			t.Fatalf("%q is %v, %v; time.Parse says %v, %v", s, got, ok, want, valid)
		}
		if ok && got.Location() != time.UTC {
			t.Fatalf("%q is in %v", s, got.Location())
		}
	})
}
