// Package savings sums up what the actual stops of a fleet avoided, in hours and in
// money, and the idle hours that were not avoided, with their cause.
//
// Only stops that lull decided count as avoided hours. Time in use never counts as
// idle, and time without checks is reported as such. Money is reported only where
// every price is known, and the missing prices are named. Errors: *failure.Invalid
// for a question that cannot be answered, and those of the records. Nothing is
// changed.
package savings

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/policy/when"
	"lull/internal/core/savings"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/history"
)

// Records reads the past of workers. *history.Reader implements it.
type Records interface {
	Workers(ctx context.Context, q worker.Filter, from, to time.Time) (map[string]*history.Past, error)
	Replay(ctx context.Context, all map[string]*history.Past, of func(*evidence.Record) *history.Past, from, to time.Time,
		yield func(*history.Past, evidence.Stretch), progress func(share float64) error) ([]evidence.Missing, error)
}

// Policies resolves the policy of a worker. *fleet.Fleet implements it.
type Policies interface {
	PolicyWith(now time.Time, w *worker.Worker, tmpl *launch.Template) policy.Resolved
}

// Ledger holds the sources of the sums.
type Ledger struct {
	Records  Records
	Policies Policies
	Prices   savings.Prices
}

// Question says what to sum up.
type Question struct {
	By     string // worker, region, policy, instance_type, or tag:NAME
	Every  string // if not empty, also sum up each day, week or month
	IdleBy string // if not empty, also return each group's idle hours of the week; grouped like By
	Most   int    // maximum number of those groups; 0 is maxPatterns
	Idle   bool   // whether to read the evidence for idle hours
	Zone   string // zone of days and hours
}

// Limits of an answer: the longest period, the default period, and its size.
const (
	Longest       = 93 * 24 * time.Hour // the audit log keeps 90 days
	Usual         = 30 * 24 * time.Hour
	maxPeriodSums = 20_000
	maxParts      = 100 // above the number of days in Longest
	maxPatterns   = 1_000
	hoursInWeek   = 7 * 24
)

// groupKey returns the function that groups uses by a field.
func groupKey(field, by string) (func(savings.Use) (key, name string), error) {
	if name, tagged := strings.CutPrefix(by, "tag:"); tagged && name != "" {
		return func(u savings.Use) (string, string) { return u.Tags[name], "" }, nil
	}
	switch by {
	case "worker":
		return func(u savings.Use) (string, string) { return u.Worker, u.Name }, nil
	case "region":
		return func(u savings.Use) (string, string) { return u.Region, "" }, nil
	case "policy":
		return func(u savings.Use) (string, string) { return u.Policy, "" }, nil
	case "instance_type":
		return func(u savings.Use) (string, string) { return u.InstanceType, "" }, nil
	}
	return nil, invalid(field, "want worker, region, policy, instance_type or tag:NAME")
}

