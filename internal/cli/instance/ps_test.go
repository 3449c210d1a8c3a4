package instance

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// TestNextIsTrue checks that instances do what ps announces.
func TestNextIsTrue(t *testing.T) {
	soon := time.Now().Add(time.Hour)
	port := []instance.Endpoint{{Listen: "127.0.0.1:1"}}
	for _, c := range []struct {
		o    hostctl.Instance
		want string
	}{
		{hostctl.Instance{State: "stopped"}, "-"},
		{hostctl.Instance{State: "stopped", RestartAt: &soon}, "restarts in "},
		{hostctl.Instance{State: "paused"}, "until resumed"},
		{hostctl.Instance{State: "paused", Endpoints: port, WakesOnConnection: true}, "wakes on connection"},
		{hostctl.Instance{State: "paused", WakesOnConnection: true}, "wakes on connection"}, // it listens on a socket of its own
	} {
		if got := next(c.o); !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", c.o.State, got, c.want)
		}
	}
}
