package savings

import (
	"math"
	"slices"
	"testing"
	"time"

	"lull/internal/core/policy/when"
	"lull/internal/core/policy/when/whentest"
	"lull/internal/core/savings"
	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
)

// TestParts checks that days, weeks and months cover a period without gaps, across
// clock changes, leap days and months of any length.
func TestParts(t *testing.T) {
	berlin, kolkata, howe := zone(t, "Europe/Berlin"), zone(t, "Asia/Kolkata"), zone(t, "Australia/Lord_Howe")
	for _, c := range []struct {
		every    string
		zone     *time.Location
		from, to string
		want     int
		second   string
	}{
		{"day", time.UTC, "2028-02-28T12:00:00Z", "2028-03-02T00:00:00Z", 3, "2028-02-29T00:00:00Z"},
		{"day", berlin, "2026-03-28T23:00:00Z", "2026-03-30T22:00:00Z", 2, "2026-03-29T22:00:00Z"}, // 23 hours
		{"day", berlin, "2026-10-24T22:00:00Z", "2026-10-26T23:00:00Z", 2, "2026-10-25T23:00:00Z"}, // 25 hours
		{"day", kolkata, "2026-05-01T00:00:00Z", "2026-05-02T00:00:00Z", 2, "2026-05-01T18:30:00Z"},
		{"week", howe, "2026-04-01T00:00:00Z", "2026-04-13T00:00:00Z", 3, "2026-04-05T13:30:00Z"},
		{"month", berlin, "2026-01-31T12:00:00Z", "2026-04-01T00:00:00Z", 4, "2026-01-31T23:00:00Z"},
		{"month", time.UTC, "2026-12-05T00:00:00Z", "2026-12-06T00:00:00Z", 1, ""},
	} {
		from, to := moment(t, c.from), moment(t, c.to)
		got := divided(t, from, to, c.every, c.zone)
		at := from
		for _, p := range got {
			if !p.From.Equal(at) || !p.From.Before(p.To) {
				t.Errorf("%s in %s from %s: %+v does not follow %s", c.every, c.zone, c.from, p, at)
			}
			at = p.To
		}
		if len(got) != c.want || !at.Equal(to) || c.second != "" && !got[1].From.Equal(moment(t, c.second)) {
			t.Errorf("%s in %s from %s: %+v, want %d, the second from %s", c.every, c.zone, c.from, got, c.want, c.second)
		}
		sums := make([]float64, hoursInWeek)
		byHour(sums, from, to, c.zone)
		all := 0.0
		for _, h := range sums {
			all += h
		}
		if d := all - to.Sub(from).Hours(); d > 1e-9 || d < -1e-9 {
			t.Errorf("%s from %s: %g hours of the week, %s passed", c.zone, c.from, all, to.Sub(from))
		}
	}
}

func divided(t *testing.T, from, to time.Time, every string, zone *time.Location) []control.SavingsPeriod {
	t.Helper()
	out, err := parts(from, to, every, zone)
	errtest.None(t, err)
	return out
}

