package listeners

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
)

// TestExplain checks that, if a program listens on another address than that of its
// endpoint, the error names the address.
func TestExplain(t *testing.T) {
	want := []instance.Endpoint{{Listen: "127.0.0.1:18083", Target: "127.0.0.1:18083"}}
	ls := []instance.Listener{{Network: "tcp", Addr: "[::1]:18083"}}
	if got := Explain(want, ls, false, time.Minute); !strings.Contains(got, ls[0].Addr) || !strings.Contains(got, want[0].Target) {
		t.Error(got)
	}
	if got := Explain(want, nil, false, time.Minute); !strings.Contains(got, want[0].Target) || strings.Contains(got, ls[0].Addr) {
		t.Error(got)
	}
	// The address on which the program listens is named once.
	ls = []instance.Listener{{Network: "tcp", Addr: "127.0.0.1:18082"}, {Network: "tcp", Addr: "127.0.0.1:18082"}, {Network: "udp", Addr: "127.0.0.1:18084"}}
	if got := Explain(want, ls, false, time.Minute); strings.Count(got, ls[0].Addr) != 1 || strings.Contains(got, ls[2].Addr) {
		t.Error(got)
	}
}
