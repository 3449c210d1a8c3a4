package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/agentctl"
)

// TestHistoryPicture checks the picture of a day on which the machine was used, left,
// warned, stopped, started again, its agent was killed, and it slept.
func TestHistoryPicture(t *testing.T) {
	day := time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC)
	at := func(clock string) time.Time {
		c, err := time.Parse("15:04", clock)
		errtest.None(t, err)
		return day.Add(time.Duration(c.Hour())*time.Hour + time.Duration(c.Minute())*time.Minute)
	}
	says := func(clock, states string) agentctl.Entry {
		e := agentctl.Entry{At: at(clock), Kind: "verdict"}
		for _, s := range strings.Fields(states) {
			name, state, _ := strings.Cut(s, "=")
			r := idle.Reading{Signal: name}
			errtest.None(t, r.State.UnmarshalText([]byte(state)))
			e.Readings = append(e.Readings, r)
		}
		return e
	}
	did := func(clock, kind string) agentctl.Entry { return agentctl.Entry{At: at(clock), Kind: kind} }
	acted := func(clock, action, phase string) agentctl.Entry {
		return agentctl.Entry{At: at(clock), Kind: "action", Outcome: &agentctl.Outcome{Action: action, Phase: phase}}
	}
	list := []agentctl.Entry{
		did("07:00", "start"),
		says("07:00", "cpu=unknown users=unknown gpu=absent"),
		says("07:01", "cpu=active"),
		says("10:00", "cpu=quiet users=active gpu=absent"),
		says("11:00", "cpu=quiet users=quiet gpu=absent"),
		did("11:25", "warning"),
		acted("11:30", "stop", "intent"),
		acted("11:30", "stop", "accepted"),
		did("11:31", "end"),
		did("13:00", "start"), // the agent was killed some time after 13:30
		says("13:01", "cpu=quiet users=quiet gpu=absent"),
		did("13:30", "snooze"),
		did("15:00", "start"),
		says("15:01", "cpu=quiet users=quiet gpu=unknown"),
		{At: at("17:30"), Kind: "resume", Slept: idle.Duration(time.Hour)},
		says("17:30", "cpu=active"),
	}
	for _, c := range []struct {
		name, from, to, now, want string
	}{
		{"a day", "06:00", "18:00", "18:00", `
        06:00     08:30     11:00     13:30     16:00
users       ?           ████···     ··      ······
cpu         ████████████·······     ··      ······    ██
gpu         -           -------     --      ??????
events      B                wS     B z     B         R

one column is 15m, █ active, ? unknown, · quiet, - absent, S stopped, R resumed, B agent or machine started, w warned, z snoozed
2026-03-02 06:00:00 to 2026-03-02 18:00:00: in use 4h29m (37 %), quiet 1h (8 %), unknown 1h30m (12 %), not watched 5h1m (42 %), stopped: 1, resumed: 1, warned: 1

`},
		{"an hour that something before it holds in", "09:30", "10:30", "18:00", `
        09:30     09:40     09:50     10:00     10:10     10:20
users                                 ██████████████████████████████
cpu     ██████████████████████████████······························
gpu                                   ------------------------------
events

one column is 1m, █ active, · quiet, - absent
2026-03-02 09:30:00 to 2026-03-02 10:30:00: in use 1h (100 %)

`},
		{"until a time at which it is not known whether the agent lived", "13:20", "14:20", "18:00", `
        13:20     13:30     13:40     13:50     14:00     14:10
users   ··········
cpu     ··········
gpu     ----------
events            z

one column is 1m, · quiet, - absent, z snoozed
2026-03-02 13:20:00 to 2026-03-02 14:20:00: quiet 10m (17 %), not watched 50m (83 %)

`},
		{"nothing", "02:00", "03:00", "18:00", ""},
	} {
		p := picture{from: at(c.from), to: at(c.to)}
		p.take(list, at(c.now))
		var b strings.Builder
		p.draw(&b, time.UTC)
		if d := cmp.Diff(strings.TrimPrefix(c.want, "\n"), b.String()); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
	}
}
