package control

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
)

// report returns a valid report.
func report() HostReport {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return HostReport{Host: "desk", At: at, Sequence: 2, After: 1, StartedAt: at, Version: "v1", Interval: idle.Duration(15 * time.Second),
		Counts: map[string]int{"running": 1}, Gone: []string{"i0"}, Instances: []HostInstance{
			{ID: "i1", Name: "web", State: "running", Runtime: "process", CreatedAt: at, Blocks: []idle.Block{{Code: idle.ConnectionOpen, Sentence: "One connection."}}}}}
}

// TestHostReportsAreChecked checks that an invalid report, and one of another
// host, is refused with the field's name.
func TestHostReportsAreChecked(t *testing.T) {
	long := strings.Repeat("x", MaxHostText+1)
	for field, change := range map[string]func(r *HostReport){
		"":                                func(*HostReport) {},
		"host":                            func(r *HostReport) { r.Host = "other" },
		"at":                              func(r *HostReport) { r.At = time.Time{} },
		"sequence":                        func(r *HostReport) { r.After = 2 },
		"interval_seconds":                func(r *HostReport) { r.Interval = 0 },
		"counts":                          func(r *HostReport) { r.Counts["RUNNING"] = 1 },
		"version":                         func(r *HostReport) { r.Version = long },
		"faults[0]":                       func(r *HostReport) { r.Faults = []string{"\x1b[2J"} },
		"gone[0]":                         func(r *HostReport) { r.Gone[0] = "i1" },
		"instances[0]":                    func(r *HostReport) { r.Instances[0].ID = "../i" },
		"instances[0]: cannot use":        func(r *HostReport) { r.Instances[0].Name = "Web!" },
		"instances[0]: its state":         func(r *HostReport) { r.Instances[0].State = "" },
		"instances[0]: its runtime":       func(r *HostReport) { r.Instances[0].Runtime = "a b" },
		"instances[0]: a negative number": func(r *HostReport) { r.Instances[0].Connections = -1 },
		"instances[0]: it has more":       func(r *HostReport) { r.Instances[0].Leases = make([]idle.Lease, 65) },
		"instances[1]": func(r *HostReport) {
			r.Instances = append(r.Instances, r.Instances[0])
			r.Instances[1].ID = "i2"
		},
		"instances[0].blocks[0].sentence": func(r *HostReport) { r.Instances[0].Blocks[0].Sentence = "a\nb" },
	} {
		r := report()
		change(&r)
		body, err := json.Marshal(r)
		errtest.None(t, err)
		_, err = ReadHostReport("desk", body)
		if field == "" && err != nil || field != "" && (err == nil || !strings.Contains(err.Error(), field)) {
			t.Errorf("%q: %v", field, err)
		}
	}
	if _, err := ReadHostReport("desk", make([]byte, MaxHostReport+1)); err == nil || !strings.Contains(err.Error(), "larger") {
		t.Errorf("oversized: %v", err)
	}
}

// TestHostsFit checks that a report that is too large is accepted after Fit.
func TestHostsFit(t *testing.T) {
	r := report()
	i := &r.Instances[0]
	i.StatusReason = strings.Repeat("ü", MaxHostText) + "\x00"
	i.Leases = make([]idle.Lease, 300)
	r.Faults = []string{"one\ntwo\xff"}
	r.Fit()
	body, err := json.Marshal(r)
	errtest.None(t, err)
	got, err := ReadHostReport("desk", body)
	errtest.None(t, err)
	if got.Faults[0] != "one two\uFFFD" || !strings.HasSuffix(got.Instances[0].StatusReason, "ü…") || len(got.Instances[0].Leases) != maxHostEach {
		t.Errorf("got %q, %.20q and %d leases", got.Faults, got.Instances[0].StatusReason, len(got.Instances[0].Leases))
	}
}

// FuzzHostReport parses random reports. Parsing must not crash. An accepted
// report must be bounded and printable, have no null list, and survive a round
// trip.
func FuzzHostReport(f *testing.F) {
	good, err := json.Marshal(report())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"host":"desk","instances":null,"counts":null}`))
	f.Add([]byte(strings.Replace(string(good), `"i1"`, `"i1\u0007"`, 1)))
	f.Add([]byte(strings.Replace(string(good), `"interval_seconds":15`, `"interval_seconds":1e400`, 1)))
	f.Add([]byte(strings.Replace(string(good), `"2026-01-02T03:04:05Z"`, `"9999-12-31T23:59:59-23:59"`, 1)))
	f.Add([]byte(`{"answers":[{"id":"q1","why":{"instance":{"id":"i1","name":"web","state":"running","runtime":"process"}}}],"wait_seconds":1}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if r, err := ReadHostReport("desk", body); err == nil {
			tame(t, &r)
			again, err := json.Marshal(r)
			if err != nil {
				t.Fatalf("what was taken cannot be told: %v", err)
			}
			if len(again) <= MaxHostReport {
				if back, err := ReadHostReport("desk", again); err != nil || !reflect.DeepEqual(wire(t, r), wire(t, back)) {
					t.Fatalf("read again: %v\n%s", err, again)
				}
			}
		}
		if turn, err := ReadHostTurn(body); err == nil {
			tame(t, &turn)
		}
	})
}

func wire(t *testing.T, v any) string {
	b, err := json.Marshal(v)
	errtest.None(t, err)
	return string(b)
}

func tame(t *testing.T, v any) {
	t.Helper()
	errtest.None(t, plain(v))
	walk(reflect.ValueOf(v), "", nil, func(l reflect.Value) {
		if l.IsNil() {
			t.Fatalf("a list of %s is null", l.Type())
		}
	})
}
