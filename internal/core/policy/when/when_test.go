package when_test

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/policy/when"
)

func zone(t testing.TB, name string) *time.Location {
	t.Helper()
	l, err := when.Zone(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestMoment(t *testing.T) {
	berlin := zone(t, "Europe/Berlin")
	wednesday := time.Date(2026, 3, 25, 14, 30, 0, 0, berlin) // the Wednesday before the clocks go forward
	for in, want := range map[string]string{
		"18:00": "2026-03-25T18:00:00+01:00", "14:30": "2026-03-26T14:30:00+01:00", "8:05": "2026-03-26T08:05:00+01:00", "24:00": "2026-03-26T00:00:00+01:00",
		"18:00 UTC": "2026-03-25T18:00:00Z", "13:31 Asia/Kolkata": "2026-03-26T13:31:00+05:30", "tomorrow": "2026-03-26T00:00:00+01:00",
		"tomorrow 09:00": "2026-03-26T09:00:00+01:00", "today 09:00": "2026-03-25T09:00:00+01:00", "wed 15:00": "2026-03-25T15:00:00+01:00",
		"wed 14:00": "2026-04-01T14:00:00+02:00", "wed": "2026-04-01T00:00:00+02:00", "Friday 18:00": "2026-03-27T18:00:00+01:00", "sun 02:30": "2026-03-29T03:00:00+02:00",
		"2026-10-25 02:30": "2026-10-25T02:30:00+02:00", "2028-02-29": "2028-02-29T00:00:00+01:00", "2026-12-24 22:00 America/New_York": "2026-12-24T22:00:00-05:00",
		"2026-03-25T10:00:00Z": "2026-03-25T10:00:00Z", "+2h": "2026-03-25T16:30:00+01:00", "+1d": "2026-03-26T14:30:00+01:00", " 18:00 ": "2026-03-25T18:00:00+01:00",
		"18:00:25": "2026-03-25T18:00:25+01:00", "14:30:00": "2026-03-26T14:30:00+01:00", "2026-11-22 20:54:25": "2026-11-22T20:54:25+01:00", "wed 14:30:01": "2026-03-25T14:30:01+01:00",
	} {
		if got, err := when.Moment(wednesday, in); err != nil || got.Format(time.RFC3339) != want {
			t.Errorf("%q is %s, %v; want %s", in, got.Format(time.RFC3339), err, want)
		}
	}
	for _, in := range []string{"", "soon", "25:00", "24:01", "18", "18:0", "-1:00", "mon tue", "2026-02-29", "2026-02-29 10:00", "18:00 Mars/Base", "18:00 Local", "Europe/Berlin",
		"+", "+0h", "+-1h", "2026-13-01", "fri 18:00 UTC now", "9999-01-01T00:00:00Z", "18:00:60", "18:00:5", "18:00:00:00", "24:00:01", "18:00:", "today"} {
		if got, err := when.Moment(wednesday, in); err == nil || !strings.HasPrefix(err.Error(), "cannot ") {
			t.Errorf("%q was read as %s, %v", in, got, err)
		}
	}
	for in, want := range map[string]string{
		"2h": "2026-03-25T12:30:00+01:00", "2h ago": "2026-03-25T12:30:00+01:00", "1d": "2026-03-24T14:30:00+01:00", "now": "2026-03-25T14:30:00+01:00", "14:00": "2026-03-25T14:00:00+01:00", "14:29:59": "2026-03-25T14:29:59+01:00", "18:00:05": "2026-03-24T18:00:05+01:00", "wed 15:00:07": "2026-03-18T15:00:07+01:00", "2026-03-25 14:29:30": "2026-03-25T14:29:30+01:00", "18:00": "2026-03-24T18:00:00+01:00", "mon 09:00": "2026-03-23T09:00:00+01:00",
		"wed 15:00": "2026-03-18T15:00:00+01:00", "2026-01-01": "2026-01-01T00:00:00+01:00", "1w": "2026-03-18T14:30:00+01:00",
	} {
		if got, err := when.Past(wednesday, in); err != nil || got.Format(time.RFC3339) != want {
			t.Errorf("past %q is %s, %v; want %s", in, got.Format(time.RFC3339), err, want)
		}
	}
	for _, in := range []string{"tomorrow", "+2h", "2030-01-01", "x"} {
		if got, err := when.Past(wednesday, in); err == nil {
			t.Errorf("past %q was read as %s", in, got)
		}
	}
	if _, err := when.Ahead(wednesday, "today 09:00"); err == nil {
		t.Error("an end that is over was taken")
	}
	if _, err := when.End(wednesday, "18:00", "2h"); err == nil {
		t.Error("two ends were taken")
	}
}

func TestLength(t *testing.T) {
	for in, want := range map[string]time.Duration{"90m": 90 * time.Minute, "2h30m": 150 * time.Minute, "1d": 24 * time.Hour, "2w": 14 * 24 * time.Hour, "1.5h": 90 * time.Minute, "500ms": time.Second / 2, "1m30s": 90 * time.Second, "1d12h": 36 * time.Hour} {
		if got, err := when.Length(in); err != nil || got != want {
			t.Errorf("%q is %s, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "0h", "h", "-1h", "1", "1y", "2h x", "11000d", "1e9h", "..h", "1h 2m", "0.0000000000001s"} {
		if got, err := when.Length(in); err == nil {
			t.Errorf("%q was read as %s", in, got)
		}
	}
}

// TestSpan checks that Span accepts zero, and everything that Length accepts.
func TestSpan(t *testing.T) {
	for in, want := range map[string]time.Duration{"0": 0, "0s": 0, "0h0m": 0, "250ms": time.Second / 4, "1d": 24 * time.Hour} {
		if got, err := when.Span(in); err != nil || got != want {
			t.Errorf("%q is %s, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "1", "-1s", "d", "11000d", "00"} {
		if got, err := when.Span(in); err == nil {
			t.Errorf("%q was read as %s", in, got)
		}
	}
}

func TestDays(t *testing.T) {
	for in, want := range map[string]string{"mon-fri": "mon-fri", "sat,sun": "sat,sun", "fri-mon": "mon,fri-sun", "daily": "daily", "Monday,wed-friday": "mon,wed-fri", "sun": "sun", "mon-sun": "daily"} {
		d, err := when.ParseDays(in)
		if err != nil || d.String() != want {
			t.Errorf("%q is %s, %v; want %s", in, d, err, want)
		}
		if again, err := when.ParseDays(d.String()); err != nil || again != d {
			t.Errorf("%s was read back as %s, %v", d, again, err)
		}
	}
}

func FuzzMoment(f *testing.F) {
	for _, s := range []string{"18:00", "fri 18:00", "2026-03-29 02:30 Europe/Berlin", "+2h", "tomorrow", "2026-12-24T10:00:00+05:30", "24:00 Pacific/Apia", "wed", "\x00", "18:00 ../x"} {
		f.Add(s, int64(1774000000))
	}
	f.Fuzz(func(t *testing.T, s string, sec int64) {
		now := time.Unix(((sec%4e9)+4e9)%4e9, 0).In(zone(t, "America/St_Johns"))
		m, err := when.Moment(now, s)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "cannot ") {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		if a, err := when.Ahead(now, s); (err == nil) != m.After(now) || err == nil && !a.Equal(m) {
			t.Errorf("%q is %s and ahead %s, %v", s, m, a, err)
		}
		if p, err := when.Past(now, s); err == nil && p.After(now) {
			t.Errorf("%q in the past is %s, after %s", s, p, now)
		}
	})
}

func FuzzLength(f *testing.F) {
	for _, s := range []string{"90m", "2h30m", "1d", "2w", "0.5s", "99999999999999999999h", "1.2.3h"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := when.Length(s)
		if err == nil && (d <= 0 || d > when.MaxLength) || err != nil && !strings.HasPrefix(err.Error(), "cannot ") {
			t.Errorf("%q is %s, %v", s, d, err)
		}
	})
}
