package crontab

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/robfig/cron/v3"

	"lull/internal/lib/scaletest"
)

func user() style {
	return style{zone: time.UTC, cronie: true, find: time.LoadLocation}
}

// TestNext checks the next time of crontab lines, including some that robfig's
// parser rejects or interprets differently from cron.
func TestNext(t *testing.T) {
	from := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) // a Friday
	for line, want := range map[string]string{
		"*/10 * * * * x":                  "2026-01-02T03:10:00Z",
		"  -5\t4 *  * * x":                "2026-01-02T04:05:00Z",
		"@daily x":                        "2026-01-03T00:00:00Z",
		"@midnight x":                     "2026-01-03T00:00:00Z",
		"@WEEKLY x":                       "",
		"@weekly x":                       "2026-01-04T00:00:00Z",
		"@annually x":                     "2027-01-01T00:00:00Z",
		"0 0 * * 7 x":                     "2026-01-04T00:00:00Z", // Sunday
		"0 0 * * 5-7 x":                   "2026-01-03T00:00:00Z",
		"0 0 * * 1-7/2 x":                 "2026-01-04T00:00:00Z",
		"0 0 * * 6-7/2 x":                 "2026-01-03T00:00:00Z",
		"0 0 * * 0-7 x":                   "2026-01-03T00:00:00Z",
		"0 0 * * Sun,7 x":                 "2026-01-04T00:00:00Z",
		"0 0 * feb mon-tue x":             "2026-02-02T00:00:00Z",
		"0 0 13 * 5 x":                    "2026-01-09T00:00:00Z", // the 13th or a Friday
		"0 0 13 * * x":                    "2026-01-13T00:00:00Z",
		"0 0 */2 * 1 x":                   "2026-01-03T00:00:00Z", // Debian: odd Mondays; BusyBox: either
		"0 9 31 12 * x":                   "2026-12-31T09:00:00Z",
		"7/20 3 * * * x":                  "2026-01-02T03:07:00Z",
		"CRON_TZ=Asia/Tokyo\n0 0 * * * x": "2026-01-02T15:00:00Z",
		"TZ=Asia/Tokyo\n0 0 * * * x":      "2026-01-03T00:00:00Z", // TZ affects only the job, not when it runs
		"# * * * * * x\n\nA = \"1 2\"\n'B'=x\n0 0 1 2 * x": "2026-02-01T00:00:00Z",
		"RANDOM_DELAY=0\n0 0 1 2 * x":                      "2026-02-01T00:00:00Z",
		"@reboot x":                                        "never",
		"":                                                 "never",
		"0 0 30 2 * x":                                     "never",
	} {
		jobs, err := parse("f", []byte(line), user())
		got := "never"
		if next, _ := (&Tables{jobs: jobs}).Next(from); err != nil {
			got = ""
		} else if !next.IsZero() {
			got = next.UTC().Format(time.RFC3339)
		}
		if got != want {
			t.Errorf("%q: %s (%v), want %s", line, got, err, want)
		}
	}
}

// TestFaults checks that a line that no cron accepts, or whose time cannot be
// known, is an error with its file and line.
func TestFaults(t *testing.T) {
	for _, line := range []string{"x", "* * * * *", "* * * * x", "60 * * * * x", "* 24 * * * x", "* * 0 * * x", "* * * 13 * x", "* * * * 8 x", "*/0 * * * * x", "5-1 * * * * x",
		"0~59 * * * * x", "@every 1m x", "@noon x", "@daily", "@reboot", "CRON_TZ=No/Where", "RANDOM_DELAY=10", "RANDOM_DELAY = \"45\"", "* * * * mon-xxx x", "\x00 * * * * x"} {
		_, err := parse("/etc/cron.d/f", []byte("# 1\n* * * * * x\n"+line+"\n"), user())
		if err == nil || !strings.HasPrefix(err.Error(), "/etc/cron.d/f:3: ") {
			t.Errorf("%q: %v", line, err)
		}
	}
	s := user()
	s.userColumn = true
	if _, err := parse("f", []byte("* * * * * root"), s); err == nil {
		t.Error("a line without a command is taken")
	}
	if jobs, err := parse("f", []byte("* * * * * root x"), s); err != nil || len(jobs) != 1 {
		t.Error(jobs, err)
	}
}

