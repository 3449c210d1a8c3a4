package daemontest

import (
	"net"
	"strconv"
	"testing"
	"time"

	"lull/internal/base/freeport"
)

// Patience bounds every wait: a guest on a busy machine boots in tens of
// seconds.
const Patience = 2 * time.Minute

// Wait looks until cond holds, and fails the test with what cond saw last if
// that does not come to pass within Patience.
func Wait(t testing.TB, what string, cond func() (ok bool, saw string)) {
	t.Helper()
	var last string
	if !Within(Patience, func() (ok bool) { ok, last = cond(); return ok }) {
		t.Fatalf("waited %s in vain: %s; last seen: %s", Patience, what, last)
	}
}

// Within reports whether ok came to hold within limit. It looks at least once.
func Within(limit time.Duration, ok func() bool) bool {
	for end := time.Now().Add(limit); ; {
		if ok() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Stays reports whether ok held at every look for as long as d.
func Stays(d time.Duration, ok func() bool) bool {
	return !Within(d, func() bool { return !ok() })
}

// Addr is a loopback address on which nobody listens.
func Addr(t testing.TB) string {
	t.Helper()
	port, err := freeport.Take()
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// Need skips the test for lack of what a Debian package brings: err says what
// was looked for in vain, nil that it is there.
func Need(t testing.TB, err error, pkg string) {
	t.Helper()
	if err != nil {
		t.Skipf("%v (Debian package %s)", err, pkg)
	}
}
