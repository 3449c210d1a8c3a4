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

// ParseClock parses a time of day such as 8:00, 08:00 or 24:00.
func ParseClock(text string) (Clock, error) {
	h, m, ok := strings.Cut(text, ":")
	hour, err := strconv.ParseUint(h, 10, 8)
	minute, err2 := strconv.ParseUint(m, 10, 8)
	if !ok || err != nil || err2 != nil || len(h) > 2 || len(m) != 2 || minute > 59 || hour*60+minute > uint64(EndOfDay) {
		return 0, fmt.Errorf("cannot read clock time %.20q: want 00:00 to 24:00", text)
	}
	return Clock(hour*60 + minute), nil
}

// String formats c as 08:00.
func (c Clock) String() string { return fmt.Sprintf("%02d:%02d", int(c)/60, int(c)%60) }

// MarshalText encodes c as String does.
func (c Clock) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText decodes a text that ParseClock accepts.
func (c *Clock) UnmarshalText(b []byte) (err error) {
	*c, err = ParseClock(string(b))
	return err
}

func clockOf(t time.Time) Clock { return Clock(t.Hour()*60 + t.Minute()) }

// Date is a day of the calendar, in no particular zone.
type Date struct {
	Year  int
	Month time.Month
	Day   int
}

// DateOf returns the date of t in the zone of t.
func DateOf(t time.Time) Date {
	y, m, d := t.Date()
	return Date{y, m, d}
}

// ParseDate parses a date such as 2026-12-24. The date must exist and be from
// 1970 to 2200.
func ParseDate(text string) (Date, error) {
	t, err := time.Parse(time.DateOnly, text)
	if err != nil || t.Year() < 1970 || t.Year() > 2200 {
		return Date{}, fmt.Errorf("cannot read date %.20q: want one such as 2026-12-24", text)
	}
	return DateOf(t), nil
}

// String formats d as 2026-12-24.
func (d Date) String() string { return fmt.Sprintf("%04d-%02d-%02d", d.Year, d.Month, d.Day) }

func (d Date) utc() time.Time { return time.Date(d.Year, d.Month, d.Day, 0, 0, 0, 0, time.UTC) }

// Add returns the date n days after d.
func (d Date) Add(n int) Date { return DateOf(d.utc().AddDate(0, 0, n)) }

// Weekday returns the day of the week of d.
func (d Date) Weekday() time.Weekday { return d.utc().Weekday() }

// margin is more than the offset of any zone from UTC.
const margin = 36 * time.Hour

func (d Date) wall(c Clock) time.Time { return d.utc().Add(time.Duration(c) * time.Minute) }

// First returns the first moment at which a wall clock in loc shows c on d, or a
// later time. If the clock shows c twice, it is the first time. If the clock
// skips c, it is the moment of the skip.
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

// After returns the end of the last moment at which a wall clock in loc shows a
// time before c on d. If an hour repeats, that is in the second repetition.
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

// period returns the period around t in which loc has one offset, and the offset.
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

// order is the order in which the days of a week are written.
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

// ParseDays parses mon-fri, "sat,sun", daily, or a combination such as
// mon,wed-fri. A range may extend over the end of the week: sat-mon.
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

// String formats d in a form that ParseDays accepts.
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

// MarshalText encodes d as String does.
func (d Days) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText decodes a text that ParseDays accepts. The empty text is the
// empty set.
func (d *Days) UnmarshalText(b []byte) (err error) {
	*d = 0
	if len(b) > 0 {
		*d, err = ParseDays(string(b))
	}
	return err
}
