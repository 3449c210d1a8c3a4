package idle

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/core/policy/when"
)

func TestHuman(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Hour: "0s", 0: "0s", 400 * time.Nanosecond: "0s", 120 * time.Millisecond: "120ms", 999600 * time.Microsecond: "1s",
		4123 * time.Millisecond: "4.1s", 4 * time.Second: "4s", 9960 * time.Millisecond: "10s", 10 * time.Second: "10s",
		59*time.Second + 600*time.Millisecond: "1m", 8*time.Minute + 48*time.Second: "8m48s", 45 * time.Minute: "45m",
		time.Hour - time.Millisecond: "1h", time.Hour: "1h", 90 * time.Minute: "1h30m", 4*time.Hour + 10*time.Minute + 29*time.Second: "4h10m",
		day - time.Second: "1d", day: "1d", 27*time.Hour + 40*time.Minute: "1d4h", 14979*time.Minute + 12*time.Second: "10d10h", 365 * day: "365d",
	} {
		if got := Human(d); got != want {
			t.Errorf("%d is %s, want %s", d, got, want)
		}
	}
	if got := HumanMinutes(14979.2); got != "10d10h" {
		t.Errorf("14979.2 minutes are %s", got)
	}
}

// TestHumanIsTheGrammar checks that formatted durations can be parsed again and
// then differ little.
func TestHumanIsTheGrammar(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := time.Duration(rapid.Int64Range(0, int64(9*365*day)).Draw(t, "length"))
		read, err := when.Span(Human(d))
		off, within := (read - d).Abs(), max(time.Millisecond, min(d/19, 30*time.Minute))
		if err != nil || off > within {
			t.Fatalf("%s is shown as %s and read as %s, %v", d, Human(d), read, err)
		}
	})
}

func TestAmount(t *testing.T) {
	for _, c := range []struct {
		value float64
		unit  string
		want  string
	}{
		{9.547545214260442, "%", "9.54 %"},
		{3.125, "%", "3.12 %"},
		{4.9999, "%", "4.99 %"}, // rounding up to 5 could show the threshold
		{0.000123456, "%", "0.000123 %"},
		{100, "%", "100 %"},
		{0.1, "%", "0.1 %"},
		{0, "B/min", "0 B/min"},
		{512, "B", "512 B"},
		{999.9, "B/min", "999 B/min"},
		{10000, "B/min", "10 kB/min"},
		{91143052.11789963, "B/min", "91.1 MB/min"},
		{5e15, "B", "5000 TB"},
		{12345.6, "KB/min", "12345 KB/min"},
		{3, "terminals with input or output", "3 terminals with input or output"},
		{2.5, "", "2.5"},
	} {
		if got := Amount(c.value, c.unit); got != c.want {
			t.Errorf("Amount(%v, %q) = %q, want %q", c.value, c.unit, got, c.want)
		}
	}
}
