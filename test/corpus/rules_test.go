package corpus

import (
	"slices"
	"time"

	"lull/internal/sim/truth"
)

// rule is a published rule of another tool, with its published defaults.
type rule struct {
	name    string
	timeout time.Duration
	source  string // where it is published
	sleeps  func(d *trace, o *observed) truth.Use
}

// observed is the part of a day that such a rule can see.
type observed struct {
	requests []time.Duration // data from outside, and new connections
	minutes  [24 * 60]minute
}

// minute is a minute of a machine.
type minute struct {
	cpu   float64 // percent of its processors
	load  float64 // runnable processes, on average
	net   float64 // bytes per second
	users int     // logged in
	conns int     // open from outside
}

// observe returns what can be seen of a day on which the object never sleeps. A
// rule sees it even when it would have slept.
func observe(d *trace, all map[string]*block) *observed {
	o := &observed{requests: d.arrivals()}
	for _, e := range d.events {
		o.requests = append(o.requests, e.at)
	}
	slices.Sort(o.requests)
	processors := 1.0
	if d.place == "agent" {
		processors = machineCPUs
	}
	for n := range o.minutes {
		m, from, to := &o.minutes[n], time.Duration(n)*time.Minute, time.Duration(n+1)*time.Minute
		x := d.played(all, from, to, 0)
		m.load = x.cpu / 60e6
		m.cpu, m.net = 100*m.load/processors, x.net/60
		if d.place == "fleet" {
			m.cpu = d.labLoad(from, to)
			m.load = m.cpu / 100 * 2
		}
		for _, l := range d.logins {
			if l.from < to && from < l.to {
				m.users++
			}
		}
	}
	for _, c := range d.conns {
		for n := int(c.from / time.Minute); n <= int(c.to/time.Minute) && n < len(o.minutes); n++ {
			if !c.out {
				o.minutes[n].conns++
			}
		}
		for _, m := range c.messages {
			if n := int(m.at / time.Minute); n < len(o.minutes) && d.place == "host" {
				o.minutes[n].net += float64(m.bytes) / 60
			}
		}
	}
	return o
}

// rules are the rules of other tools.
var rules = []rule{
	{"inbound traffic only, as AWS Lambda MicroVMs", 15 * time.Minute,
		"[IdlePolicy](https://docs.aws.amazon.com/lambda/latest/microvm-api/API_IdlePolicy.html): idle is measured by inbound traffic; it has no default duration, so the 900 s of the [developer guide's example](https://docs.aws.amazon.com/lambda/latest/dg/microvms-launching.html)",
		func(_ *trace, o *observed) truth.Use { return without(stretches(o.requests, 15*time.Minute)) }},
	{"inbound connections only, as Blaxel", 15 * time.Second,
		"[active and standby states](https://docs.blaxel.ai/knowledge-base/configuration-and-operation/understanding-sandbox-active-vs-standby-states-and-billing): standby about 15 s after the last active connection; a connection without data is active for 15 minutes",
		blaxel},
	{"session timer, as Sablier", 5 * time.Minute,
		"[configuration](https://sablierapp.dev/configuration/): `sessions.default-duration` 5m, renewed by each request",
		func(_ *trace, o *observed) truth.Use { return without(stretches(o.requests, 5*time.Minute)) }},
	{"checks of autosuspend", 5 * time.Minute,
		"[available checks](https://autosuspend.readthedocs.io/en/latest/available_checks.html) with their defaults (Load 2.5, NetworkBandwidth 100 B/s in either direction, Users, ActiveConnection) and the [general configuration](https://autosuspend.readthedocs.io/en/latest/configuration_file.html): interval 60 s, idle_time 300 s. No check is on by default; all of these are on here",
		func(d *trace, o *observed) truth.Use {
			return d.untilUsed(o, 5, func(m *minute) bool { return m.load > 2.5 || m.net > 200 || m.users > 0 || m.conns > 0 })
		}},
	{"CPU below 5 % for 15 minutes, as cloud advisors", 15 * time.Minute,
		"[CloudWatch alarms that stop instances](https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/UsingAlarmActions.html) on the average CPUUtilization of three periods of five minutes",
		func(d *trace, o *observed) truth.Use {
			return d.untilUsed(fives(o), 15, func(m *minute) bool { return m.cpu >= 5 })
		}},
}

// stretches returns the periods of use according to a rule that keeps an object
// running for a while after each request.
func stretches(at []time.Duration, after time.Duration) truth.Use {
	spans := []truth.Span{{From: at0, To: at0.Add(after)}}
	for _, t := range at {
		spans = append(spans, truth.Span{From: at0.Add(t), To: at0.Add(t + after)})
	}
	return truth.Of(spans...)
}

// without returns the rest of the day, outside up.
func without(up truth.Use) truth.Use {
	return minus(truth.Of(truth.Span{From: at0, To: at0.Add(day)}), up)
}

func blaxel(d *trace, o *observed) truth.Use {
	const standby, quiet = 15 * time.Second, 15 * time.Minute
	spans := stretches(o.requests, standby).Spans()
	for _, c := range d.conns {
		if c.out {
			continue
		}
		last := c.from
		for _, m := range append(slices.Clone(c.messages), message{at: c.to}) {
			if end := min(m.at, last+quiet); end > last {
				spans = append(spans, truth.Span{From: at0.Add(last), To: at0.Add(end + standby)})
			}
			last = m.at
		}
	}
	return without(truth.Of(spans...))
}

// untilUsed implements a rule that checks once a minute, and sleeps after the
// given number of minutes without a sign of use. Users wake the object when they
// want to use it.
func (t *trace) untilUsed(o *observed, minutes int, busy func(*minute) bool) truth.Use {
	var spans []truth.Span
	quiet := 0
	for n := 0; n < len(o.minutes); n++ {
		if quiet++; busy(&o.minutes[n]) {
			quiet = 0
		}
		if quiet < minutes {
			continue
		}
		from := time.Duration(n+1) * time.Minute
		to := t.wanted(from)
		spans = append(spans, truth.Span{From: at0.Add(from), To: at0.Add(to)})
		n, quiet = int(to/time.Minute)-1, 0
	}
	return truth.Of(spans...)
}

// wanted returns when a user wakes an object that sleeps from a time on: within a
// minute if it is in use then, otherwise at its next use.
func (t *trace) wanted(from time.Duration) time.Duration {
	if len(t.uses(from, from+time.Second)) > 0 {
		return from + time.Minute
	}
	for _, a := range t.acts {
		if a.label == use && !a.timer && a.from >= from {
			return min(a.from, day)
		}
	}
	return day
}

// fives returns o averaged over periods of five minutes.
func fives(o *observed) *observed {
	out := &observed{}
	for n := range o.minutes {
		begin := n / 5 * 5
		for k := begin; k < begin+5; k++ {
			out.minutes[n].cpu += o.minutes[k].cpu / 5
		}
	}
	return out
}
