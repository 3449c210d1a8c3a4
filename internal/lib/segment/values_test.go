package segment

import (
	"errors"
	"slices"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// TestValues checks that values are read back in order and from a time on, and
// that a record that does not contain a value is reported while the others are
// read.
func TestValues(t *testing.T) {
	type entry struct{ N int }
	dir, at := t.TempDir(), time.Unix(1000, 0)
	open := func() Values[entry] {
		v, damage, err := OpenValues[entry](dir, Options{SegmentBytes: 1 << 20, MaxBytes: 1 << 20})
		if err != nil || len(damage) > 0 {
			t.Fatal(err, damage)
		}
		return v
	}
	v := open()
	for n := range 5 {
		errtest.None(t, v.Append(at.Add(time.Duration(n)*time.Second), entry{n}))
	}
	errtest.Get(v.Log.Append(at.Add(5*time.Second), []byte(`{"N":"five"}`)))(t)
	errtest.None(t, errors.Join(v.Append(at.Add(6*time.Second), entry{6}), v.Close()))
	v = open()
	defer v.Close()
	var got []int
	for e, err := range v.All(From{Time: at.Add(2 * time.Second)}) {
		var bad *ValueError
		switch {
		case errors.As(err, &bad):
			got = append(got, -int(bad.Number))
		case err != nil:
			t.Fatal(err)
		default:
			got = append(got, e.N)
		}
	}
	if want := []int{2, 3, 4, -6, 6}; !slices.Equal(got, want) {
		t.Errorf("read %v, want %v", got, want)
	}
	for range v.All(From{}) {
		break // a caller may stop early
	}
}
