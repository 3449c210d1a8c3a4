package guestagent

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestAge checks that output which waits for a host keeps the time at which it was
// printed, also when older output was dropped.
func TestAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRing(8)
		r.timed.Store(true)
		print := func(s string, then time.Duration) {
			_, _ = r.Write([]byte(s)) // never fails
			time.Sleep(then)
		}
		print("lost", time.Minute)
		print("ab", agePrecision/2)
		print("cd", time.Second-agePrecision/2)
		print("efgh", 2*time.Second)
		print("", 0)
		for _, want := range []struct {
			data string
			age  time.Duration
		}{{"abcd", 3 * time.Second}, {"efgh", 2 * time.Second}} {
			n, ok := r.take()
			if !ok || string(n.Data) != want.data || n.Age != want.age.Milliseconds() {
				t.Errorf("%q of age %d ms, %v, want %q of %s", n.Data, n.Age, ok, want.data, want.age)
			}
			r.sent(n, true)
		}
		print("now", 0)
		if n, ok := r.take(); !ok || n.Age != 0 || n.Dropped != 0 {
			t.Errorf("fresh output: %+v, %v", n, ok)
		}
	})
}
