package cml

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"lull/internal/lib/errtest"
)

var testNow = time.Date(2025, 11, 20, 12, 0, 0, 0, time.UTC)

// chunks is a reader that returns text in pieces of the drawn sizes.
type chunks struct {
	text  []byte
	sizes []int
}

func (c *chunks) Read(p []byte) (int, error) {
	if len(c.text) == 0 {
		return 0, io.EOF
	}
	n := len(p)
	if len(c.sizes) > 0 {
		n = min(n, c.sizes[0])
		c.sizes = append(c.sizes[1:], c.sizes[0])
	}
	n = copy(p[:n], c.text)
	c.text = c.text[n:]
	return n, nil
}

// drawString returns s as raw JSON, with some characters escaped at random.
func drawString(t *rapid.T, s string, label string) string {
	if rapid.IntRange(0, 5).Draw(t, label+" escaped") > 0 {
		b, _ := json.Marshal(s)
		return string(b)
	}
	var b strings.Builder
	b.WriteByte('"')
	for i, r := range s {
		if i%2 == 0 && r < 0x10000 {
			fmt.Fprintf(&b, `\u%04X`, r)
			continue
		}
		q, _ := json.Marshal(string(r))
		b.Write(q[1 : len(q)-1])
	}
	b.WriteByte('"')
	return b.String()
}

func drawTime(t *rapid.T) string {
	at := testNow.Add(time.Duration(rapid.IntRange(-200, 200).Draw(t, "seconds")) * time.Second)
	return rapid.SampledFrom([]string{
		at.Format("2006-01-02T15:04:05Z"), at.Format("2006-01-02T15:04:05"),
		at.Format("2006-01-02T15:04:05.000Z"), at.Format("2006-01-02T15:04:05.5"),
		at.Format("2006-01-02 15:04:05+00:00"),
		at.In(time.FixedZone("", -19800)).Format("2006-01-02T15:04:05.123456789Z07:00"),
		at.Format("2006-01-02t15:04:05z"),
		"yesterday", "", "2025-02-29T00:00:00Z", "2025-11-19T10:25:32+0000", "2025-11-19T24:00:00Z",
		"2025-11-19T10:25", "2025-11-19T10:25:32.", "2025-11-19T10:25:60Z",
	}).Draw(t, "timestamp")
}

// drawValue draws any JSON value.
func drawValue(t *rapid.T, depth int) string {
	kind := rapid.IntRange(0, 8).Draw(t, "kind")
	if depth == 0 {
		kind %= 6
	}
	switch kind {
	case 0:
		return rapid.SampledFrom([]string{"null", "true", "false"}).Draw(t, "word")
	case 1, 2:
		return rapid.SampledFrom([]string{"0", "-0", "12", "-1.5e+10", "0.25", "1E5", "9007199254740993"}).Draw(t, "number")
	case 3, 4, 5:
		s := rapid.OneOf(
			rapid.StringOfN(rapid.RuneFrom([]rune("ab \"\\/\n\u00e9\u20ac\U0001F600{}[],:")), 0, 20, -1),
			rapid.Just(strings.Repeat("x", 700)),
		).Draw(t, "text")
		return drawString(t, s, "text")
	case 6:
		n := rapid.IntRange(0, 3).Draw(t, "elements")
		parts := make([]string, n)
		for i := range parts {
			parts[i] = drawSpace(t) + drawValue(t, depth-1) + drawSpace(t)
		}
		return "[" + strings.Join(parts, ",") + "]"
	default:
		return drawObject(t, depth)
	}
}

func drawObject(t *rapid.T, depth int) string {
	n := rapid.IntRange(0, 3).Draw(t, "members")
	parts := make([]string, n)
	for i := range parts {
		key := rapid.SampledFrom([]string{"user_id", "a", "category", "timestamp", "", "User_ID"}).Draw(t, "key")
		parts[i] = drawSpace(t) + drawString(t, key, "key") + ":" + drawSpace(t) + drawValue(t, depth-1)
	}
	return "{" + strings.Join(parts, ",") + "}"
}

func drawSpace(t *rapid.T) string {
	return rapid.SampledFrom([]string{"", "", "", " ", "\n\t", "\r\n"}).Draw(t, "space")
}

