package idle

import (
	"strconv"
	"time"
)

const day = 24 * time.Hour

// Human formats a duration for users, in its two largest units; below ten seconds
// in seconds with one decimal. lull accepts the result wherever it parses
// durations: 3d4h, 2h30m, 8m48s, 4.1s. A duration of 0 or less is 0s.
func Human(d time.Duration) string {
	switch {
	case d <= 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	large, small := time.Minute, time.Second
	switch { // rounded before it is split: 59m59.9s becomes 1h
	case d.Round(time.Minute) >= day:
		large, small = day, time.Hour
	case d.Round(time.Second) >= time.Hour:
		large, small = time.Hour, time.Minute
	}
	d = d.Round(small)
	return part(d/large, large) + part(d%large/small, small)
}

var unitNames = map[time.Duration]string{day: "d", time.Hour: "h", time.Minute: "m", time.Second: "s"}

// part formats n units; it returns "" if n is 0.
func part(n, unit time.Duration) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(int64(n), 10) + unitNames[unit]
}

// HumanMinutes is Human for a number of minutes, as verdicts contain.
func HumanMinutes(m float64) string { return Human(time.Duration(m * float64(time.Minute))) }
