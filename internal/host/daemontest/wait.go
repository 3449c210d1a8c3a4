package daemontest

import (
	"net"
	"strconv"
	"testing"

	"lull/internal/lib/freeport"
	"lull/internal/lib/waittest"
)

// WaitLimit bounds every wait.
const WaitLimit = waittest.Timeout

// Wait polls until cond returns true. After WaitLimit it fails the test with the
// last value of saw.
func Wait(t testing.TB, what string, cond func() (ok bool, saw string)) {
	t.Helper()
	var last string
	if !waittest.Within(WaitLimit, func() (ok bool) { ok, last = cond(); return ok }) {
		t.Fatalf("waited %s in vain: %s; last seen: %s", WaitLimit, what, last)
	}
}

// Addr returns a loopback address that is not in use.
func Addr(t testing.TB) string {
	t.Helper()
	port, err := freeport.Take()
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// Need skips the test if err, the result of searching for the Debian package pkg,
// is not nil.
func Need(t testing.TB, err error, pkg string) {
	t.Helper()
	if err != nil {
		t.Skipf("%v (Debian package %s)", err, pkg)
	}
}
