package waittest

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// record is a testing.TB that records a failure instead of failing the test.
type record struct {
	testing.TB
	failed string
}

func (r *record) Helper() {}

func (r *record) Fatalf(format string, args ...any) {
	r.failed = fmt.Sprintf(format, args...)
	panic(r)
}

// failure returns the message with which f failed its test; "" if it did not
// fail.
func failure(t *testing.T, f func(testing.TB)) (said string) {
	r := &record{TB: t}
	defer func() {
		if p := recover(); p != nil && p != any(r) {
			panic(p)
		}
		said = r.failed
	}()
	f(r)
	return
}

func TestWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		later := func() bool { return time.Since(began) >= time.Minute }
		if said := failure(t, func(t testing.TB) { Until(t, "a minute", later) }); said != "" || time.Since(began) > 61*time.Second {
			t.Errorf("after %s: %q", time.Since(began), said)
		}
		if Within(time.Second, func() bool { return false }) || !Within(0, func() bool { return true }) {
			t.Error("Within() does not report what cond said")
		}
		if !Stays(time.Second, func() bool { return true }) || Stays(time.Second, func() bool { return false }) {
			t.Error("Stays() does not report what cond said")
		}
		began = time.Now()
		if said := failure(t, func(t testing.TB) { Until(t, "the impossible", func() bool { return false }) }); said == "" || time.Since(began) < Timeout {
			t.Errorf("after %s: %q", time.Since(began), said)
		}
		if said := failure(t, func(t testing.TB) { NoError(t, "it", func() error { return errors.New("broken") }) }); said == "" {
			t.Error("NoError() passed")
		}
		c := make(chan int, 1)
		if said := failure(t, func(t testing.TB) { Receive(t, "a value", c) }); said == "" {
			t.Error("Receive() passed")
		}
		c <- 3
		if said := failure(t, func(t testing.TB) {
			if Receive(t, "a value", c) != 3 {
				t.Errorf("another value")
			}
		}); said != "" {
			t.Error(said)
		}
	})
}
