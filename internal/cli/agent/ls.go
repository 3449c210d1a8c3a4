package agent

import (
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/protocol/control"
)

// agentLs returns the verb that lists the agents that report to a server.
func (c verbs) agentLs() *cobra.Command {
	return &cobra.Command{Use: "ls", Short: "List agents, and which are outdated or silent", Example: "  lull agent ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			l, err := control.All[control.Machine](cmd.Context(), cl, "/api/v1/agents", nil)
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				term.Rows(w, "MACHINE\t3:WORKER\t4:VERSION\t1:SERVER\tHEARD\t2:HOLDER\tSTATE\t5:ALARMS", func(row func(string, ...any)) {
					for _, m := range l {
						r := m.Agent()
						version := term.Dash(m.Version)
						if m.Outdated {
							version += " (outdated)"
						}
						// The agent reports to another server, which has the report.
						heard, state, alarms := "there", "-", "-"
						if m.Report != nil {
							heard = term.Span(time.Duration(m.AgeSeconds*float64(time.Second))) + " ago"
							state, alarms = agentState(r), fmt.Sprint(len(r.Alarms))
						}
						if m.Stale {
							heard += " (silent)"
						}
						row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", m.Name, term.Dash(m.WorkerID), version, m.Server, heard, term.Dash(r.Holder), state, alarms)
					}
				})
			})
		}}
}

// agentGet returns the verb that shows the last report of an agent.
func (c verbs) agentGet() *cobra.Command {
	return &cobra.Command{Use: "get MACHINE", Short: "Show the last report of an agent to the server", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeAgents,
		Example: "  lull agent get ws-1",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			m, err := control.Read[control.Machine](cmd.Context(), cl, "/agents/"+url.PathEscape(a[0]))
			if err != nil {
				return err
			}
			return c.Print(m, func(w io.Writer) { term.YamlText(w, m) })
		}}
}

// agentState returns one or two words about the state in an agent's report.
func agentState(r control.AgentReport) string {
	if a := r.Action; a != nil && (a.Phase == "calling" || a.Phase == "accepted") {
		return a.Action
	}
	var active, unknown []string
	for _, x := range r.Readings {
		switch x.State.String() {
		case "active":
			active = append(active, x.Signal)
		case "unknown":
			unknown = append(unknown, x.Signal)
		}
	}
	switch {
	case len(active) > 0:
		return "active: " + strings.Join(active, ", ")
	case len(unknown) > 0:
		return "unknown: " + strings.Join(unknown, ", ")
	}
	return "idle for " + idle.HumanMinutes(r.Idle)
}
