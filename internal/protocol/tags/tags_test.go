package tags

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	deadline := time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)
	s, faults := Parse("prism:", map[string]string{
		"prism:idle-timeout":      "1h",
		"prism:hibernate-on-idle": "true",
		"prism:on-complete":       "stop",
		"prism:pre-stop":          "/home/ubuntu/cleanup.sh",
		"prism:ttl-deadline":      "2026-01-02T15:04:05Z",
		"prism:idle-cpu":          "7.5%",
		"prism:idle-network":      "10KB/min",
		"prism:idle-disk":         "1 MiB",
		"prism:signals":           "cpu, disk",
		"prism:name":              "not ours",
		"Name":                    "workspace",
		"lull:idle-timeout":       "5h",
	})
	if len(faults) > 0 {
		t.Fatalf("faults: %v", faults)
	}
	want := Settings{IdleTimeout: new(time.Hour), HibernateOnIdle: new(true), OnComplete: new("stop"),
		PreStop: new("/home/ubuntu/cleanup.sh"), TTLDeadline: &deadline, IdleCPU: new(7.5),
		IdleNetwork: new(10e3), IdleDisk: new(float64(1 << 20)), Signals: &[]string{"cpu", "disk"}}
	if d := cmp.Diff(want, s); d != "" {
		t.Fatal(d)
	}
}

func TestFaultsNameTagAndValue(t *testing.T) {
	bad := map[string]string{
		"idle-timeout":     "soon",
		"check-interval":   "1ns",
		"warn-before":      "-5m",
		"boot-grace":       "48h",
		"on-complete":      "explode",
		"ttl-deadline":     "tomorrow",
		"ttl-action":       "hibernate",
		"pre-stop":         " ",
		"pre-stop-timeout": "2h",
		"pre-stop-user":    "-root",
		"completion-file":  "/tmp/../etc/x",
		"idle-cpu":         "101",
		"idle-gpu":         "NaN",
		"idle-disk":        "lots",
		"idle-network":     "-1",
		"signals":          "cpu,disc",
		"active-ports":     "80,http",
		"notify-url":       "ftp://x",
		"enabled":          "maybe",
		"pause-holder":     "me",
		"idle-tiemout":     "1h",
		"snooze":           strings.Repeat("1", 300) + "h",
	}
	for name, value := range bad {
		s, faults := Parse("lull:", map[string]string{"lull:" + name: value, "lull:idle-gpu ": "5"})
		delete(bad, "")
		var got []Fault
		for _, f := range faults {
			if f.Tag == "lull:"+name {
				got = append(got, f)
			}
		}
		if len(got) != 1 || got[0].Value != shown(name, value) || got[0].Problem == "" || !strings.Contains(got[0].Error(), name) {
			t.Errorf("%s=%q: faults %v", name, value, faults)
		}
		if d := cmp.Diff(Settings{}, s); d != "" {
			t.Errorf("%s=%q still sets: %s", name, value, d)
		}
	}
}

func TestOneFaultLeavesTheOthers(t *testing.T) {
	s, faults := Parse("lull:", map[string]string{"lull:idle-timeout": "x", "lull:idle-cpu": "9"})
	if len(faults) != 1 || s.IdleCPU == nil || *s.IdleCPU != 9 {
		t.Fatalf("%v, faults %v", s, faults)
	}
}

func TestOver(t *testing.T) {
	base := Settings{IdleTimeout: new(time.Hour), IdleCPU: new(5.0)}
	got := Settings{IdleCPU: new(0.0)}.Over(base)
	if *got.IdleTimeout != time.Hour || *got.IdleCPU != 0 {
		t.Fatal(got)
	}
	if d := cmp.Diff([]string{"idle-cpu"}, got.Changes(base)); d != "" {
		t.Fatal(d)
	}
}

