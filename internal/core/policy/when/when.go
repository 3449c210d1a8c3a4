// Package when is the one syntax for times entered by users: snooze, override,
// schedule and queries about the past all use it. It is pure: now and its zone
// are handed in.
//
// A moment is a clock time, a day or both, with a zone behind it if it is not
// the reader's own: 18:00, fri 18:00, tomorrow, 2026-12-24 22:00 Europe/Berlin,
// an RFC 3339 time, or +2h; a clock time may have seconds. A moment that is
// past is written the same, or as how long ago it was: 2h, or 2h ago. A length
// is 90m, 2h30m, 1d or 2w.
//
// The clock on the wall is not a line: it skips and repeats. First and After
// say what that means, once for everything that is built on it: a time that is
// skipped is the moment of the skip, and what comes twice begins with the first
// and ends with the second.
package when

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
	_ "time/tzdata" // zones must be there on a machine that has none
)

// Forms lists the forms of a moment, for help texts.
const Forms = "18:00, fri 18:00, tomorrow, 2006-01-02 15:04, RFC 3339 or +2h, with a zone such as Europe/Berlin behind it"

// PastForms lists the forms of a past moment, for help texts.
const PastForms = "2h (ago), 18:00, fri 18:00, 2006-01-02 15:04 or RFC 3339, with a zone such as Europe/Berlin behind it"

// LengthForms lists the forms of a duration, for help texts.
const LengthForms = "90s, 45m, 2h30m, 1d or 2w"

// MaxLength bounds a length: ten years.
const MaxLength = 10 * 365 * 24 * time.Hour

var zones sync.Map // name to *time.Location; only names that exist

// Zone finds an IANA time zone. The local zone of the process has no name.
func Zone(name string) (*time.Location, error) {
	if l, ok := zones.Load(name); ok {
		return l.(*time.Location), nil
	}
	l, err := time.LoadLocation(name)
	if err != nil || name == "" || name == "Local" || len(name) > 64 {
		return nil, fmt.Errorf("cannot find time zone %.64q: want a name such as Europe/Berlin or UTC", name)
	}
	zones.Store(name, l)
	return l, nil
}

// Moment reads a moment after now, in now's zone unless it names one. A clock
// time alone is the next one; a day alone is its beginning; a day of the week
// is the next one, today's while its time is ahead. Only a date or an RFC 3339
// time may lie behind now.
func Moment(now time.Time, text string) (time.Time, error) {
	text = strings.TrimSpace(text)
	bad := func() (time.Time, error) {
		return time.Time{}, fmt.Errorf("cannot read time %.80q: want %s", text, Forms)
	}
	if t, err := time.Parse(time.RFC3339, text); err == nil {
		if t.Year() < 1970 || t.Year() > 2200 {
			return bad()
		}
		return t, nil
	}
	if rest, ok := strings.CutPrefix(text, "+"); ok {
		d, err := Length(rest)
		return now.Add(d), err
	}
	if text == "now" {
		return now, nil
	}
	parts := strings.Fields(text)
	if len(parts) == 0 || len(parts) > 3 {
		return bad()
	}
	loc := now.Location()
	if z, err := Zone(parts[len(parts)-1]); err == nil && len(parts) > 1 {
		loc, parts = z, parts[:len(parts)-1]
	}
	now = now.In(loc)
	today := DateOf(now)
	var clock Clock
	var second time.Duration
	var err error
	hasClock := strings.Contains(parts[len(parts)-1], ":")
	if hasClock {
		if clock, second, err = clockTime(parts[len(parts)-1]); err != nil {
			return time.Time{}, err
		}
		parts = parts[:len(parts)-1]
	}
	on := func(d Date) time.Time { return d.First(clock, loc).Add(second) }
	switch {
	case len(parts) > 1:
		return bad()
	case len(parts) == 0:
		t := on(today)
		if !t.After(now) {
			t = on(today.Add(1))
		}
		return t, nil
	case parts[0] == "today" && hasClock:
		return on(today), nil
	case parts[0] == "tomorrow":
		return on(today.Add(1)), nil
	}
	if d, err := ParseDate(parts[0]); err == nil {
		return on(d), nil
	}
	w, ok := weekday(parts[0])
	if !ok {
		return bad()
	}
	day := today.Add((int(w) - int(today.Weekday()) + 7) % 7)
	t := on(day)
	if !t.After(now) {
		t = on(day.Add(7))
	}
	return t, nil
}

// clockTime reads a clock time, and its seconds as logs show them: 20:54:25.
func clockTime(text string) (Clock, time.Duration, error) {
	at := strings.LastIndexByte(text, ':')
	if strings.IndexByte(text, ':') == at {
		c, err := ParseClock(text)
		return c, 0, err
	}
	c, err := ParseClock(text[:at])
	n, bad := strconv.ParseUint(text[at+1:], 10, 8)
	if err != nil || bad != nil || len(text)-at != 3 || n > 59 || c == EndOfDay && n > 0 {
		return 0, 0, fmt.Errorf("cannot read clock time %.20q: want 00:00 to 24:00, or with seconds", text)
	}
	return c, time.Duration(n) * time.Second, nil
}

