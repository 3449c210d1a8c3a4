// Package waittest polls for conditions in tests that run on the real clock.
// Inside a synctest bubble, wait with synctest.Wait instead.
package waittest

import (
	"context"
	"errors"
	"testing"
	"time"
)

// Timeout bounds every wait. It is long because a test that passes never
// waits for it, and a guest on a busy machine boots in tens of seconds.
const Timeout = 2 * time.Minute

// interval is the time between two checks of a condition.
const interval = 5 * time.Millisecond

// Until checks cond every few milliseconds and returns as soon as it holds. It
// fails the test, naming what was awaited, if cond does not hold within Timeout.
func Until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	if !Within(Timeout, cond) {
		t.Fatalf("not within %s: %s", Timeout, what)
	}
}

// NoError calls try every few milliseconds and returns as soon as it returns
// nil. It fails the test with the last error if that takes longer than Timeout.
func NoError(t testing.TB, what string, try func() error) {
	t.Helper()
	last := errors.New("not tried")
	if !Within(Timeout, func() bool { last = try(); return last == nil }) {
		t.Fatalf("not within %s: %s: %v", Timeout, what, last)
	}
}

// Within checks cond every few milliseconds, at least once and for at most
// limit, and reports whether it came to hold.
func Within(limit time.Duration, cond func() bool) bool {
	for end := time.Now().Add(limit); ; {
		if cond() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		time.Sleep(interval)
	}
}

// Stays checks cond every few milliseconds for d and reports whether it held
// every time.
func Stays(d time.Duration, cond func() bool) bool {
	return !Within(d, func() bool { return !cond() })
}

// Receive returns the next value of c. It fails the test if c is closed or
// has no value within Timeout.
func Receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v, ok := <-c:
		if !ok {
			t.Fatalf("channel closed while waiting: %s", what)
		}
		return v
	case <-time.After(Timeout):
		t.Fatalf("not within %s: %s", Timeout, what)
	}
	panic("unreachable")
}

// Context returns a context that is canceled at the end of the test and
// expires after Timeout.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Timeout)
	t.Cleanup(cancel)
	return ctx
}
