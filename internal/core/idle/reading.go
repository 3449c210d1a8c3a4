package idle

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// State is the state of a signal. The zero value is Unknown, so that an
// incomplete reading can never count as quiet.
type State uint8

// The states of a signal. Absent means that the signal's source does not exist
// on the machine: it counts as quiet, and is shown as absent.
const (
	Unknown State = iota
	Quiet
	Active
	Absent
)

var stateNames = [...]string{"unknown", "quiet", "active", "absent"}

// String returns the name of s in the API: active, quiet or unknown.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "unknown"
}

// MarshalText encodes s as its name in the API.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText accepts only the names that String returns.
func (s *State) UnmarshalText(b []byte) error {
	for i, n := range stateNames {
		if string(b) == n {
			*s = State(i)
			return nil
		}
	}
	return fmt.Errorf("cannot read signal state %q: want unknown, quiet, active or absent", b)
}

// Reading is one sample of one signal. It always has an age and a state, so that
// a number is never used without them.
type Reading struct {
	Signal    string    `json:"signal"`
	State     State     `json:"state"`
	Value     float64   `json:"value"`
	Threshold float64   `json:"threshold"` // active at or above this value
	Unit      string    `json:"unit,omitempty"`
	Window    Duration  `json:"window_seconds,omitzero"` // the measured time that Value covers
	At        time.Time `json:"at,omitzero"`             // when it was taken; for a rate, the end of its window
	LastEvent time.Time `json:"last_event,omitzero"`     // for signals that report the time of their last event
	MaxAge    Duration  `json:"max_age_seconds,omitzero"`
	// QuietSince is the start of the unbroken run of quiet windows that ends at
	// At. It is set in quiet readings of a source that publishes windows of a
	// fixed length, because such a window may be missing or end before the
	// machine started.
	QuietSince time.Time `json:"quiet_since,omitzero"`
	Detail     string    `json:"detail,omitempty"` // what was seen, or why it is unknown
}

// Judge returns a reading of a rate or level, which is active at or above
// threshold.
func Judge(signal string, value, threshold float64, unit string, window time.Duration, at time.Time) Reading {
	r := Reading{Signal: signal, State: Quiet, Value: value, Threshold: threshold, Unit: unit, Window: Duration(window), At: at}
	if value >= threshold {
		r.State = Active
	}
	return r
}

// NotKnown returns an unknown reading with its cause.
func NotKnown(signal string, at time.Time, why string) Reading {
	return Reading{Signal: signal, State: Unknown, At: at, Detail: why}
}

// ActivityAt returns the time of the newest activity that the reading proves;
// zero for none. An event counts at its own time, whatever the state of the
// reading.
func (r *Reading) ActivityAt() time.Time {
	t := r.LastEvent
	if r.State == Active && r.LastEvent.IsZero() {
		t = r.At
	}
	return t
}

// StateAt returns the state of the reading at now. A reading older than its
// MaxAge is unknown.
func (r *Reading) StateAt(now time.Time) State {
	if r.stale(now) {
		return Unknown
	}
	return r.State
}

func (r *Reading) stale(now time.Time) bool {
	return r.MaxAge > 0 && now.Sub(r.At) > time.Duration(r.MaxAge)
}

// describe returns what was read, for users.
func (r *Reading) describe(now time.Time) string {
	s := r.Signal
	if r.State == Active || r.State == Quiet {
		if r.Unit != "" {
			s += fmt.Sprintf(" %s (counts from %s)", Amount(r.Value, r.Unit), Amount(r.Threshold, r.Unit))
		}
	}
	if r.Detail != "" {
		s += ", " + r.Detail
	}
	switch {
	case r.stale(now):
		s += fmt.Sprintf(", last read %s ago, too old to trust", Human(now.Sub(r.At)))
	case !r.LastEvent.IsZero():
		s += fmt.Sprintf(", last event %s ago", Human(now.Sub(r.LastEvent)))
	case !r.At.IsZero():
		s += fmt.Sprintf(", read %s ago", Human(now.Sub(r.At)))
	}
	return s
}

// Amount formats a value with its unit for display: at most three significant
// digits, and bytes in kB, MB, GB or TB. It rounds down, so that a value below
// a threshold is never displayed as the threshold.
func Amount(v float64, unit string) string {
	if rest, ok := strings.CutPrefix(unit, "B"); ok && (rest == "" || rest[0] == '/') {
		for _, prefix := range []string{"", "k", "M", "G", "T"} {
			if unit = prefix + "B" + rest; v < 1000 {
				break
			}
			if prefix != "T" {
				v /= 1000
			}
		}
	}
	decimals := 0
	if v > 0 {
		decimals = max(0, 2-int(math.Floor(math.Log10(v))))
	}
	scale := math.Pow10(decimals)
	s := strconv.FormatFloat(math.Floor(v*scale*(1+1e-12))/scale, 'f', decimals, 64)
	if decimals > 0 {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return strings.TrimSpace(s + " " + unit)
}

// Duration is a time.Duration that is encoded in JSON as seconds, as the
// contract's names require.
type Duration time.Duration

// MarshalJSON encodes seconds.
func (d Duration) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, time.Duration(d).Seconds(), 'f', -1, 64), nil
}

// UnmarshalJSON decodes seconds, rounded to the nanosecond. It rejects values
// that do not fit a time.Duration.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var sec float64
	if err := json.Unmarshal(b, &sec); err != nil {
		return fmt.Errorf("cannot read a duration: want a number of seconds, got %.40q", b)
	}
	const limit = float64(1<<63-1) / 1e9
	if sec > limit || sec < -limit {
		return fmt.Errorf("cannot read a duration: %g seconds is out of range", sec)
	}
	whole := time.Duration(int64(sec)) * time.Second
	frac := sec - float64(int64(sec))
	ns := int64(frac*1e9 + 0.5)
	if frac < 0 {
		ns = int64(frac*1e9 - 0.5)
	}
	*d = Duration(whole + time.Duration(ns))
	return nil
}
