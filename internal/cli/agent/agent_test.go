package agent

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/hostctl"
)

// TestFleetHaltIsShown checks that the status of an agent and of a host shows a halt
// of the fleet, with the command that lifts it.
func TestFleetHaltIsShown(t *testing.T) {
	c := verbs{&client.Session{Term: term.Term{Getenv: func(string) string { return "" }}}}
	h := idle.HaltedBy{By: "ada", Since: time.Now(), Reason: "network", Fleet: true}
	var agent, host bytes.Buffer
	c.agentStatusText(&agent, agentctl.Status{Server: &agentctl.ServerLink{Halted: true, Halt: h.Sentence("")}})
	c.ShowHostHalt(&host, hostctl.Status{Halt: &h, Server: &hostctl.ServerLink{URL: "https://lull.example.com"}})
	for screen, said := range map[string]string{"agent": agent.String(), "host": host.String()} {
		line, _, _ := strings.Cut(said, "\n")
		if !strings.HasPrefix(line, "HALTED: ") || !strings.Contains(line, "fleet") || !strings.Contains(line, "ada") || !strings.Contains(line, "--off --server") {
			t.Errorf("%s begins with %q", screen, line)
		}
	}
}
