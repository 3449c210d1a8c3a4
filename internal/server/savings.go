package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/policy/when"
	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// Limits of an answer about savings.
const (
	maxSavings     = 93 * 24 * time.Hour // the audit log, on which it is based, keeps 90 days
	maxPeriodSums  = 20_000
	maxParts       = 100 // more than maxSavings has days
	maxPatterns    = 1_000
	hoursInWeek    = 7 * 24
	savingsDefault = 30 * 24 * time.Hour
)

// savingsQuestion says what to sum up, and how.
type savingsQuestion struct {
	Between
	By     string `query:"by" maxLength:"140" default:"worker" doc:"worker, region, policy, instance_type, or tag:NAME. By policy, a stop counts for the policy that applied when it was decided, if recorded; everything else counts for the current one"`
	Every  string `query:"every" enum:"day,week,month" doc:"Also sum up each day, week from Monday, or month"`
	IdleBy string `query:"idle_by" maxLength:"140" doc:"Also return, for each worker, region, policy, instance_type or tag:NAME, the hours of the week in which it was idle but kept running; at most 1000"`
	Idle   bool   `query:"idle" default:"true" doc:"false omits the idle hours, which require reading all evidence"`
	Zone   string `query:"time_zone" maxLength:"64" default:"UTC" doc:"In which days begin and hours are counted, such as Europe/Berlin"`
}

func (s *Server) savingsRoutes() {
	register(s, route{id: "savings", method: "GET", path: base + "/savings", role: access.Viewer,
		doc: "Hours avoided and money saved by real stops, and the idle hours that were not avoided, with their cause"},
		func(ctx context.Context, in *savingsQuestion) (*answer[control.Savings], error) {
			return ok(s.savings(ctx, *in))
		})
}

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
	return nil, invalid(field, "it is none of worker, region, policy, instance_type and tag:NAME")
}

func (s *Server) savings(ctx context.Context, in savingsQuestion) (control.Savings, error) {
	out := control.Savings{By: in.By, Groups: []savings.Sum{}, NotAvoided: map[string]float64{}, IdleByHour: make([]float64, hoursInWeek), Missing: []evidence.Missing{}, MissingPrices: []savings.MissingPrice{}}
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
		return out, invalid("time_zone", "it is no time zone such as Europe/Berlin")
	}
	from, to, err := in.read()
	if err != nil {
		return out, err
	}
	if out.From, out.To, err = period(from, to, time.Now(), savingsDefault, maxSavings); err != nil {
		return out, err
	}
	all, err := s.trials(ctx, fleet.WorkerFilter{}, out.From, out.To)
	if err != nil {
		return out, err
	}
	byPolicy := in.By == "policy"
	if byPolicy || in.IdleBy == "policy" {
		now := time.Now()
		for _, t := range all {
			t.policy = s.fleet.PolicyWith(now, &t.w, t.tmpl).Name
		}
	}
	used := uses(all, out.From, out.To, byPolicy)
	out.Groups, out.Total = s.prices.Group(used, key)
	out.MissingPrices = s.prices.Missing(used)
	first := out.To
	for _, t := range all {
		if at := later(out.From, t.w.CreatedAt); at.Before(first) && at.Before(t.until(out.To)) {
			first = at
		}
	}
	out.Days = out.To.Sub(first).Hours() / 24
	if in.Every != "" {
		sums := 0
		periods, err := parts(out.From, out.To, in.Every, zone)
		if err != nil {
			return out, err
		}
		for _, p := range periods {
			p.Groups, p.Total = s.prices.Group(uses(all, p.From, p.To, byPolicy), key)
			if sums += len(p.Groups); sums > maxPeriodSums {
				return out, invalid("every", fmt.Sprintf("that is more than %d sums: ask for a shorter time, longer periods or larger groups", maxPeriodSums))
			}
			out.Periods = append(out.Periods, p)
		}
	}
	if !in.Idle {
		return out, nil
	}
	patterns := map[string]*control.IdlePattern{}
	out.Missing, err = s.replay(ctx, all, among(all), out.From, out.To, func(t *trial, x evidence.Stretch) {
		from, to, cause := idleTime(t, x, out.From)
		if cause == "" {
			return
		}
		out.NotAvoided[cause] += to.Sub(from).Hours()
		if cause == notRecorded || cause == string(idle.SignalUnknown) {
			return // it may have been in use
		}
		byHour(out.IdleByHour, from, to, zone)
		if idleKey == nil {
			return
		}
		u := t.use()
		if held := x.Check.Policy.Name; held != "" && !strings.HasPrefix(held, policy.ScheduleName) {
			u.Policy = held
		}
		k, name := idleKey(u)
		p := patterns[k]
		if p == nil {
			p = &control.IdlePattern{Key: k, Name: name, Hours: make([]float64, hoursInWeek)}
			patterns[k] = p
		}
		byHour(p.Hours, from, to, zone)
	}, unheeded)
	out.Idle = idlest(patterns)
	return out, err
}