// Ahead is Moment for an end: it must be after now.
func Ahead(now time.Time, text string) (time.Time, error) {
	t, err := Moment(now, text)
	if err == nil && !t.After(now) {
		return t, fmt.Errorf("cannot use time %.80q: it is in the past", text)
	}
	return t, err
}

// Past reads a moment up to now: a length, with or without "ago", is how long
// ago it was, and a clock time the last one.
func Past(now time.Time, text string) (time.Time, error) {
	text = strings.TrimSpace(text)
	if d, err := Length(strings.TrimSuffix(text, " ago")); err == nil {
		return now.Add(-d), nil
	}
	if strings.HasPrefix(text, "+") {
		return time.Time{}, fmt.Errorf("cannot use time %.80q: it is in the future", text)
	}
	t, err := Moment(now, text)
	if err != nil && t.IsZero() {
		return t, fmt.Errorf("cannot read time %.80q: want %s", text, PastForms)
	}
	if err == nil && t.After(now) {
		// A clock time or a day of the week, read forward: the one before.
		word := strings.Fields(text)[0]
		if _, named := weekday(word); named {
			t = DateOf(t).Add(-7).First(clockOf(t), t.Location()).Add(time.Duration(t.Second()) * time.Second)
		} else if _, _, err := clockTime(word); err == nil {
			t = DateOf(t).Add(-1).First(clockOf(t), t.Location()).Add(time.Duration(t.Second()) * time.Second)
		}
	}
	if err == nil && t.After(now) {
		return t, fmt.Errorf("cannot use time %.80q: it is in the future", text)
	}
	return t, err
}

// Bound is Past for the bound of a question: nothing is the zero time, and a
// moment that can only lie ahead is taken as it is.
func Bound(now time.Time, text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	t, err := Past(now, text)
	if err != nil {
		if ahead, bad := Moment(now, text); bad == nil {
			return ahead, nil
		}
	}
	return t, err
}

// End reads an end that is given as a moment or as a length, not both.
func End(now time.Time, until, length string) (time.Time, error) {
	switch {
	case (until == "") == (length == ""):
		return time.Time{}, errors.New("give either --until or --for")
	case until != "":
		return Ahead(now, until)
	}
	d, err := Length(length)
	return now.Add(d), err
}

// Midnight is the end of the day that t has in loc.
func Midnight(t time.Time, loc *time.Location) time.Time {
	return DateOf(t.In(loc)).Add(1).First(0, loc)
}

// Length reads a length: numbers with the units w, d, h, m, s and ms, largest
// first or not, such as 90m, 1d12h or 2w. A day has 24 hours. It is longer
// than nothing and at most MaxLength.
func Length(text string) (time.Duration, error) {
	d, err := Span(text)
	if err == nil && d == 0 {
		err = badLength(text)
	}
	return d, err
}

// Span is Length where nothing is a length too: 0, 0s.
func Span(text string) (time.Duration, error) {
	if text == "0" {
		return 0, nil
	}
	var total time.Duration
	for rest := text; rest != "" || text == ""; {
		n, unit, after, ok := part(rest)
		if rest = after; !ok || n*float64(unit) > float64(MaxLength) {
			return 0, badLength(text)
		}
		if total += time.Duration(n * float64(unit)); total > MaxLength {
			return 0, badLength(text)
		}
	}
	return total, nil
}

// LengthError is the error of a text that is no length.
type LengthError struct{ Text string }

func (e *LengthError) Error() string {
	return fmt.Sprintf("cannot read length %.40q: want one such as %s", e.Text, LengthForms)
}

func badLength(text string) error { return &LengthError{text} }

var units = map[string]time.Duration{"w": 7 * 24 * time.Hour, "d": 24 * time.Hour, "h": time.Hour, "m": time.Minute, "s": time.Second,
	"ms": time.Millisecond, "us": time.Microsecond, "µs": time.Microsecond, "ns": time.Nanosecond}

// part is the first number of a length, with its unit and what comes behind.
func part(text string) (n float64, unit time.Duration, rest string, ok bool) {
	digit := func(r rune) bool { return r >= '0' && r <= '9' || r == '.' }
	i := strings.IndexFunc(text, func(r rune) bool { return !digit(r) })
	if i <= 0 {
		return 0, 0, text, false
	}
	end := len(text)
	if j := strings.IndexFunc(text[i:], digit); j >= 0 {
		end = i + j
	}
	n, err := strconv.ParseFloat(text[:i], 64)
	unit, ok = units[text[i:end]]
	return n, unit, text[end:], ok && err == nil
}
