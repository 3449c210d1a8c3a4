package evidence

import (
	"errors"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"
)

// levelSlot is the interval for which Levels keep one value per signal.
const levelSlot = 5 * time.Minute

// Levels are the highest values of each numeric signal per five-minute slot, to
// four digits. A run of equal checks records only on which side of its threshold
// a signal stayed; Levels allow another threshold to be applied later. A Levels
// is immutable once it is in a Record.
type Levels struct {
	// At is the time of the last check of each slot, oldest first.
	At []time.Time
	// High maps a signal to one value per slot.
	High map[string][]float64
}

// LevelsAt returns the values of one check, or nil if there are none.
func LevelsAt(at time.Time, values map[string]float64) *Levels {
	if len(values) == 0 {
		return nil
	}
	l := &Levels{At: []time.Time{at}, High: map[string][]float64{}}
	for name, v := range values {
		l.High[name] = []float64{fourDigits(v)}
	}
	return l
}

func fourDigits(v float64) float64 {
	r, err := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 4, 64), 64)
	if err != nil {
		return v // out of range after rounding
	}
	return r
}

// with returns l with the values of a later check merged in.
func (l *Levels) with(next *Levels) *Levels {
	switch {
	case l == nil:
		return next
	case next == nil:
		return l
	}
	same := len(l.High) == len(next.High)
	for name := range next.High {
		same = same && l.High[name] != nil
	}
	if !same {
		return next // other signals than before: not the same run
	}
	slot := func(t time.Time) int64 { return t.Unix() / int64(levelSlot/time.Second) }
	n := len(l.At) - 1
	joins := slot(l.At[n]) == slot(next.At[0])
	out := &Levels{At: slices.Clone(l.At), High: maps.Clone(l.High)}
	if joins {
		out.At[n] = next.At[0]
	} else {
		out.At = append(out.At, next.At[0])
	}
	for name, high := range out.High {
		high, v := slices.Clone(high), next.High[name][0]
		if joins {
			high[n] = math.Max(high[n], v)
		} else {
			high = append(high, v)
		}
		out.High[name] = high
	}
	return out
}

// levelLine is the packed form of Levels.
type levelLine struct {
	Ago  []int64              `json:"o"` // seconds before the record
	High map[string][]float64 `json:"h"`
}

func (l *Levels) line(at time.Time) *levelLine {
	if l == nil {
		return nil
	}
	out := &levelLine{High: l.High}
	for _, t := range l.At {
		out.Ago = append(out.Ago, int64(at.Sub(t)/time.Second))
	}
	return out
}

func (l *levelLine) levels(at time.Time) (*Levels, error) {
	if l == nil {
		return nil, nil
	}
	out := &Levels{High: l.High}
	for _, s := range l.Ago {
		if s < 0 || s > int64(math.MaxInt64/time.Second) {
			return nil, errors.New("its levels are later than the record")
		}
		out.At = append(out.At, at.Add(-time.Duration(s)*time.Second))
	}
	for _, high := range l.High {
		if len(high) != len(out.At) {
			return nil, errors.New("its levels are incomplete")
		}
	}
	return out, nil
}
