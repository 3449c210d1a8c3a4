package cml

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// defaultFilterConfig returns the configuration of a server with default
// settings.
func defaultFilterConfig() FilterConfig {
	return FilterConfig{Categories: relevantByDefault, ExcludedUsers: regexp.MustCompile(DefaultExcludedUsers), MaxStored: 10}
}

func mustFilter(t testing.TB, change func(*FilterConfig)) *Filter {
	t.Helper()
	cfg := defaultFilterConfig()
	if change != nil {
		change(&cfg)
	}
	f, err := NewFilter(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

var exact = Offset{Known: true}

// TestFilterSeedHistory reads 3,136 events in realistic proportions and checks
// every counter of the result.
func TestFilterSeedHistory(t *testing.T) {
	now := historyStart.Add(24 * time.Hour)
	a := mustFilter(t, nil).Read(strings.NewReader(history(historyLen)), now, exact, nil)
	if a.Unknown != ReasonNone {
		t.Fatalf("unknown: %v", a.Err)
	}
	want := Counts{
		Bytes: a.Counts.Bytes, Events: 3136, Relevant: 226, ExcludedUsers: 2104,
		ByCategory: map[string]int64{
			"start_lab": 8, "stop_lab": 8, "wipe_lab": 4, "import_lab": 6, "export_lab": 4,
			"start_node": 60, "stop_node": 50, "queue_node": 46, "boot_node": 40,
			"system_stats": 207, "running_nodes": 207, "aaa_info": 56, "license_info": 56,
			"dmiinfo": 56, "cpuinfo": 56, "meminfo": 56, "blkinfo": 56, "hypervisor": 56,
			"user_activity": 2104,
		},
	}
	if diff := cmp.Diff(want, a.Counts); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	var relevant []int
	for i, kind := range historyKinds {
		if strings.HasSuffix(kind, "_lab") || strings.HasSuffix(kind, "_node") {
			relevant = append(relevant, i)
		}
	}
	if len(relevant) != historyRelevant || len(a.Recent) != 10 {
		t.Fatalf("%d relevant events made, %d kept", len(relevant), len(a.Recent))
	}
	for k, e := range a.Recent {
		i := relevant[len(relevant)-1-k]
		at := historyStart.Add(time.Duration(i) * 10 * time.Second)
		if e.Category != historyKinds[i] || !e.Timestamp.Equal(at) || !bytes.Contains(appendEvent(nil, i), e.Data) || len(e.Data) == 0 {
			t.Errorf("recent event %d is %+v, want event %d of the history", k, e, i)
		}
	}
	newest := historyStart.Add(time.Duration(relevant[len(relevant)-1]) * 10 * time.Second)
	if !a.Newest.Equal(newest) || !a.NewestHost.Equal(newest) {
		t.Errorf("newest activity %v (host: %v), want %v", a.Newest, a.NewestHost, newest)
	}
}

func event(category, timestamp, data string) string {
	return fmt.Sprintf(`{"category":%q,"timestamp":%q,"data":%s}`, category, timestamp, data)
}

func TestFilterEvents(t *testing.T) {
	const early, at = "2025-11-20T10:00:00Z", "2025-11-20T11:00:00.250Z"
	earlyTime := time.Date(2025, 11, 20, 10, 0, 0, 0, time.UTC)
	atTime := earlyTime.Add(time.Hour + 250*time.Millisecond)
	user := func(id string) string { return event("user_activity", at, `{"user_id":`+id+`}`) }
	for _, c := range []struct {
		name   string
		text   string
		newest time.Time
		recent int
		counts Counts
	}{
		{"empty history", `[]`, time.Time{}, 0, Counts{}},
		{"empty history with space", " [ \n] \t", time.Time{}, 0, Counts{}},
		{"one event", array(event("start_lab", at, `{}`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"reordered", array(event("start_lab", at, `{}`), event("stop_lab", early, `{}`)), atTime, 2, Counts{Events: 2, Relevant: 2}},
		{"duplicated", array(event("start_lab", at, `{}`), event("start_lab", at, `{}`)), atTime, 1, Counts{Events: 2, Relevant: 2, Duplicates: 1}},
		{"same time, other data", array(event("start_lab", at, `{"a":1}`), event("start_lab", at, `{"a":2}`)), atTime, 2, Counts{Events: 2, Relevant: 2}},
		{"irrelevant", array(event("system_stats", at, `{}`)), time.Time{}, 0, Counts{Events: 1}},
		{"irrelevant with a bad time", array(event("system_stats", "soon", `{}`)), time.Time{}, 0, Counts{Events: 1}},
		{"unknown category", array(event("teleport", at, `{}`)), time.Time{}, 0, Counts{Events: 1}},
		{"a seed's category that CML lacks", array(event("create_lab", at, `{}`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"a category of newer versions of CML", array(event("packet_capture", at, `{}`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"a user", array(user(`"4d1f9a5e-1111-4222-8333-444455556666"`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"built-in account", array(user(`"` + adminID + `"`)), time.Time{}, 0, Counts{Events: 1, ExcludedUsers: 1}},
		{"built-in account, escaped", array(user(`"\u0030` + adminID[1:] + `"`)), time.Time{}, 0, Counts{Events: 1, ExcludedUsers: 1}},
		{"our own account", array(user(`"lull"`)), time.Time{}, 0, Counts{Events: 1, ExcludedUsers: 1}},
		{"built-in account not at the start", array(user(`"x` + adminID + `"`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"user_id null", array(user(`null`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"user_id a number", array(user(`7`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"user_id of something inside", array(event("user_activity", at, `{"x":{"user_id":"`+adminID+`"}}`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"no user_id", array(event("user_activity", at, `{}`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"data is no object", array(event("user_activity", at, `"`+adminID+`"`)), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"no data", array(`{"timestamp":"` + at + `","category":"start_node"}`), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"escaped keys and values", array(`{"c\u0061tegory":"start\u005flab","time\u0073tamp":"2025-11-20T11:00:00.25\u005a","data":{}}`), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"a key twice", array(`{"category":"aaa_info","category":"start_lab","timestamp":"` + at + `"}`), atTime, 1, Counts{Events: 1, Relevant: 1}},
		{"no category", array(`{"timestamp":"`+at+`"}`, event("stop_lab", early, `1`)), earlyTime, 1, Counts{Events: 2, Relevant: 1, Malformed: 1}},
		{"category null", array(`{"category":null,"timestamp":"` + at + `"}`), time.Time{}, 0, Counts{Events: 1, Malformed: 1}},
		{"no timestamp", array(`{"category":"start_lab"}`), time.Time{}, 0, Counts{Events: 1, Malformed: 1}},
		{"timestamp a number", array(`{"category":"start_lab","timestamp":1763636400}`), time.Time{}, 0, Counts{Events: 1, Malformed: 1}},
		{"timestamp nonsense", array(event("start_lab", "2025-13-20T11:00:00Z", `{}`), event("stop_lab", early, `1`)), earlyTime, 1, Counts{Events: 2, Relevant: 1, Malformed: 1}},
		{"no object", array(`null`, `17`, `[]`, event("stop_lab", early, `1`)), earlyTime, 1, Counts{Events: 4, Relevant: 1, Malformed: 3}},
		{"huge data", array(event("start_lab", at, `"`+strings.Repeat("x", 300<<10)+`"`), event("stop_lab", early, `1`)), atTime, 2, Counts{Events: 2, Relevant: 2, Oversized: 1}},
		{"huge data first", array(`{"data":"` + strings.Repeat("x", 300<<10) + `","timestamp":"` + at + `","category":"start_lab"}`), atTime, 1, Counts{Events: 1, Relevant: 1, Oversized: 1}},
		{"huge data of the built-in account", array(event("user_activity", at, `{"user_id":"`+adminID+`","x":"`+strings.Repeat("x", 20<<10)+`"}`)), atTime, 1, Counts{Events: 1, Relevant: 1, Oversized: 1}},
		{"deep data", array(event("start_lab", at, strings.Repeat("[", 1000)+strings.Repeat("]", 1000))), atTime, 1, Counts{Events: 1, Relevant: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := mustFilter(t, func(cfg *FilterConfig) { cfg.ExcludedIDs = []string{"lull"} })
			a := f.Read(strings.NewReader(c.text), testNow, exact, nil)
			if a.Unknown != ReasonNone {
				t.Fatalf("unknown: %v", a.Err)
			}
			if !a.Newest.Equal(c.newest) || len(a.Recent) != c.recent {
				t.Errorf("newest %v with %d kept, want %v with %d", a.Newest, len(a.Recent), c.newest, c.recent)
			}
			if int64(len(a.Faults)) != c.counts.Malformed {
				t.Errorf("%d faults described: %+v", len(a.Faults), a.Faults)
			}
			got := a.Counts
			got.Bytes, got.ByCategory, got.UnknownCategories = 0, nil, nil
			if diff := cmp.Diff(c.counts, got); diff != "" {
				t.Errorf("counts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFilterUnreadableArrays(t *testing.T) {
	ev := event("start_lab", "2025-11-20T10:00:00Z", `{}`)
	for _, c := range []struct {
		name, text string
		want       Reason
	}{
		{"nothing", ``, ReasonTruncated},
		{"space", "  \n", ReasonTruncated},
		{"an error body", `{"code":500,"description":"x"}`, ReasonMalformed},
		{"null", `null`, ReasonMalformed},
		{"a page of HTML", `<html>`, ReasonMalformed},
		{"no end", `[` + ev, ReasonTruncated},
		{"ends behind a comma", `[` + ev + `,`, ReasonTruncated},
		{"ends in a string", `[{"category":"sta`, ReasonTruncated},
		{"ends in an escape", `[{"category":"\u00`, ReasonTruncated},
		{"ends in a number", `[1`, ReasonTruncated},
		{"ends in a word", `[tru`, ReasonTruncated},
		{"no comma", `[` + ev + ev + `]`, ReasonMalformed},
		{"two commas", `[` + ev + `,,` + ev + `]`, ReasonMalformed},
		{"comma at the end", `[` + ev + `,]`, ReasonMalformed},
		{"comma at the start", `[,` + ev + `]`, ReasonMalformed},
		{"comma at an event's end", `[{"category":"x",}]`, ReasonMalformed},
		{"comma at an object's end", `[{"data":{"a":1,}}]`, ReasonMalformed},
		{"wrong bracket", `[` + ev + `}`, ReasonMalformed},
		{"wrong bracket inside", `[{"data":[1}}]`, ReasonMalformed},
		{"something behind", `[` + ev + `] 1`, ReasonMalformed},
		{"a second array behind", `[] []`, ReasonMalformed},
		{"a quote unescaped", `[{"category":"a"b"}]`, ReasonMalformed},
		{"a line break in a string", "[\"a\nb\"]", ReasonMalformed},
		{"bad escape", `["\x41"]`, ReasonMalformed},
		{"bad unicode escape", `["\u12g4"]`, ReasonMalformed},
		{"leading zero", `[01]`, ReasonMalformed},
		{"bare point", `[.5]`, ReasonMalformed},
		{"no digits behind the point", `[1.]`, ReasonMalformed},
		{"no digits in the exponent", `[1e+]`, ReasonMalformed},
		{"plus sign", `[+1]`, ReasonMalformed},
		{"bad word", `[nul]`, ReasonMalformed},
		{"key without quotes", `[{category:"x"}]`, ReasonMalformed},
		{"key without value", `[{"category"}]`, ReasonMalformed},
		{"byte order mark", "\ufeff[]", ReasonMalformed},
		{"a NUL between events", "[1,\x00 2]", ReasonMalformed},
		{"too deep", `[{"data":` + strings.Repeat("[", maxDepth+1) + strings.Repeat("]", maxDepth+1) + `}]`, ReasonMalformed},
		{"too large", `[` + ev + strings.Repeat(" ", 200<<10) + `]`, ReasonTooLarge},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := mustFilter(t, func(cfg *FilterConfig) { cfg.MaxBytes = 200 << 10 })
			a := f.Read(strings.NewReader(c.text), testNow, exact, nil)
			if a.Unknown != c.want || a.Err == nil {
				t.Errorf("got %q (%v), want %q", a.Unknown, a.Err, c.want)
			}
		})
	}
}

func TestFilterFuture(t *testing.T) {
	f := mustFilter(t, nil)
	at := func(d time.Duration) string { return testNow.Add(d).Format(time.RFC3339) }
	old := event("start_lab", at(-time.Hour), `{}`)
	ahead := event("start_node", at(3*time.Hour), `{}`)
	read := func(now time.Time, seen Seen, events ...string) Activity {
		t.Helper()
		a := f.Read(strings.NewReader(array(events...)), now, exact, seen)
		if a.Unknown != ReasonNone {
			t.Fatalf("unknown: %v", a.Err)
		}
		return a
	}

	if a := read(testNow, nil, old, event("stop_lab", at(time.Minute), `{}`)); !a.Newest.Equal(testNow) || a.Counts.Future != 0 || a.Seen != nil {
		t.Errorf("an event 60 s ahead: newest %v, %d future-dated, %d remembered", a.Newest, a.Counts.Future, len(a.Seen))
	}
	first := read(testNow, nil, ahead, old)
	if !first.Newest.Equal(testNow) || first.Counts.Future != 1 || len(first.Seen) != 1 {
		t.Fatalf("first sight: newest %v, counts %+v, seen %v", first.Newest, first.Counts, first.Seen)
	}
	second := read(testNow.Add(time.Hour), first.Seen, ahead, old)
	if !second.Newest.Equal(testNow) || second.Counts.Future != 1 {
		t.Errorf("second sight: newest %v, want the time of the first; counts %+v", second.Newest, second.Counts)
	}
	if diff := cmp.Diff(first.Seen, second.Seen); diff != "" {
		t.Errorf("what is remembered changed:\n%s", diff)
	}
	third := read(testNow.Add(4*time.Hour), second.Seen, ahead, old)
	if !third.Newest.Equal(testNow) || third.Counts.Future != 0 || len(third.Seen) != 1 {
		t.Errorf("once its time has come: newest %v, want %v; counts %+v", third.Newest, testNow, third.Counts)
	}
	another := event("start_node", at(5*time.Hour), `{}`)
	fourth := read(testNow.Add(4*time.Hour), third.Seen, ahead, another, old)
	if want := testNow.Add(4 * time.Hour); !fourth.Newest.Equal(want) || len(fourth.Seen) != 2 {
		t.Errorf("a new one: newest %v, want %v; %d remembered", fourth.Newest, want, len(fourth.Seen))
	}
	if gone := read(testNow, fourth.Seen, old); len(gone.Seen) != 0 {
		t.Errorf("events that left the history are still remembered: %v", gone.Seen)
	}
}

func TestFilterFutureOverflow(t *testing.T) {
	f := mustFilter(t, func(cfg *FilterConfig) { cfg.MaxFuture = 3 })
	var events []string
	for i := range 5 {
		events = append(events, event("start_lab", testNow.Add(time.Hour).Format(time.RFC3339), fmt.Sprint(i)))
	}
	a := f.Read(strings.NewReader(array(events...)), testNow, exact, nil)
	if a.Counts.Future != 5 || a.Counts.FutureForgotten != 2 || len(a.Seen) != 3 {
		t.Fatalf("counts %+v, %d remembered", a.Counts, len(a.Seen))
	}
	later := testNow.Add(time.Minute)
	if a = f.Read(strings.NewReader(array(events...)), later, exact, a.Seen); !a.Newest.Equal(later) {
		t.Errorf("what could not be remembered must count each time: newest %v, want %v", a.Newest, later)
	}
}

func TestFilterOffset(t *testing.T) {
	f := mustFilter(t, nil)
	text := array(event("start_lab", testNow.Format(time.RFC3339), `{}`))
	fast := Offset{Known: true, Low: time.Hour, High: time.Hour + time.Second}
	if a := f.Read(strings.NewReader(text), testNow, fast, nil); !a.Newest.Equal(testNow.Add(-time.Hour)) || !a.NewestHost.Equal(testNow) {
		t.Errorf("a host an hour ahead: newest %v, by the host %v", a.Newest, a.NewestHost)
	}
	slow := Offset{Known: true, Low: -time.Hour, High: -time.Hour + time.Second}
	if a := f.Read(strings.NewReader(text), testNow.Add(2*time.Hour), slow, nil); !a.Newest.Equal(testNow.Add(time.Hour)) {
		t.Errorf("a host an hour behind: newest %v", a.Newest)
	}
	a := f.Read(strings.NewReader(text), testNow, Offset{}, Seen{{Digest: "00", FirstSeen: testNow}})
	if a.Unknown != ReasonOffsetUnknown || a.Err == nil || !a.Newest.IsZero() || len(a.Recent) != 1 || len(a.Seen) != 1 {
		t.Errorf("an unknown offset: %+v", a)
	}
	if a := f.Read(strings.NewReader(`[1`), testNow, Offset{}, nil); a.Unknown != ReasonTruncated {
		t.Errorf("a truncated answer without offset is %q", a.Unknown)
	}
}

func TestFilterUnknownCategories(t *testing.T) {
	var events []string
	for i := range maxUnknownNames + 5 {
		for range 2 {
			events = append(events, event(fmt.Sprintf("new_%d", i), "x", `{}`))
		}
	}
	a := mustFilter(t, nil).Read(strings.NewReader(array(events...)), testNow, exact, nil)
	if len(a.Counts.UnknownCategories) != maxUnknownNames || a.Counts.UnknownOther != 10 || a.Counts.UnknownCategories["new_0"] != 2 {
		t.Errorf("counts %+v", a.Counts)
	}
}

func TestFilterConfig(t *testing.T) {
	for _, c := range []struct {
		field  string
		change func(*FilterConfig)
	}{
		{"categories", func(c *FilterConfig) { c.Categories = []string{""} }},
		{"max stored", func(c *FilterConfig) { c.MaxStored = -1 }},
		{"max event bytes", func(c *FilterConfig) { c.MaxEventBytes = 2 << 20 }},
		{"max bytes", func(c *FilterConfig) { c.MaxBytes = -1 }},
		{"future after", func(c *FilterConfig) { c.FutureAfter = -1 }},
		{"max future", func(c *FilterConfig) { c.MaxFuture = -1 }},
	} {
		cfg := defaultFilterConfig()
		c.change(&cfg)
		if _, err := NewFilter(cfg); err == nil || !strings.Contains(err.Error(), c.field) {
			t.Errorf("%s: %v", c.field, err)
		}
	}
	only := mustFilter(t, func(c *FilterConfig) {
		c.Categories, c.ExcludedUsers = []string{"teleport"}, regexp.MustCompile("^me$")
	})
	a := only.Read(strings.NewReader(array(event("teleport", "2025-11-20T10:00:00", `{}`), event("start_lab", "2025-11-20T11:00:00", `{}`))), testNow, exact, nil)
	if a.Counts.Relevant != 1 || a.Recent[0].Category != "teleport" || a.Counts.UnknownCategories != nil {
		t.Errorf("a configured category: %+v", a)
	}
}

// TestFilterMemory reads 1 MB, 100 MB and 1 GB of generated history and checks
// that the memory requested from the system does not grow with the size.
func TestFilterMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("reads a gigabyte of history")
	}
	f := mustFilter(t, nil)
	system := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapSys + m.StackSys
	}
	read := func(size int64) uint64 {
		a := f.Read(io.Reader(newHistoryReader(size)), historyStart.AddDate(50, 0, 0), exact, nil)
		if a.Unknown != ReasonNone || a.Counts.Bytes < size {
			t.Fatalf("%d bytes read: %v", a.Counts.Bytes, a.Err)
		}
		t.Logf("%5d MB: %8d events, process memory %.1f MB", size>>20, a.Counts.Events, float64(system())/1e6)
		return system()
	}
	before := read(1 << 20)
	read(100 << 20)
	if raceDetector {
		t.Skip("SKIP: a gigabyte of history takes too long under the race detector")
	}
	if grown := int64(read(1<<30)) - int64(before); grown > 16<<20 {
		t.Errorf("memory grew by %d bytes from a 1 MB to a 1 GB history", grown)
	}
}