func drawEvent(t *rapid.T) string {
	if rapid.IntRange(0, 20).Draw(t, "not an object") == 0 {
		return drawValue(t, 2)
	}
	category := rapid.SampledFrom([]string{
		"start_lab", "wipe_node", "start_node", "user_activity", "user_activity", "system_stats", "aaa_info",
		"novelty", "", "Start_Lab", strings.Repeat("long", 70), "n\u00e9w",
	}).Draw(t, "category")
	user := rapid.SampledFrom([]string{
		adminID, "11111111-2222-3333-4444-555555555555", "me", "x" + adminID,
	}).Draw(t, "user")
	data := rapid.OneOf(
		rapid.Just(fmt.Sprintf(`{"user_id": %q}`, user)),
		rapid.Custom(func(t *rapid.T) string {
			return `{"n":{"user_id":"00000000-0000-"},` + drawString(t, "user_id", "user_id") + `: ` + drawString(t, user, "id") + `}`
		}),
		rapid.Custom(func(t *rapid.T) string { return drawValue(t, 3) }),
	).Draw(t, "data")
	parts := []string{
		drawString(t, "category", "k") + drawSpace(t) + ":" + drawString(t, category, "c"),
		drawString(t, "timestamp", "k") + ":" + drawSpace(t) + drawString(t, drawTime(t), "s"),
		drawString(t, "data", "k") + ":" + data,
	}
	for range rapid.IntRange(0, 1).Draw(t, "extra") {
		key := rapid.SampledFrom([]string{"category", "timestamp", "data", "id", strings.Repeat("k", 300)}).Draw(t, "extra key")
		parts = append(parts, drawString(t, key, "k")+":"+drawValue(t, 2))
	}
	parts = rapid.Permutation(parts).Draw(t, "order")
	parts = parts[:len(parts)-rapid.SampledFrom([]int{0, 0, 0, 0, 1}).Draw(t, "left out")]
	return "{" + drawSpace(t) + strings.Join(parts, drawSpace(t)+","+drawSpace(t)) + "}"
}

func drawArray(t *rapid.T) []byte {
	events := rapid.SliceOfN(rapid.Custom(drawEvent), 0, 12).Draw(t, "events")
	if len(events) > 0 {
		for _, i := range rapid.SliceOfN(rapid.IntRange(0, len(events)-1), 0, 3).Draw(t, "repeated") {
			events = append(events, events[i])
		}
	}
	return []byte(drawSpace(t) + "[" + strings.Join(events, drawSpace(t)+","+drawSpace(t)) + drawSpace(t) + "]" + drawSpace(t))
}

// corrupt returns text, in most draws unchanged and otherwise damaged at random.
func corrupt(t *rapid.T, text []byte) []byte {
	text = bytes.Clone(text)
	at := rapid.IntRange(0, len(text)-1).Draw(t, "at")
	switch rapid.IntRange(0, 7).Draw(t, "corruption") {
	case 0:
		text = text[:at]
	case 1:
		text[at] = rapid.SampledFrom([]byte(`"\{}[],:0 -.eE+tfn`+"\x00\x1f\xff")).Draw(t, "byte")
	case 2:
		text = append(text[:at:at], text[at+1:]...)
	case 3:
		text = append(text, rapid.SampledFrom([]string{"]", "[]", "null", ",", " \n", "0"}).Draw(t, "tail")...)
	}
	return text
}

func testConfig(t *rapid.T) FilterConfig {
	cfg := defaultFilterConfig()
	cfg.MaxStored = rapid.IntRange(0, 12).Draw(t, "max stored")
	cfg.MaxEventBytes = rapid.SampledFrom([]int{100, 400, 16 << 10}).Draw(t, "max event bytes")
	cfg.ExcludedIDs = []string{"me"}
	cfg.ExcludedUsers = regexp.MustCompile(DefaultExcludedUsers)
	return cfg
}

// narrow gives f buffers that are hardly larger than the minimum, so that even
// short histories cause refills and moves within the buffer.
func narrow(t *rapid.T, f *Filter) {
	size := f.cfg.MaxEventBytes + readAhead + rapid.IntRange(8, 600).Draw(t, "buffer")
	f.buffers.New = func() any { b := make([]byte, size); return &b }
}

// TestFilterAgainstReference compares two successive readings of a drawn history
// with the reference implementation. The time, the offset and the sizes of the
// reads are drawn, and the second text may be damaged.
func TestFilterAgainstReference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := testConfig(t)
		f, err := NewFilter(cfg)
		errtest.None(t, err)
		narrow(t, f)
		text := drawArray(t)
		off := time.Duration(rapid.IntRange(-90, 90).Draw(t, "offset")) * time.Second
		offset := Offset{Known: true, Low: off, High: off + time.Second}
		sizes := rapid.SliceOfN(rapid.IntRange(1, 300), 0, 5).Draw(t, "sizes")

		first := f.Read(&chunks{text, sizes}, testNow, offset, nil)
		ref := reference{cfg: cfg, now: testNow, off: offset}
		ref.read(text)
		compare(t, first, &ref)

		later := testNow.Add(time.Duration(rapid.IntRange(0, 300).Draw(t, "later")) * time.Second)
		text = corrupt(t, text)
		second := f.Read(&chunks{text, sizes}, later, offset, first.Seen)
		again := reference{cfg: cfg, now: later, off: offset, seen: ref.after}
		again.read(text)
		compare(t, second, &again)
		if second.Unknown != ReasonNone {
			for _, s := range first.Seen {
				if !containsSeen(second.Seen, s) {
					t.Fatalf("a reading that broke off forgot %+v", s)
				}
			}
		}
	})
}