// TestPartsWhereMidnightIsSkipped checks that a day begins when the zone's clock says
// so, even if it skips midnight. In every time zone, around each clock change, a step
// must lead to the next calendar day.
func TestPartsWhereMidnightIsSkipped(t *testing.T) {
	for name, want := range map[string]string{
		"America/Santiago": "2026-09-06T04:00:00Z", "America/Havana": "2026-03-08T05:00:00Z", "Atlantic/Azores": "2026-03-29T01:00:00Z",
	} {
		skip := moment(t, want)
		got := divided(t, skip.Add(-30*time.Hour), skip.Add(30*time.Hour), "day", zone(t, name))
		if !slices.ContainsFunc(got, func(p control.SavingsPeriod) bool { return p.From.Equal(skip) }) {
			t.Errorf("%s: no day begins at %s: %+v", name, want, got)
		}
	}
	whentest.Changes(t, moment(t, "2005-01-01T00:00:00Z"), moment(t, "2030-01-01T00:00:00Z"), func(zone *time.Location, change time.Time) {
		for _, every := range []string{"day", "week", "month"} {
			for _, before := range []time.Duration{40 * time.Hour, 30 * time.Minute, 0, -time.Minute, -50 * time.Minute} {
				from, to := change.Add(-before), change.Add(50*time.Hour)
				at := from
				for i, p := range divided(t, from, to, every, zone) {
					if !p.From.Equal(at) || !p.To.After(at) {
						t.Fatalf("%s in %s from %s: %+v does not follow %s", every, zone, from, p, at)
					}
					if a, b := at.In(zone), p.From.Add(-time.Nanosecond).In(zone); i > 0 && when.DateOf(a).String() <= when.DateOf(b).String() {
						t.Fatalf("%s in %s: %s begins no day, but continues that of %s", every, zone, a, b)
					}
					at = p.To
				}
				if !at.Equal(to) {
					t.Fatalf("%s in %s from %s ends at %s, want %s", every, zone, from, at, to)
				}
			}
		}
	})
}

func zone(t *testing.T, name string) *time.Location {
	t.Helper()
	l, err := time.LoadLocation(name)
	errtest.None(t, err)
	return l
}

func moment(t *testing.T, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339, text)
	errtest.None(t, err)
	return at
}

// TestHoursOfTheWeek checks that time counts for the hour that the zone's clock
// shows, so an hour that is repeated counts twice.
func TestHoursOfTheWeek(t *testing.T) {
	sums := make([]float64, hoursInWeek)
	byHour(sums, moment(t, "2026-10-24T22:00:00Z"), moment(t, "2026-10-25T23:00:00Z"), zone(t, "Europe/Berlin"))
	if sums[2] != 2 || sums[3] != 1 || sums[23] != 1 || sums[24] != 0 {
		t.Errorf("a Sunday of 25 hours: %v", sums[:26])
	}
	sums = make([]float64, hoursInWeek)
	byHour(sums, moment(t, "2026-05-04T00:00:00Z"), moment(t, "2026-05-04T01:00:00Z"), zone(t, "Asia/Kolkata"))
	if sums[24+5] != 0.5 || sums[24+6] != 0.5 {
		t.Errorf("half past five on a Monday: %v", sums[24:34])
	}
}

// TestStopsCountForTheirPolicy checks that a stop counts for the policy that applied
// when it was decided, even if another applies now, and that such a worker is still
// counted once.
func TestStopsCountForTheirPolicy(t *testing.T) {
	l := live(t)
	for _, e := range []audit.Entry{
		{At: l.at(0), From: "STARTING", To: "RUNNING"},
		{At: l.at(1).Add(-1), Action: "pause_intended", Events: []string{audit.EventPaused}, Reason: "idle_timeout", Policy: "hasty"},
		{At: l.at(1), From: "RUNNING", To: "STOPPING"}, {At: l.at(2), From: "STOPPING", To: "STOPPED"}, {At: l.at(5), From: "STOPPED", To: "RUNNING"},
		{At: l.at(6).Add(-1), Action: "pause_intended", Events: []string{audit.EventPaused}, Reason: "idle_timeout"},
		{At: l.at(6), From: "RUNNING", To: "STOPPED"}, {At: l.at(8), From: "STOPPED", To: "RUNNING"},
	} {
		l.commit(e)
	}
	l.w.Status = "RUNNING"
	all := l.past(l.at(0), l.at(10))
	all["w"].Policy = "calm"
	key, err := groupKey("by", "policy")
	errtest.None(t, err)
	groups, total := savings.Prices{}.Group(uses(all, l.at(0), l.at(10), true), key)
	got := map[string]float64{}
	for _, g := range groups {
		got[g.Key] = g.AvoidedHours
	}
	if len(got) != 2 || got["hasty"] != 4 || got["calm"] != 2 || total.Workers != 1 || math.Abs(total.RunningHours-4) > 1e-9 {
		t.Errorf("avoided %v, in all %+v", got, total)
	}
}
