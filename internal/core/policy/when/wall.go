package when

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Clock is a time of day in minutes from 0 (00:00) to 1440 (24:00, the end of
// the day).
type Clock int

// EndOfDay is 24:00.
const EndOfDay Clock = 24 * 60

// ParseClock reads 8:00, 08:00 or 24:00.
func ParseClock(text string) (Clock, error) {
	h, m, ok := strings.Cut(text, ":")
	hour, err := strconv.ParseUint(h, 10, 8)
	minute, err2 := strconv.ParseUint(m, 10, 8)
	if !ok || err != nil || err2 != nil || len(h) > 2 || len(m) != 2 || minute > 59 || hour*60+minute > uint64(EndOfDay) {
		return 0, fmt.Errorf("cannot read clock time %.20q: want 00:00 to 24:00", text)
	}
	return Clock(hour*60 + minute), nil
}

// String returns the form that ParseClock reads.
func (c Clock) String() string { return fmt.Sprintf("%02d:%02d", int(c)/60, int(c)%60) }

// MarshalText writes the form that ParseClock reads.
func (c Clock) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText is ParseClock.
func (c *Clock) UnmarshalText(b []byte) (err error) {
	*c, err = ParseClock(string(b))
	return err
}

func clockOf(t time.Time) Clock { return Clock(t.Hour()*60 + t.Minute()) }

// Date is a day of the calendar, in whatever zone.
type Date struct {
	Year  int
	Month time.Month
	Day   int
}

// DateOf is the day that t has in its zone.
func DateOf(t time.Time) Date {
	y, m, d := t.Date()
	return Date{y, m, d}
}

// ParseDate reads 2026-12-24, of a day that exists, from 1970 to 2200.
func ParseDate(text string) (Date, error) {
	t, err := time.Parse(time.DateOnly, text)
	if err != nil || t.Year() < 1970 || t.Year() > 2200 {
		return Date{}, fmt.Errorf("cannot read date %.20q: want one such as 2026-12-24", text)
	}
	return DateOf(t), nil
}

// String returns the form that ParseDate reads.
func (d Date) String() string { return fmt.Sprintf("%04d-%02d-%02d", d.Year, d.Month, d.Day) }

func (d Date) utc() time.Time { return time.Date(d.Year, d.Month, d.Day, 0, 0, 0, 0, time.UTC) }

// Add is the day n days later.
func (d Date) Add(n int) Date { return DateOf(d.utc().AddDate(0, 0, n)) }

// Weekday is the day of the week.
func (d Date) Weekday() time.Weekday { return d.utc().Weekday() }

// margin is farther than any zone is from UTC.
const margin = 36 * time.Hour

func (d Date) wall(c Clock) time.Time { return d.utc().Add(time.Duration(c) * time.Minute) }

// First is the first moment at which the clock on the wall of loc shows c on
// d or later: of a time that comes twice the first, of one that is skipped
// the moment of the skip.
func (d Date) First(c Clock, loc *time.Location) time.Time {
	wall := d.wall(c)
	for t := wall.Add(-margin); ; {
		start, end, off := period(t, loc)
		at := wall.Add(-off)
		switch {
		case !start.IsZero() && at.Before(start):
			return start.In(loc)
		case end.IsZero() || at.Before(end):
			return at.In(loc)
		}
		t = end
	}
}

// After is the end of the last moment at which the clock on the wall of loc
// shows a time before c on d: where an hour comes twice, the end of its second
// coming.
func (d Date) After(c Clock, loc *time.Location) time.Time {
	wall := d.wall(c)
	for t := wall.Add(margin); ; {
		start, end, off := period(t, loc)
		at := wall.Add(-off)
		switch {
		case !end.IsZero() && !at.Before(end):
			return end.In(loc)
		case start.IsZero() || at.After(start):
			return at.In(loc)
		}
		t = start.Add(-time.Nanosecond)
	}
}

// period is the time around t in which loc has one offset.
func period(t time.Time, loc *time.Location) (start, end time.Time, off time.Duration) {
	t = t.In(loc)
	start, end = t.ZoneBounds()
	_, seconds := t.Zone()
	return start, end, time.Duration(seconds) * time.Second
}

// Days is a set of days of the week.
type Days uint8

// Every is all days of the week.
const Every Days = 1<<7 - 1

var dayNames = [...]string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}

// order is how a week is read.
var order = [...]time.Weekday{time.Monday, time.Tuesday, time.Wednesday, time.Thursday, time.Friday, time.Saturday, time.Sunday}

func weekday(text string) (time.Weekday, bool) {
	text = strings.ToLower(text)
	for i, n := range dayNames {
		if text == n || text == strings.ToLower(time.Weekday(i).String()) {
			return time.Weekday(i), true
		}
	}
	return 0, false
}

// Has reports whether w is one of d.
func (d Days) Has(w time.Weekday) bool { return d&(1<<w) != 0 }

// ParseDays reads mon-fri, sat,sun, daily, or a mixture such as mon,wed-fri. A
// range may run over the end of the week: sat-mon.
func ParseDays(text string) (Days, error) {
	if text == "daily" {
		return Every, nil
	}
	var out Days
	for part := range strings.SplitSeq(text, ",") {
		from, to, ranged := strings.Cut(part, "-")
		a, ok := weekday(from)
		b, ok2 := a, true
		if ranged {
			b, ok2 = weekday(to)
		}
		if !ok || !ok2 {
			return 0, fmt.Errorf("cannot read days %.60q: want some such as mon-fri, sat,sun or daily", text)
		}
		for ; ; a = (a + 1) % 7 {
			out |= 1 << a
			if a == b {
				break
			}
		}
	}
	return out, nil
}

// String returns a form that ParseDays reads.
func (d Days) String() string {
	if d == Every {
		return "daily"
	}
	var out []string
	for i := 0; i < len(order); i++ {
		if !d.Has(order[i]) {
			continue
		}
		last := i
		for last+1 < len(order) && d.Has(order[last+1]) {
			last++
		}
		name := dayNames[order[i]]
		if last > i+1 {
			name += "-" + dayNames[order[last]]
			i = last
		}
		out = append(out, name)
	}
	return strings.Join(out, ",")
}

// MarshalText writes a form that ParseDays reads.
func (d Days) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText is ParseDays; nothing is no day.
func (d *Days) UnmarshalText(b []byte) (err error) {
	*d = 0
	if len(b) > 0 {
		*d, err = ParseDays(string(b))
	}
	return err
}