func containsSeen(seen Seen, want SeenEvent) bool {
	for _, s := range seen {
		if s.Digest == want.Digest && s.FirstSeen.Equal(want.FirstSeen) {
			return true
		}
	}
	return false
}

func compare(t *rapid.T, got Activity, ref *reference) {
	t.Helper()
	if (got.Unknown == ReasonNone) != (ref.unknown == ReasonNone) {
		t.Fatalf("filter says %q (%v), encoding/json says %q", got.Unknown, got.Err, ref.unknown)
	}
	if got.Unknown != ReasonNone {
		if got.Unknown != ReasonMalformed && got.Unknown != ReasonTruncated {
			t.Fatalf("reason %q for a damaged array: %v", got.Unknown, got.Err)
		}
		return
	}
	if !got.Newest.Equal(ref.newest) {
		t.Fatalf("newest is %v, want %v", got.Newest, ref.newest)
	}
	var recent []refEvent
	for _, e := range got.Recent {
		recent = append(recent, refEvent{e.Category, e.Timestamp, e.At, string(e.Data), e.DataDropped})
	}
	want := ref.recent
	for i := range want {
		if want[i].at.After(ref.now) {
			want[i].at = ref.now
		}
	}
	if len(recent)+len(want) > 0 {
		if diff := cmp.Diff(want, recent, cmp.AllowUnexported(refEvent{})); diff != "" {
			t.Fatalf("recent events differ (-want +got):\n%s", diff)
		}
	}
	counts := got.Counts
	counts.Bytes, counts.Duplicates = 0, 0
	for _, m := range []*map[string]int64{&counts.ByCategory, &counts.UnknownCategories} {
		if *m == nil {
			*m = map[string]int64{}
		}
	}
	if diff := cmp.Diff(ref.counts, counts); diff != "" {
		t.Fatalf("counts differ (-want +got):\n%s", diff)
	}
	if len(got.Seen) != len(ref.after) {
		t.Fatalf("%d future-dated events remembered, want %d", len(got.Seen), len(ref.after))
	}
}

// TestFilterArrivalOrder checks that the result does not depend on the order of
// events.
func TestFilterArrivalOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f, err := NewFilter(testConfig(t))
		errtest.None(t, err)
		events := rapid.SliceOfN(rapid.Custom(drawEvent), 0, 15).Draw(t, "events")
		offset := Offset{Known: true}
		one := f.Read(strings.NewReader(array(events...)), testNow, offset, nil)
		other := f.Read(strings.NewReader(array(rapid.Permutation(events).Draw(t, "order")...)), testNow, offset, nil)
		if diff := cmp.Diff(one.Recent, other.Recent); diff != "" || !one.Newest.Equal(other.Newest) {
			t.Fatalf("newest %v and %v, recent (-one +other):\n%s", one.Newest, other.Newest, diff)
		}
		if diff := cmp.Diff(one.Seen, other.Seen); diff != "" {
			t.Fatalf("remembered (-one +other):\n%s", diff)
		}
	})
}

// TestFilterEveryTruncation checks that no prefix of a history is ever quiet.
func TestFilterEveryTruncation(t *testing.T) {
	f, err := NewFilter(defaultFilterConfig())
	errtest.None(t, err)
	text := history(40)
	for n := range len(text) {
		a := f.Read(strings.NewReader(text[:n]), testNow, Offset{Known: true}, nil)
		if a.Unknown != ReasonTruncated {
			t.Fatalf("a history cut at byte %d of %d is %q: %v", n, len(text), a.Unknown, a.Err)
		}
	}
	a := f.Read(iotest.OneByteReader(strings.NewReader(text)), testNow, Offset{Known: true}, nil)
	if a.Unknown != ReasonNone || a.Counts.Events != 40 {
		t.Fatalf("the whole history is %q with %d events: %v", a.Unknown, a.Counts.Events, a.Err)
	}
}

func TestFilterReaderFails(t *testing.T) {
	f, err := NewFilter(defaultFilterConfig())
	errtest.None(t, err)
	broken := errors.New("connection reset")
	r := io.MultiReader(strings.NewReader(history(40)[:8000]), iotest.ErrReader(broken))
	a := f.Read(r, testNow, Offset{Known: true}, nil)
	if a.Unknown != ReasonUnreachable || !errors.Is(a.Err, broken) {
		t.Fatalf("got %q, %v", a.Unknown, a.Err)
	}
	if a.Newest.IsZero() {
		t.Error("activity seen before the failure is lost")
	}
}
