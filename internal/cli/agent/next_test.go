package agent

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
)

// TestHoldPromisesOnlyWhatHolds checks that the confirmation of a snooze or lease
// names any action that comes before its end, with the command that postpones that
// action.
func TestHoldPromisesOnlyWhatHolds(t *testing.T) {
	now := time.Date(2026, 3, 4, 14, 0, 0, 0, time.Local)
	end := now.Add(2*time.Hour + 12*time.Minute)
	at := func(m int) time.Time { return now.Add(time.Duration(m) * time.Minute) }
	for name, c := range map[string]struct {
		s    agentctl.Status
		has  []string
		lack []string
	}{
		"a TTL first":          {agentctl.Status{Upcoming: []agentctl.Upcoming{{Reason: "ttl", Action: "stop", At: at(12)}}}, []string{"16:12", "but", "14:12", "lull agent ttl extend 2h"}, nil},
		"a TTL soon after":     {agentctl.Status{Upcoming: []agentctl.Upcoming{{Reason: "ttl", Action: "terminate", At: at(140)}}}, []string{"16:12", "16:20", "terminates"}, []string{"but"}},
		"a completion waits":   {agentctl.Status{Upcoming: []agentctl.Upcoming{{Reason: "completion", Action: "stop", At: end}}}, []string{"16:12", "--undo"}, []string{"but"}},
		"idleness afterwards":  {agentctl.Status{Upcoming: []agentctl.Upcoming{{Reason: "idle_timeout", Action: "stop", At: end}}}, []string{"16:12", "idle"}, []string{"but"}},
		"the server decides":   {agentctl.Status{Server: &agentctl.ServerLink{Holder: "controller"}}, []string{"16:12", "controller"}, []string{"but"}},
		"the server is away":   {agentctl.Status{Server: &agentctl.ServerLink{Holder: "controller", Error: "refused"}}, []string{"but", "not been notified"}, nil},
		"halted":               {agentctl.Status{Halted: &idle.HaltedBy{}}, []string{"halted"}, []string{"but"}},
		"a gap of ten minutes": {agentctl.Status{Upcoming: []agentctl.Upcoming{{Reason: "ttl", Action: "stop", At: at(122)}}}, []string{"but", "lull agent ttl extend 15m"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got := holdText(now, "Snoozed", end, c.s)
			for _, part := range c.has {
				if !strings.Contains(got, part) {
					t.Errorf("%q lacks %q", got, part)
				}
			}
			for _, part := range c.lack {
				if strings.Contains(got, part) {
					t.Errorf("%q has %q", got, part)
				}
			}
		})
	}
}
