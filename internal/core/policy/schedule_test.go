package policy_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/core/policy"
	"lull/internal/core/policy/when"
	"lull/internal/lib/errtest"
)

func at(t testing.TB, text string) time.Time {
	t.Helper()
	m, err := when.Moment(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), text)
	errtest.None(t, err)
	return m
}

func schedule(t testing.TB, zone string, windows ...string) policy.Schedule {
	t.Helper()
	s := policy.Schedule{Name: "s", Zone: zone}
	for _, text := range windows {
		w, err := policy.ParseWindow(text)
		errtest.None(t, err)
		s.Windows = append(s.Windows, w)
	}
	errtest.None(t, s.Validate())
	return s
}

// TestBoundaries checks the boundaries of schedules after a moment, and that each
// of them opens or closes the schedule. A - before the first one is ignored.
func TestBoundaries(t *testing.T) {
	for _, c := range []struct {
		name, zone string
		windows    []string
		holidays   []string
		from       string
		want       []string // local times with offset
	}{
		{"a week", "UTC", []string{"mon-fri 08:00-18:00"}, nil, "2026-06-05 12:00 UTC",
			[]string{"2026-06-05T18:00:00Z", "2026-06-08T08:00:00Z", "2026-06-08T18:00:00Z"}},
		{"spring forward: the window is an hour shorter", "Europe/Berlin", []string{"daily 00:00-06:00"}, nil, "2026-03-28 22:00 UTC",
			[]string{"2026-03-29T00:00:00+01:00", "2026-03-29T06:00:00+02:00", "2026-03-30T00:00:00+02:00"}},
		{"a skipped beginning is the moment of the skip", "Europe/Berlin", []string{"sun 02:30-06:00"}, nil, "2026-03-28 12:00 UTC",
			[]string{"2026-03-29T03:00:00+02:00", "2026-03-29T06:00:00+02:00"}},
		{"a skipped end too", "Europe/Berlin", []string{"sun 01:00-02:30"}, nil, "2026-03-28 12:00 UTC",
			[]string{"2026-03-29T01:00:00+01:00", "2026-03-29T03:00:00+02:00"}},
		{"a window inside the skip does not open", "Europe/Berlin", []string{"sun 02:10-02:50"}, nil, "2026-03-28 12:00 UTC",
			[]string{"2026-04-05T02:10:00+02:00", "2026-04-05T02:50:00+02:00"}},
		{"fall back: from the first to the second", "Europe/Berlin", []string{"sun 02:15-02:45"}, nil, "2026-10-24 12:00 UTC",
			[]string{"2026-10-25T02:15:00+02:00", "2026-10-25T02:45:00+01:00"}},
		{"fall back: an end where the repeat begins is the first", "Europe/Berlin", []string{"sun 00:00-02:00"}, nil, "2026-10-24 12:00 UTC",
			[]string{"2026-10-25T00:00:00+02:00", "2026-10-25T02:00:00+02:00"}},
		{"fall back: a day is 25 hours", "America/New_York", []string{"sun 00:00-24:00"}, nil, "2026-10-31 12:00 UTC",
			[]string{"2026-11-01T00:00:00-04:00", "2026-11-02T00:00:00-05:00"}},
		{"half hours of a zone", "Asia/Kolkata", []string{"mon 09:00-17:30"}, nil, "2026-06-06 12:00 UTC",
			[]string{"2026-06-08T09:00:00+05:30", "2026-06-08T17:30:00+05:30"}},
		{"half an hour of DST", "Australia/Lord_Howe", []string{"sun 01:45-02:15"}, nil, "2026-04-04 00:00 UTC",
			[]string{"2026-04-05T01:45:00+11:00", "2026-04-05T02:15:00+10:30"}},
		{"three quarters", "Asia/Kathmandu", []string{"fri 10:00-11:00"}, nil, "2026-06-04 12:00 UTC",
			[]string{"2026-06-05T10:00:00+05:45", "2026-06-05T11:00:00+05:45"}},
		{"leap day", "UTC", []string{"mon-fri 08:00-18:00"}, nil, "2028-02-28 19:00 UTC",
			[]string{"2028-02-29T08:00:00Z", "2028-02-29T18:00:00Z", "2028-03-01T08:00:00Z"}},
		{"a leap day as a holiday of every year", "UTC", []string{"mon-fri 08:00-18:00"}, []string{"02-29"}, "2028-02-28 19:00 UTC",
			[]string{"2028-03-01T08:00:00Z"}},
		{"always open but for leap days", "UTC", []string{"daily 00:00-24:00"}, []string{"02-29"}, "2026-01-01 00:00 UTC",
			[]string{"-2028-02-29T00:00:00Z", "2028-03-01T00:00:00Z"}},
		{"a week of holidays", "Europe/Paris", []string{"mon-fri 08:00-18:00"},
			[]string{"12-24", "12-25", "2026-12-28", "2026-12-29", "2026-12-30", "2026-12-31", "01-01"}, "2026-12-23 18:30 Europe/Paris",
			[]string{"2027-01-04T08:00:00+01:00"}},
		{"overnight, into a holiday", "UTC", []string{"daily 22:00-06:00"}, []string{"2026-06-10"}, "2026-06-09 12:00 UTC",
			[]string{"2026-06-09T22:00:00Z", "2026-06-10T06:00:00Z", "2026-06-11T22:00:00Z"}},
		{"windows that touch are one", "UTC", []string{"mon 08:00-24:00", "tue 00:00-10:00", "tue 09:00-12:00"}, nil, "2026-06-07 12:00 UTC",
			[]string{"2026-06-08T08:00:00Z", "2026-06-09T12:00:00Z"}},
		{"a day that the zone skipped", "Pacific/Apia", []string{"fri 08:00-18:00", "sat 08:00-18:00"}, nil, "2011-12-29 12:00 Pacific/Apia",
			[]string{"2011-12-31T08:00:00+14:00", "2011-12-31T18:00:00+14:00"}},
		{"one day only", "UTC", []string{"2026-07-01 08:00-09:00"}, nil, "2026-06-01 12:00 UTC", []string{"2026-07-01T08:00:00Z", "2026-07-01T09:00:00Z"}},
		{"always open", "UTC", []string{"daily 00:00-24:00"}, nil, "2026-06-01 12:00 UTC", nil},
	} {
		s := schedule(t, c.zone, c.windows...)
		s.Holidays = c.holidays
		n := len(c.want)
		if n == 0 {
			n = 1
		}
		got, err := s.Boundaries(at(t, c.from), n)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		var said []string
		for i, b := range got {
			said = append(said, b.At.Format(time.RFC3339))
			if open, err := s.Open(b.At); err != nil || open != b.Opens {
				t.Errorf("%s: at %s open is %t, %v", c.name, b.At, open, err)
			}
			if before, err := s.Open(b.At.Add(-time.Nanosecond)); err != nil || before == b.Opens {
				t.Errorf("%s: before %s open is %t, %v", c.name, b.At, before, err)
			}
			if i > 0 && got[i-1].Opens == b.Opens {
				t.Errorf("%s: %s is no change", c.name, b.At)
			}
		}
		want := slices.Clone(c.want)
		if len(want) > 0 && want[0][0] == '-' {
			want[0] = want[0][1:]
		}
		if !slices.Equal(said, want) {
			t.Errorf("%s:\n got %v\nwant %v", c.name, said, want)
		}
	}
}