// TestEveryMinute compares Next with an independent rule: which of the minutes of
// ten days a cron would match.
func TestEveryMinute(t *testing.T) {
	random := scaletest.Random(t)
	list := func(low, high int) (text string, set map[int]bool) {
		set = map[int]bool{}
		if random.IntN(3) == 0 {
			for n := low; n <= high; n++ {
				set[n] = true
			}
			return "*", set
		}
		var parts []string
		for range 1 + random.IntN(3) {
			from := low + random.IntN(high-low+1)
			to := from + random.IntN(high-from+1)
			step := 1 + random.IntN(4)
			for n := from; n <= to; n += step {
				set[n] = true
			}
			parts = append(parts, fmt.Sprintf("%d-%d/%d", from, to, step))
		}
		return strings.Join(parts, ","), set
	}
	for range scaletest.N(t, 300) {
		minute, minutes := list(0, 59)
		hour, hours := list(0, 23)
		day, days := list(1, 31)
		month, months := list(1, 12)
		dow, dows := list(0, 7)
		line := strings.Join([]string{minute, hour, day, month, dow, "x"}, " ")
		jobs, err := parse("f", []byte(line), user())
		if err != nil {
			t.Fatal(err)
		}
		matches := func(m time.Time) bool {
			inDays := days[m.Day()]
			inWeek := dows[int(m.Weekday())] || m.Weekday() == time.Sunday && dows[7]
			either := inDays || inWeek
			if day == "*" || dow == "*" {
				either = inDays && inWeek
			}
			return minutes[m.Minute()] && hours[m.Hour()] && months[int(m.Month())] && either
		}
		from := time.Date(2026, time.Month(1+random.IntN(12)), 1+random.IntN(28), random.IntN(24), random.IntN(60), random.IntN(60), 0, time.UTC)
		var want time.Time
		for m := from.Truncate(time.Minute).Add(time.Minute); m.Before(from.AddDate(0, 0, 10)); m = m.Add(time.Minute) {
			if matches(m) {
				want = m
				break
			}
		}
		got, _ := (&Tables{jobs: jobs}).Next(from)
		if !got.Equal(want) && !(want.IsZero() && (got.IsZero() || !got.Before(from.AddDate(0, 0, 9)))) {
			t.Errorf("%s after %v: %v, want %v", line, from, got, want)
		}
	}
}

// TestClockChange checks that a change of the clock counts as a due job, because
// cron runs the jobs of the skipped hour then.
func TestClockChange(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	s := user()
	s.zone = berlin
	jobs, err := parse("f", []byte("30 2 * * * x"), s)
	if err != nil {
		t.Fatal(err)
	}
	at, by := (&Tables{jobs: jobs}).Next(time.Date(2026, 3, 29, 0, 0, 0, 0, berlin))
	if want := time.Date(2026, 3, 29, 3, 0, 0, 0, berlin); !at.Equal(want) || !strings.Contains(by, "clock changes") {
		t.Errorf("%v (%s), want %v", at, by, want)
	}
	at, by = (&Tables{jobs: jobs}).Next(time.Date(2026, 3, 28, 0, 0, 0, 0, berlin))
	if want := time.Date(2026, 3, 28, 2, 30, 0, 0, berlin); !at.Equal(want) || by != "cron (f:1)" {
		t.Errorf("%v (%s), want %v", at, by, want)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("*/10 * * * 5-7/2 root x\nCRON_TZ=UTC\n@daily x\n")
	f.Add("\"A\"='1'\n-1 2 3 jan sun x")
	f.Fuzz(func(t *testing.T, text string) {
		jobs, err := parse("f", []byte(text), style{zone: time.UTC, cronie: true, find: func(string) (*time.Location, error) { return nil, errors.New("no") }})
		if err != nil {
			if !strings.HasPrefix(err.Error(), "f:") {
				t.Error(err)
			}
			return
		}
		from := time.Unix(1e9, 0)
		if next, by := (&Tables{jobs: jobs}).Next(from); !next.IsZero() && (!next.After(from) || by == "") {
			t.Errorf("%q: %v, %s", text, next, by)
		}
	})
}

// counted counts how often a schedule is asked.
type counted struct {
	cron.Schedule
	asked *int
}

func (c counted) Next(t time.Time) time.Time { *c.asked++; return c.Schedule.Next(t) }

// TestNextIsKept checks that the next time is computed once, however often it is asked
// for until then, and that it is the same as without that.
func TestNextIsKept(t *testing.T) {
	r := scaletest.Random(t)
	for _, text := range []string{"0 0 30 2 * x", "*/7 * * * * x\n0 3 * * 1 x", "0 4 1 * * x"} {
		jobs, err := parse("f", []byte(text), user())
		if err != nil {
			t.Fatal(err)
		}
		asked := 0
		for n := range jobs {
			jobs[n].schedule = counted{jobs[n].schedule, &asked}
		}
		kept := &Tables{jobs: jobs}
		at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
		for range 200 {
			got, by := kept.Next(at)
			before := asked
			kept.Next(at)
			if got.After(at.Add(time.Second)) {
				kept.Next(at.Add(time.Second))
			}
			if asked != before {
				t.Fatalf("%q: asked %d times again for what is known", text, asked-before)
			}
			if want, why := (&Tables{jobs: jobs}).Next(at); !got.Equal(want) || by != why {
				t.Fatalf("%q after %v: %v (%s), want %v (%s)", text, at, got, by, want, why)
			}
			at = at.Add(time.Duration(r.IntN(7200)-1800) * time.Second)
		}
	}
}
