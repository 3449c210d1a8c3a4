package cml

import "time"

// parseTimestamp parses the time formats that CML writes: date and time of day
// to the second, an optional fraction, and "Z", an offset such as "+00:00", or
// nothing, which means UTC. The letters may be lower case, and a space may
// replace the T. Digits beyond nanoseconds are dropped. The result is in UTC.
func parseTimestamp(b []byte) (time.Time, bool) {
	if len(b) < len("2006-01-02T15:04:05") ||
		b[4] != '-' || b[7] != '-' || b[13] != ':' || b[16] != ':' ||
		(b[10] != 'T' && b[10] != 't' && b[10] != ' ') {
		return time.Time{}, false
	}
	year, ok0 := decimal(b[0:4])
	month, ok1 := decimal(b[5:7])
	day, ok2 := decimal(b[8:10])
	hour, ok3 := decimal(b[11:13])
	minute, ok4 := decimal(b[14:16])
	second, ok5 := decimal(b[17:19])
	if !(ok0 && ok1 && ok2 && ok3 && ok4 && ok5) ||
		month < 1 || month > 12 || day < 1 || day > daysIn(year, month) ||
		hour > 23 || minute > 59 || second > 59 {
		return time.Time{}, false
	}
	nanos, rest, ok := fraction(b[19:])
	if !ok {
		return time.Time{}, false
	}
	offset, ok := zone(rest)
	if !ok {
		return time.Time{}, false
	}
	t := time.Date(year, time.Month(month), day, hour, minute, second, nanos, time.UTC)
	return t.Add(-offset), true
}

// decimal parses b, which must consist of digits only.
func decimal(b []byte) (int, bool) {
	n := 0
	for _, c := range b {
		if c < '0' || '9' < c {
			return 0, false
		}
		n = n*10 + int(c-'0')
	}
	return n, true
}

func daysIn(year, month int) int {
	switch month {
	case 4, 6, 9, 11:
		return 30
	case 2:
		if year%4 == 0 && (year%100 != 0 || year%400 == 0) {
			return 29
		}
		return 28
	}
	return 31
}

// fraction parses an optional ".digits" and returns nanoseconds and the rest.
func fraction(b []byte) (nanos int, rest []byte, ok bool) {
	if len(b) == 0 || b[0] != '.' {
		return 0, b, true
	}
	b = b[1:]
	n, scale := 0, 1_000_000_000
	for n < len(b) && '0' <= b[n] && b[n] <= '9' {
		scale /= 10
		nanos += int(b[n]-'0') * scale
		n++
	}
	return nanos, b[n:], n > 0
}

// zone parses the end of a timestamp: nothing, "Z", or "+hh:mm".
func zone(b []byte) (time.Duration, bool) {
	if len(b) == 0 || len(b) == 1 && (b[0] == 'Z' || b[0] == 'z') {
		return 0, true
	}
	if len(b) != len("+00:00") || b[3] != ':' || (b[0] != '+' && b[0] != '-') {
		return 0, false
	}
	hours, ok0 := decimal(b[1:3])
	minutes, ok1 := decimal(b[4:6])
	if !ok0 || !ok1 || hours > 23 || minutes > 59 {
		return 0, false
	}
	d := time.Duration(hours)*time.Hour + time.Duration(minutes)*time.Minute
	if b[0] == '-' {
		d = -d
	}
	return d, true
}