// uses returns what workers did in [from, to). With byPolicy there is an
// additional use of a worker for each former policy under which it was stopped.
func uses(all map[string]*trial, from, to time.Time, byPolicy bool) []savings.Use {
	var out []savings.Use
	for _, t := range all {
		u, begin, to := t.use(), later(from, t.w.CreatedAt), t.until(to)
		before := map[string]time.Duration{}
		if !begin.Before(to) {
			continue
		}
		u.Running = to.Sub(begin)
		for _, o := range t.off {
			end := o.To
			if end.After(to) {
				end = to
			}
			d := end.Sub(later(o.From, begin))
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
			more := t.use()
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
			return nil, invalid("every", fmt.Sprintf("this time cannot be divided into at most %d of them in %s", maxParts, zone))
		}
		out = append(out, control.SavingsPeriod{From: at, To: end})
		at = end
	}
	return out, nil
}

// nextPart returns the end of the day, week or month that contains at: the
// first moment of the next one, which is not midnight where the clock skips it.
func nextPart(at time.Time, every string, zone *time.Location) time.Time {
	for day := when.DateOf(at.In(zone)); ; day = day.Add(1) {
		next := day.Add(1)
		switch every {
		case "month":
			next = when.Date{Year: day.Year, Month: day.Month + 1, Day: 1}
		case "week":
			next = day.Add(7 - (int(day.Weekday())+6)%7)
		}
		// If the clock is set back over midnight, it shows a day again although
		// the next one has already begun.
		if end := next.First(0, zone); end.After(at) {
			return end.UTC()
		}
	}
}

// idlest returns the patterns with the most hours, at most maxPatterns.
func idlest(patterns map[string]*control.IdlePattern) []control.IdlePattern {
	sum := func(p control.IdlePattern) (h float64) {
		for _, x := range p.Hours {
			h += x
		}
		return h
	}
	var out []control.IdlePattern
	for _, p := range patterns {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b control.IdlePattern) int {
		return cmp.Or(cmp.Compare(sum(b), sum(a)), cmp.Compare(a.Key, b.Key))
	})
	return out[:min(len(out), maxPatterns)]
}

// notRecorded is the cause of idle time without records.
const notRecorded = "not_recorded"

// idleTime returns the unused part of a stretch after begin, and what kept the
// worker running; cause is empty if there is none.
func idleTime(t *trial, x evidence.Stretch, begin time.Time) (from, to time.Time, cause string) {
	if x.Check == nil {
		return from, to, ""
	}
	from, to = later(x.From, begin), x.To
	known := x.Known
	for _, o := range t.off {
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
	return from, to, evidence.KeptUp(&x.Check.Verdict, time.Duration(x.Check.Policy.CheckInterval), x.From)
}

// byHour adds [from, to) to the hours of the week that it covers.
func byHour(sums []float64, from, to time.Time, zone *time.Location) {
	for at := from.In(zone); at.Before(to); {
		// Zone changes need not be at whole hours, so an hour ends when its
		// remaining minutes are over.
		end := at.Add(time.Hour - time.Duration(at.Minute())*time.Minute - time.Duration(at.Second())*time.Second - time.Duration(at.Nanosecond()))
		if end.After(to) {
			end = to
		}
		sums[int(at.Weekday())*24+at.Hour()] += end.Sub(at).Hours()
		at = end.In(zone)
	}
}
