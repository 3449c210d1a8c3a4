package cml

import (
	"errors"
	"net/http"
	"time"
)

var errOffsetUnknown = errors.New("the answer has no usable Date header, so the host's clock cannot be compared with ours")

// An Offset is how far a host's clock is ahead of ours, known within bounds: a
// Date header has a resolution of one second, and was written at some moment
// between our request and its answer.
type Offset struct {
	Known bool          `json:"known"`
	Low   time.Duration `json:"low"`  // at least this far ahead
	High  time.Duration `json:"high"` // at most this far ahead
}

// Estimate is the middle of the bounds.
func (o Offset) Estimate() time.Duration { return o.Low + (o.High-o.Low)/2 }

// Bound is how far the true offset can be from Estimate.
func (o Offset) Bound() time.Duration { return (o.High - o.Low) / 2 }

// ours turns a time of the host's clock into ours: the latest time within the
// bounds, so that activity does not seem older than it is. With an unknown
// offset the time is left as it is.
func (o Offset) ours(host time.Time) time.Time {
	if !o.Known {
		return host
	}
	return host.Add(-o.Low)
}

// offsetOf measures the host's clock from an answer whose request was sent at
// sent and whose headers arrived at received.
func offsetOf(h http.Header, sent, received time.Time) Offset {
	date, err := http.ParseTime(h.Get("Date"))
	if err != nil || received.Before(sent) {
		return Offset{}
	}
	return Offset{Known: true, Low: date.Sub(received), High: date.Add(time.Second).Sub(sent)}
}

// after is the offset to continue with when now was measured after o. It stays o
// for as long as now does not contradict it: each measurement has other bounds,
// and by each of them the same event would have happened at another time. A
// much better one narrows o, which only moves times back. A clock that drifts
// leaves o unnoticed by at most the width of a measurement.
func (o Offset) after(now Offset) Offset {
	switch {
	case !o.Known, !now.Known, now.Low > o.High, now.High < o.Low:
		return now
	case now.Bound() <= o.Bound()/2:
		return Offset{Known: true, Low: max(o.Low, now.Low), High: min(o.High, now.High)}
	}
	return o
}