// Sum answers in over [from, to), a period that history.Period has validated.
func (l *Ledger) Sum(ctx context.Context, in Question, from, to time.Time) (control.Savings, error) {
	out := control.Savings{From: from, To: to, By: in.By, Groups: []savings.Sum{}, NotAvoided: map[string]float64{}, IdleByHour: make([]float64, hoursInWeek), Missing: []evidence.Missing{}, MissingPrices: []savings.MissingPrice{}}
	key, err := groupKey("by", in.By)
	if err != nil {
		return out, err
	}
	var idleKey func(savings.Use) (string, string)
	if in.IdleBy != "" {
		if idleKey, err = groupKey("idle_by", in.IdleBy); err != nil {
			return out, err
		}
	}
	zone, err := time.LoadLocation(in.Zone)
	if err != nil || in.Zone == "Local" {
		return out, invalid("time_zone", "want a time zone such as Europe/Berlin")
	}
	all, err := l.Records.Workers(ctx, worker.Filter{}, from, to)
	if err != nil {
		return out, err
	}
	byPolicy := in.By == "policy"
	if byPolicy || in.IdleBy == "policy" {
		now := time.Now()
		for _, p := range all {
			p.Policy = l.Policies.PolicyWith(now, &p.Worker, p.Template).Name
		}
	}
	used := uses(all, from, to, byPolicy)
	out.Groups, out.Total = l.Prices.Group(used, key)
	out.MissingPrices = l.Prices.Missing(used)
	first := to
	for _, p := range all {
		if at := history.Later(from, p.Worker.CreatedAt); at.Before(first) && at.Before(p.Until(to)) {
			first = at
		}
	}
	out.Days = to.Sub(first).Hours() / 24
	if in.Every != "" {
		sums := 0
		periods, err := parts(from, to, in.Every, zone)
		if err != nil {
			return out, err
		}
		for _, p := range periods {
			p.Groups, p.Total = l.Prices.Group(uses(all, p.From, p.To, byPolicy), key)
			if sums += len(p.Groups); sums > maxPeriodSums {
				return out, invalid("every", fmt.Sprintf("the answer would have more than %d sums: ask for a shorter time, longer periods or larger groups", maxPeriodSums))
			}
			out.Periods = append(out.Periods, p)
		}
	}
	if !in.Idle {
		return out, nil
	}
	patterns := map[string]*control.IdlePattern{}
	pattern := func(u savings.Use) *control.IdlePattern {
		k, name := idleKey(u)
		if patterns[k] == nil {
			patterns[k] = &control.IdlePattern{Key: k, Name: name, Hours: make([]float64, hoursInWeek), InUse: make([]float64, hoursInWeek), Stopped: make([]float64, hoursInWeek), Unknown: make([]float64, hoursInWeek)}
		}
		return patterns[k]
	}
	out.Missing, err = l.Records.Replay(ctx, all, func(r *evidence.Record) *history.Past { return all[r.Object] }, from, to, func(p *history.Past, x evidence.Stretch) {
		from, to, cause := idleTime(p, x, from)
		if cause == "" {
			return
		}
		hours := to.Sub(from).Hours()
		if cause != inUse {
			out.NotAvoided[cause] += hours
		}
		if cause == notRecorded || cause == string(idle.SignalUnknown) {
			return // the worker may have been in use
		}
		if cause != inUse {
			byHour(out.IdleByHour, from, to, zone)
		}
		if idleKey == nil {
			return
		}
		u := p.Use()
		if held := x.Check.Policy.Name; held != "" && !strings.HasPrefix(held, policy.ScheduleName) {
			u.Policy = held
		}
		g := pattern(u)
		if cause == inUse {
			byHour(g.InUse, from, to, zone)
			return
		}
		byHour(g.Hours, from, to, zone)
		if usd := l.Prices.Hour(u.Region, u.InstanceType); usd == nil {
			g.UnpricedHours += hours
		} else {
			if g.IdleUSD == nil {
				g.IdleUSD = new(float64)
			}
			*g.IdleUSD += *usd * hours
		}
	}, func(float64) error { return nil })
	out.Idle, out.IdleGroups = idlest(patterns, in.Most)
	if idleKey != nil {
		rest(out.Idle, all, idleKey, from, to, zone)
	}
	return out, err
}

// rest adds to each group the hours in which its workers were stopped. The remaining
// hours of the workers' existence are added as unknown.
func rest(groups []control.IdlePattern, all map[string]*history.Past, key func(savings.Use) (string, string), from, to time.Time, zone *time.Location) {
	byKey := map[string]*control.IdlePattern{}
	for i := range groups {
		byKey[groups[i].Key] = &groups[i]
	}
	for _, p := range all {
		k, _ := key(p.Use())
		g, begin, end := byKey[k], history.Later(from, p.Worker.CreatedAt), p.Until(to)
		if g == nil {
			continue
		}
		byHour(g.Unknown, begin, end, zone)
		for _, o := range p.Off {
			until := o.To
			if until.After(end) {
				until = end
			}
			byHour(g.Stopped, history.Later(o.From, begin), until, zone)
		}
	}
	for _, g := range groups {
		for h := range g.Unknown {
			g.Unknown[h] = max(0, g.Unknown[h]-g.Hours[h]-g.InUse[h]-g.Stopped[h])
			for _, hours := range [][]float64{g.Hours, g.InUse, g.Stopped, g.Unknown} {
				hours[h] = math.Round(hours[h]*1e4) / 1e4 // to a third of a second
			}
		}
	}
}

// uses returns each worker's use in [from, to). With byPolicy, a worker has an
// additional use for each former policy that stopped it.
func uses(all map[string]*history.Past, from, to time.Time, byPolicy bool) []savings.Use {
	var out []savings.Use
	for _, p := range all {
		u, begin, to := p.Use(), history.Later(from, p.Worker.CreatedAt), p.Until(to)
		before := map[string]time.Duration{}
		if !begin.Before(to) {
			continue
		}
		u.Running = to.Sub(begin)
		for _, o := range p.Off {
			end := o.To
			if end.After(to) {
				end = to
			}
			d := end.Sub(history.Later(o.From, begin))
			if d <= 0 {
				continue
			}
			u.Running -= d
			switch {
			case !o.Automatic:
				u.Other += d
			case byPolicy && o.Policy != "" && o.Policy != u.Policy:
				before[o.Policy] += d
			default:
				u.Avoided += d
			}
		}
		out = append(out, u)
		for held, d := range before {
			more := p.Use()
			more.Policy, more.Avoided, more.Part = held, d, true
			out = append(out, more)
		}
	}
	return out
}

