package instance

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// TestNextIsTrue checks the next action that ps shows for instances in various
// states.
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
		{hostctl.Instance{State: "paused", WakesOnConnection: true}, "wakes on connection"}, // the program itself has opened the socket
	} {
		if got := next(c.o); !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", c.o.State, got, c.want)
		}
	}
}

func TestParseFilters(t *testing.T) {
	web := hostctl.Instance{Name: "web-1", State: "paused", Runtime: "process"}
	for _, c := range []struct {
		filters []string
		want    bool
	}{
		{nil, true},
		{[]string{"state=paused"}, true},
		{[]string{"state=running"}, false},
		{[]string{"state=running", "state=paused"}, true},
		{[]string{"state=paused", "runtime=microvm"}, false},
		{[]string{"name=web", "runtime=process"}, true},
		{[]string{"name=db"}, false},
	} {
		keep, err := parseFilters(c.filters)
		if err != nil {
			t.Fatal(c.filters, err)
		}
		if got := keep(web); got != c.want {
			t.Errorf("%v accept %+v: %t", c.filters, web, got)
		}
	}
	for _, bad := range []string{"", "state", "state=", "color=red", "=paused"} {
		if _, err := parseFilters([]string{bad}); err == nil {
			t.Errorf("%q is a filter", bad)
		}
	}
}
