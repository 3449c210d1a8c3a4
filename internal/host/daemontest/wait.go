package daemontest

import (
	"net"
	"strconv"
	"testing"
	"time"

	"lull/internal/lib/freeport"
)

// Patience bounds every wait: a guest on a busy machine boots in tens of
// seconds.
const Patience = 2 * time.Minute

// Wait polls until cond returns true. After Patience it fails the test with the
// last value of saw.
func Wait(t testing.TB, what string, cond func() (ok bool, saw string)) {
	t.Helper()
	var last string
	if !Within(Patience, func() (ok bool) { ok, last = cond(); return ok }) {
		t.Fatalf("waited %s in vain: %s; last seen: %s", Patience, what, last)
	}
}

// Within reports whether ok returned true within limit. It calls ok at least
// once.
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

// Stays reports whether ok returned true at every poll for d.
func Stays(d time.Duration, ok func() bool) bool {
	return !Within(d, func() bool { return !ok() })
}

// Addr returns an unused loopback address.
func Addr(t testing.TB) string {
	t.Helper()
	port, err := freeport.Take()
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// Need skips the test if a Debian package is missing. err is the result of the
// search for it; nil means that it was found.
func Need(t testing.TB, err error, pkg string) {
	t.Helper()
	if err != nil {
		t.Skipf("%v (Debian package %s)", err, pkg)
	}
}