var zones = []string{"UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "Asia/Kathmandu", "America/St_Johns",
	"Pacific/Apia", "Africa/Casablanca", "America/Sao_Paulo", "Pacific/Chatham", "Asia/Tehran", "Europe/Dublin", "Antarctica/Troll"}

// moment is a time and the reading of a wall clock at that time.
type moment struct {
	at, wall int64 // Unix seconds, and the same of the local time read as UTC
}

// hulls computes the open times of a schedule independently. For each window and
// day, it is the period from the first moment at which the wall clock shows a
// time in the window to the end of the last such moment.
func hulls(s *policy.Schedule, walk []moment, step int64) [][2]int64 {
	var out [][2]int64
	first, last := time.Unix(walk[0].wall, 0).UTC(), time.Unix(walk[len(walk)-1].wall, 0).UTC()
	for d := when.DateOf(first); d.String() <= when.DateOf(last).String(); d = d.Add(1) {
		for _, w := range s.Windows {
			if !w.Days.Has(d.Weekday()) || slices.Contains(s.Holidays, d.String()) {
				continue
			}
			midnight := time.Date(d.Year, d.Month, d.Day, 0, 0, 0, 0, time.UTC).Unix()
			from, to := midnight+int64(w.From)*60, midnight+int64(w.To)*60
			if w.To <= w.From {
				to += 24 * 3600
			}
			var hull *[2]int64
			for _, m := range walk {
				if m.wall < from || m.wall >= to {
					continue
				}
				if hull == nil {
					hull = &[2]int64{m.at, 0}
				}
				hull[1] = m.at + step
			}
			if hull != nil {
				out = append(out, *hull)
			}
		}
	}
	return out
}