// parts returns the days, weeks or months of [from, to) in a zone.
func parts(from, to time.Time, every string, zone *time.Location) ([]control.SavingsPeriod, error) {
	var out []control.SavingsPeriod
	for at := from; at.Before(to); {
		end := nextPart(at, every, zone)
		if end.After(to) {
			end = to
		}
		if !end.After(at) || len(out) == maxParts {
			return nil, invalid("every", fmt.Sprintf("the time has more than %d such periods in time zone %s: ask for longer ones", maxParts, zone))
		}
		out = append(out, control.SavingsPeriod{From: at, To: end})
		at = end
	}
	return out, nil
}

// nextPart returns the first moment of the day, week or month after the one that
// contains at. That is not midnight where the clock skips midnight.
func nextPart(at time.Time, every string, zone *time.Location) time.Time {
	for day := when.DateOf(at.In(zone)); ; day = day.Add(1) {
		next := day.Add(1)
		switch every {
		case "month":
			next = when.Date{Year: day.Year, Month: day.Month + 1, Day: 1}
		case "week":
			next = day.Add(7 - (int(day.Weekday())+6)%7)
		}
		// If the clock is set back over midnight, it shows the old day again after
		// the next day has begun.
		if end := next.First(0, zone); end.After(at) {
			return end.UTC()
		}
	}
}

// idlest returns the patterns with idle hours: first those with a price, costliest
// first, then the others, idlest first. It returns at most limit of them, or
// maxPatterns if limit is 0; all is their total number.
func idlest(patterns map[string]*control.IdlePattern, limit int) (out []control.IdlePattern, all int) {
	sum := func(p control.IdlePattern) (h float64) {
		for _, x := range p.Hours {
			h += x
		}
		return h
	}
	usd := func(p control.IdlePattern) float64 {
		if p.IdleUSD == nil {
			return -1
		}
		return *p.IdleUSD
	}
	for _, p := range patterns {
		if sum(*p) > 0 {
			out = append(out, *p)
		}
	}
	slices.SortFunc(out, func(a, b control.IdlePattern) int {
		return cmp.Or(cmp.Compare(usd(b), usd(a)), cmp.Compare(sum(b), sum(a)), cmp.Compare(a.Key, b.Key))
	})
	return out[:min(len(out), cmp.Or(limit, maxPatterns), maxPatterns)], len(out)
}

// notRecorded is the cause of idle time without records. inUse takes the place of a
// cause for time in use.
const (
	notRecorded = "not_recorded"
	inUse       = "in_use"
)

// idleTime returns the part of a stretch after begin in which the worker ran, and
// what kept it running: the cause of idle time, or inUse. cause is empty if there is
// no such part.
func idleTime(p *history.Past, x evidence.Stretch, begin time.Time) (from, to time.Time, cause string) {
	if x.Check == nil {
		return from, to, ""
	}
	from, to = history.Later(x.From, begin), x.To
	known := x.Known
	for _, o := range p.Off {
		if !o.From.After(from) && o.To.After(from) {
			return from, to, ""
		}
		if o.From.After(from) && o.From.Before(to) {
			to, known = o.From, x.Covers(o.From)
		}
	}
	if !from.Before(to) {
		return from, to, ""
	}
	if !known {
		return from, to, notRecorded
	}
	return from, to, cmp.Or(evidence.KeptUp(&x.Check.Verdict, time.Duration(x.Check.Policy.CheckInterval), x.From), inUse)
}

// byHour adds the duration of [from, to) to the hours of the week in which it falls.
func byHour(sums []float64, from, to time.Time, zone *time.Location) {
	for at := from.In(zone); at.Before(to); {
		// A zone's offset need not be whole hours, so an hour ends when the clock's
		// minutes reach 0.
		end := at.Add(time.Hour - time.Duration(at.Minute())*time.Minute - time.Duration(at.Second())*time.Second - time.Duration(at.Nanosecond()))
		if end.After(to) {
			end = to
		}
		sums[int(at.Weekday())*24+at.Hour()] += end.Sub(at).Hours()
		at = end.In(zone)
	}
}

func invalid(field, detail string) error { return &failure.Invalid{Field: field, Detail: detail} }
