// Package when is the single syntax for times that users enter. Snooze, override,
// schedule and queries about the past all use it. It is pure: the caller passes
// now, in the user's zone.
//
// A moment is a clock time, a day or both, followed by a zone if it is not the
// user's: 18:00, fri 18:00, tomorrow, 2026-12-24 22:00 Europe/Berlin, an RFC 3339
// time, or +2h. A clock time may have seconds. A moment in the past has the same
// forms, or is given as its age: 2h or 2h ago. A length is 90m, 2h30m, 1d or 2w.
//
// A wall clock skips and repeats times. First and After define what that means
// for everything else: a skipped time is the moment of the skip, and a period
// that repeats lasts from its first beginning to its second end.
package when

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
	_ "time/tzdata" // zones for machines without a time zone database
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

// Zone returns an IANA time zone by name. "Local" is not accepted.
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

// Moment parses a moment, normally after now, in now's zone unless the text names
// one. A clock time alone is its next occurrence. A day alone is the beginning of
// the day. A day of the week is its next occurrence, which is today if the time
// is still to come. Only a date or an RFC 3339 time may be in the past.
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

// clockTime parses a clock time, optionally with seconds as in logs: 20:54:25.
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

// Ahead parses a moment like Moment, and returns an error unless it is after now.
func Ahead(now time.Time, text string) (time.Time, error) {
	t, err := Moment(now, text)
	if err == nil && !t.After(now) {
		return t, fmt.Errorf("cannot use time %.80q: it is in the past", text)
	}
	return t, err
}

// Past parses a moment not after now. A length, with or without "ago", is the age
// of the moment. A clock time or a day of the week is its last occurrence.
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
		// Moment returned the next occurrence of a clock time or a day of the
		// week; the one before it is meant.
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

// Bound parses a bound of a query like Past, with two exceptions. An empty text
// is the zero time, and a moment that can only be in the future is accepted.
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

// End parses an end that is given either as a moment or as a length from now.
// Exactly one of the two must be set.
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

// Midnight returns the end of t's day in loc.
func Midnight(t time.Time, loc *time.Location) time.Time {
	return DateOf(t.In(loc)).Add(1).First(0, loc)
}

// Length parses a length: numbers with the units w, d, h, m, s and ms, in any
// order, such as 90m, 1d12h or 2w. A day has 24 hours. The length must be above 0
// and at most MaxLength.
func Length(text string) (time.Duration, error) {
	d, err := Span(text)
	if err == nil && d == 0 {
		err = badLength(text)
	}
	return d, err
}

// Span parses a length like Length, but also accepts 0 and 0s.
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

// LengthError means that a text is not a valid length.
type LengthError struct{ Text string }

func (e *LengthError) Error() string {
	return fmt.Sprintf("cannot read length %.40q: want one such as %s", e.Text, LengthForms)
}

func badLength(text string) error { return &LengthError{text} }

var units = map[string]time.Duration{"w": 7 * 24 * time.Hour, "d": 24 * time.Hour, "h": time.Hour, "m": time.Minute, "s": time.Second,
	"ms": time.Millisecond, "us": time.Microsecond, "µs": time.Microsecond, "ns": time.Nanosecond}

// part parses the first number of a length and its unit, and returns the rest of
// the text.
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
