package term

import (
	"strings"
	"testing"
	"time"
)

// TestPastMoment checks the accepted forms of a past time.
func TestPastMoment(t *testing.T) {
	now := time.Date(2026, 3, 4, 15, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		in   string
		want time.Time
		bad  bool
	}{
		{"", time.Time{}, false},
		{"2h", now.Add(-2 * time.Hour), false},
		{"14:30", time.Date(2026, 3, 4, 14, 30, 0, 0, time.UTC), false},
		{"16:30", time.Date(2026, 3, 3, 16, 30, 0, 0, time.UTC), false},
		{"2026-03-01 08:00", time.Date(2026, 3, 1, 8, 0, 0, 0, time.UTC), false},
		{"2026-03-01T08:00:00Z", time.Date(2026, 3, 1, 8, 0, 0, 0, time.UTC), false},
		{"-2h", time.Time{}, true},
		{"yesterday", time.Time{}, true},
		{"25:00", time.Time{}, true},
	} {
		got, err := Past(now, c.in)
		if (err != nil) != c.bad || !c.bad && !got.Equal(c.want) {
			t.Errorf("pastMoment(%q) = %v, %v; want %v, bad %t", c.in, got, err, c.want, c.bad)
		}
	}
}

func FuzzPastMoment(f *testing.F) {
	for _, s := range []string{"", "2h", "14:30", "2026-03-01 08:00", "2026-03-01T08:00:00Z", "9999999h", "24:00", "\x00"} {
		f.Add(s)
	}
	now := time.Date(2026, 3, 4, 15, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, s string) {
		got, err := Past(now, s)
		if err != nil && !strings.HasPrefix(err.Error(), "cannot ") {
			t.Errorf("%q: %v", s, err)
		}
		if _, derr := time.ParseDuration(s); err == nil && derr == nil && got.After(now) {
			t.Errorf("%q lies ahead: %v", s, got)
		}
	})
}

// TestMoment checks the accepted forms of a time.
func TestMoment(t *testing.T) {
	now := time.Date(2026, 3, 1, 20, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		until string
		dur   time.Duration
		want  string
	}{
		{"", 2 * time.Hour, "2026-03-01T22:00:00Z"},
		{"22:30", 0, "2026-03-01T22:30:00Z"},
		{"18:00", 0, "2026-03-02T18:00:00Z"}, // 18:00 has passed today, so tomorrow
		{"20:00", 0, "2026-03-02T20:00:00Z"},
		{"2026-03-05 07:15", 0, "2026-03-05T07:15:00Z"},
		{"2026-03-05T07:15:00+01:00", 0, "2026-03-05T06:15:00Z"},
	} {
		got, err := End(now, c.until, c.dur)
		if err != nil || got.UTC().Format(time.RFC3339) != c.want {
			t.Errorf("%q %s: %v, %v", c.until, c.dur, got, err)
		}
	}
	for _, bad := range []struct {
		until string
		dur   time.Duration
	}{{"", 0}, {"18:00", time.Hour}, {"", -time.Hour}, {"25:00", 0}, {"soon", 0}} {
		if got, err := End(now, bad.until, bad.dur); err == nil {
			t.Errorf("%+v was read as %v", bad, got)
		}
	}
}

// TestEndOr checks ends that are given as a duration, as a time, or not at all.
func TestEndOr(t *testing.T) {
	now := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	for _, c := range []struct {
		until string
		dur   time.Duration
		want  time.Duration // 0 is refused
	}{
		{"", 0, time.Minute},
		{"", 2 * time.Hour, 2 * time.Hour},
		{"05:16:00", 0, 10*time.Minute - 7*time.Second},
		{"05:16:61", 0, 0},
		{"05:16", 0, 10*time.Minute - 7*time.Second},
		{"2026-03-05", 0, 19*time.Hour - 6*time.Minute - 7*time.Second},
		{"2026-03-03", 0, 0},
		{"+1h", time.Hour, 0},
	} {
		got, err := EndOr(now, c.until, c.dur, time.Minute)
		if got != c.want || (err != nil) != (c.want == 0) {
			t.Errorf("%q, %s: %s and %v, want %s", c.until, c.dur, got, err, c.want)
		}
	}
}
