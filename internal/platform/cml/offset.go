package cml

import (
	"errors"
	"net/http"
	"time"
)

var errOffsetUnknown = errors.New("the answer has no usable Date header, so the host's clock cannot be compared with ours")

// Offset is how far a host's clock is ahead of ours, known within bounds. They
// are not equal because a Date header has a resolution of one second and was
// written at some time between our request and its answer.
type Offset struct {
	Known bool          `json:"known"`
	Low   time.Duration `json:"low"`  // at least this far ahead
	High  time.Duration `json:"high"` // at most this far ahead
}

// Estimate returns the middle of the bounds.
func (o Offset) Estimate() time.Duration { return o.Low + (o.High-o.Low)/2 }

// Bound returns the maximum distance of the true offset from Estimate.
func (o Offset) Bound() time.Duration { return (o.High - o.Low) / 2 }

// ours converts a time of the host's clock to ours. It returns the latest time
// within the bounds, so that activity does not appear older than it is. If the
// offset is unknown, the time is returned unchanged.
func (o Offset) ours(host time.Time) time.Time {
	if !o.Known {
		return host
	}
	return host.Add(-o.Low)
}

// offsetOf estimates the host's clock offset from an answer whose request was
// sent at sent and whose headers arrived at received.
func offsetOf(h http.Header, sent, received time.Time) Offset {
	date, err := http.ParseTime(h.Get("Date"))
	if err != nil || received.Before(sent) {
		return Offset{}
	}
	return Offset{Known: true, Low: date.Sub(received), High: date.Add(time.Second).Sub(sent)}
}

// after returns the offset to use when now was measured after o. It returns o as
// long as now does not contradict it: each measurement has other bounds, so a new
// one would date the same event differently. A much more precise measurement
// narrows o, which only moves times back. A drifting clock can leave the bounds
// of o unnoticed by at most the width of one measurement.
func (o Offset) after(now Offset) Offset {
	switch {
	case !o.Known, !now.Known, now.Low > o.High, now.High < o.Low:
		return now
	case now.Bound() <= o.Bound()/2:
		return Offset{Known: true, Low: max(o.Low, now.Low), High: min(o.High, now.High)}
	}
	return o
}
