// Package waittest polls for conditions in tests that use the real clock. Inside
// a synctest bubble, use synctest.Wait instead.
package waittest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"
)

// Timeout bounds every wait. It is long because passing tests never wait for it,
// and because booting a guest on a busy machine takes tens of seconds.
const Timeout = 2 * time.Minute

// The interval between two checks grows from shortest to longest, so that a long
// wait causes little load on a busy machine.
const (
	shortest = 5 * time.Millisecond
	longest  = 100 * time.Millisecond
)

// Until polls cond and returns as soon as cond is true. If that takes longer than
// Timeout, it fails the test and names what was awaited.
func Until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	if !Within(Timeout, cond) {
		t.Fatalf("not within %s: %s", Timeout, what)
	}
}

// NoError calls try repeatedly and returns as soon as try returns nil. If that
// takes longer than Timeout, it fails the test with the last error.
func NoError(t testing.TB, what string, try func() error) {
	t.Helper()
	last := errors.New("not tried")
	if !Within(Timeout, func() bool { last = try(); return last == nil }) {
		t.Fatalf("not within %s: %s: %v", Timeout, what, last)
	}
}

// Within checks cond repeatedly, at least once and for at most limit, and reports
// whether cond became true. The interval between two checks is a twentieth of the
// time waited so far, but from 5 to 100 ms.
func Within(limit time.Duration, cond func() bool) bool {
	for began := time.Now(); !cond(); {
		waited := time.Since(began)
		if waited > limit {
			return false
		}
		time.Sleep(min(max(waited/20, shortest), longest))
	}
	return true
}

// Stays checks cond repeatedly for d and reports whether it was true every
// time.
func Stays(d time.Duration, cond func() bool) bool {
	return !Within(d, func() bool { return !cond() })
}

// Receive returns the next value of c. It fails the test if c is closed, or if no
// value arrives within Timeout.
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
// expires after Timeout. Unlike that of t.Context, it can be used in cleanup
// functions.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	t.Cleanup(cancel)
	return ctx
}

// Goroutines waits until at most n goroutines exist and returns "". If that takes
// longer than Timeout, it returns the stacks of all goroutines.
func Goroutines(n int) string {
	if Within(Timeout, func() bool { return runtime.NumGoroutine() <= n }) {
		return ""
	}
	buf := make([]byte, 1<<20)
	return fmt.Sprintf("%d goroutines, want at most %d:\n%s", runtime.NumGoroutine(), n, buf[:runtime.Stack(buf, true)])
}

// NoGoroutines waits until at most n goroutines exist, and fails the test if that
// takes longer than Timeout.
func NoGoroutines(t testing.TB, n int) {
	t.Helper()
	if left := Goroutines(n); left != "" {
		t.Fatal(left)
	}
}