func TestStateTags(t *testing.T) {
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s := State{Status: StatusIdle, Since: since, Action: ActionStopping}
	want := map[string]string{"Prism:IdleStatus": "idle", "Prism:IdleSince": "2026-01-02T03:04:05Z", "Prism:IdleAction": "stopping"}
	if d := cmp.Diff(want, s.Encode("prism:")); d != "" {
		t.Fatal(d)
	}
	want = map[string]string{"lull:idle-status": "idle", "lull:idle-since": "2026-01-02T03:04:05Z", "lull:idle-action": "stopping"}
	got := s.Encode("lull:")
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
	if d := cmp.Diff(s, DecodeState("lull:", got)); d != "" {
		t.Fatal(d)
	}
	if got := DecodeState("lull:", map[string]string{"lull:idle-status": "napping"}); got != (State{}) {
		t.Fatal(got)
	}
	if _, faults := Parse("lull:", got0(got)); len(faults) > 0 {
		t.Fatalf("state tags are read as settings: %v", faults)
	}
}

func got0(m map[string]string) map[string]string { return maps.Clone(m) }

// FuzzParse checks that parsed settings survive Encode and Parse unchanged, and
// that every fault has the tag's name and the part of the value that may be
// shown.
func FuzzParse(f *testing.F) {
	for i := range fields {
		f.Add(fields[i].Name, "1h")
		f.Add(fields[i].Name, "5")
		f.Add(fields[i].Name, "stop")
		f.Add(fields[i].Name, "2026-01-02T15:04:05+02:00")
		f.Add(fields[i].Name, "a,b c;d")
	}
	f.Fuzz(func(t *testing.T, name, value string) {
		s, faults := Parse("lull:", map[string]string{"lull:" + name: value})
		for _, f := range faults {
			if f.Tag != "lull:"+name || f.Value != shown(name, value) || f.Problem == "" {
				t.Fatalf("fault %+v of %q=%q", f, name, value)
			}
		}
		out := s.Encode("lull:")
		again, faults := Parse("lull:", out)
		if len(faults) > 0 {
			t.Fatalf("%q=%q is written as %v, which cannot be read: %v", name, value, out, faults)
		}
		if d := again.Changes(s); len(d) > 0 {
			t.Fatalf("%q=%q comes back different in %v: %v", name, value, d, out)
		}
	})
}

// shown returns a value as a fault shows it. For a misspelled name, the rules of
// the intended setting apply.
func shown(name, value string) string {
	if find(name) == nil {
		name = nearest(name)
	}
	return Show(name, value)
}

func TestEmptyList(t *testing.T) {
	if _, faults := Parse("lull:", map[string]string{"lull:signals": " ,", "lull:presence": ""}); len(faults) != 1 || faults[0].Tag != "lull:signals" {
		t.Errorf("a machine without signals: %v", faults)
	}
}

func TestShow(t *testing.T) {
	for _, c := range []struct{ name, value, want string }{
		{"idle-timeout", "soon", "soon"},
		{"pre-stop", "", ""},
		{"pre-stop", "/opt/save", "/opt/save"},
		{"pre-stop", "  /opt/save\t--key x", "/opt/save …"},
		{"pre-stop", "KEY=x /opt/save", "…"},
		{"pre-stop", "'/opt/a b' c", "…"},
		{"pre-stop", "(sync)", "…"},
		{"pre-stop", "/opt/save …", "/opt/save …"},
		{"notify-url", "https://hooks.example", "https://hooks.example"},
		{"notify-url", "https://hooks.example/", "https://hooks.example/"},
		{"notify-url", "https://hooks.example/a/b", "https://hooks.example/…"},
		{"notify-url", "https://a:b@hooks.example", "https://hooks.example/…"},
		{"notify-url", "https://hooks.example?key=a", "https://hooks.example/…"},
		{"notify-url", "hooks.example/a", "…"},
		{"notify-url", "%zz", "…"},
		{"notify-ulr", "x", "…"},
	} {
		if got := Show(c.name, c.value); got != c.want {
			t.Errorf("%s=%q is shown as %q, want %q", c.name, c.value, got, c.want)
		}
	}
}
