package segment

import (
	"encoding/json"
	"fmt"
	"iter"
	"time"
)

// Values is a Log whose records are JSON values of one type.
type Values[T any] struct{ *Log }

// OpenValues is Open for values of one type.
func OpenValues[T any](dir string, opts Options) (Values[T], []*Damage, error) {
	log, damage, err := Open(dir, opts)
	return Values[T]{log}, damage, err
}

// Append adds a value, as Log.Append adds a record.
func (v Values[T]) Append(at time.Time, value T) error {
	b, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode a record of the log: %w", err)
	}
	_, err = v.Log.Append(at, b)
	return err
}

// ValueError means that an intact record does not contain a value of the expected
// type.
type ValueError struct {
	Number uint64
	Err    error
}

func (e *ValueError) Error() string {
	return fmt.Sprintf("record %d cannot be decoded: %v", e.Number, e.Err)
}
func (e *ValueError) Unwrap() error { return e.Err }

// All yields the values from a position on, oldest first. In place of values that
// cannot be read it yields a *Damage or a *ValueError, and continues. Any other
// error ends it.
func (v Values[T]) All(from From) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for r, err := range v.Records(from) {
			var value T
			if err == nil {
				if err = json.Unmarshal(r.Payload, &value); err != nil {
					value, err = *new(T), &ValueError{r.Number, err}
				}
			}
			if !yield(value, err) {
				return
			}
		}
	}
}