// TestBoundariesOracle checks the open times and boundaries of random schedules
// against a walk over the wall clock in steps of a quarter of an hour, at changes
// of the zone's offset and elsewhere.
func TestBoundariesOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		zone := rapid.SampledFrom(zones).Draw(t, "zone")
		loc, err := when.Zone(zone)
		errtest.None(t, err)
		start := time.Unix(rapid.Int64Range(1293840000, 2051222400).Draw(t, "around")/900*900, 0)
		if _, end := start.In(loc).ZoneBounds(); !end.IsZero() && end.Unix()%900 == 0 && rapid.Bool().Draw(t, "at a change") {
			start = end
		}
		quarter := rapid.Custom(func(t *rapid.T) when.Clock { return when.Clock(15 * rapid.IntRange(0, 95).Draw(t, "quarter")) })
		s := policy.Schedule{Name: "s", Zone: zone}
		for range rapid.IntRange(1, 3).Draw(t, "windows") {
			w := policy.Window{Days: when.Days(rapid.IntRange(1, 127).Draw(t, "days")), From: quarter.Draw(t, "from"), To: quarter.Draw(t, "to")}
			if w.From == w.To {
				w.To += 15
			}
			s.Windows = append(s.Windows, w)
		}
		if rapid.Bool().Draw(t, "holiday") {
			s.Holidays = []string{when.DateOf(start.In(loc)).Add(rapid.IntRange(-1, 1).Draw(t, "off")).String()}
		}
		var walk []moment
		for i := start.Unix() - 130*3600; i < start.Unix()+130*3600; i += 900 {
			_, off := time.Unix(i, 0).In(loc).Zone()
			walk = append(walk, moment{i, i + int64(off)})
		}
		spans := hulls(&s, walk, 900)
		was := false
		for i := start.Unix() - 40*3600; i <= start.Unix()+40*3600; i += 900 {
			m := time.Unix(i, 0)
			want := slices.ContainsFunc(spans, func(h [2]int64) bool { return h[0] <= i && i < h[1] })
			got, err := s.Open(m)
			if err != nil || got != want {
				t.Fatalf("%s: open is %t, want %t (%v): %v", m.In(loc), got, want, err, s)
			}
			if i > start.Unix()-40*3600 && want != was {
				b, err := s.Boundaries(m.Add(-900*time.Second), 1)
				if err != nil || len(b) != 1 || !b[0].At.Equal(m) || b[0].Opens != want {
					t.Fatalf("boundary %v, %v; want one at %s", b, err, m.In(loc))
				}
			}
			was = want
		}
	})
}

func TestBadSchedules(t *testing.T) {
	for text, want := range map[string]string{
		"mon-fri 8-18": "clock time", "mon-fri": "want one such as", "fry 08:00-18:00": "days", "mon 08:00-08:00": "whole day", "2026-02-30 08:00-09:00": "days",
		"mon 24:00-25:00": "clock time", "mon 24:00-01:00": "not between", "": "want one such as",
	} {
		if _, err := policy.ParseWindow(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	bad := policy.Schedule{Name: "a b", Zone: "Mars/Base", Windows: []policy.Window{{}}, Holidays: []string{"02-30", "christmas"}, GraceMinutes: new(0)}
	err := bad.Validate()
	for _, field := range []string{"name", "zone", "windows[0]", "holidays[0]", "holidays[1]", "grace_minutes"} {
		if err == nil || !strings.Contains(err.Error(), "cannot use "+field+":") {
			t.Errorf("no fault of %s in %v", field, err)
		}
	}
}

func FuzzParseWindow(f *testing.F) {
	for _, s := range []string{"mon-fri 08:00-18:00", "2026-12-24 22:00-06:00", "sat-mon,wed 00:00-24:00", "daily 1:00-2:00", "x", "mon 08:00-18:00-19:00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		w, err := policy.ParseWindow(text)
		if err != nil {
			return
		}
		again, err := policy.ParseWindow(w.String())
		if err != nil || again != w {
			t.Errorf("%q became %+v and then %+v, %v", text, w, again, err)
		}
		s := policy.Schedule{Name: "s", Zone: "Europe/Berlin", Windows: []policy.Window{w}}
		if err := s.Validate(); err != nil {
			t.Errorf("%q is a window and no schedule: %v", text, err)
		}
		if _, err := s.Boundaries(time.Date(2026, 3, 28, 0, 0, 0, 0, time.UTC), 3); err != nil {
			t.Error(err)
		}
	})
}
