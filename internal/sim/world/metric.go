package world

import (
	"hash/fnv"
	"math"
	"slices"
	"sort"
	"strings"
	"time"
)

// Datum is one value that a client stored.
type Datum struct {
	At    time.Time
	Value float64
}

// Point is one period of a metric.
type Point struct {
	At                 time.Time // beginning of the period, client's time
	Sum, Min, Max, Avg float64
	Count              float64
}

// Metric names one time series.
type Metric struct {
	Account, Region string
	Namespace, Name string
	Dimensions      Tags
}

func (m Metric) key() string {
	var b strings.Builder
	for _, s := range []string{m.Account, m.Region, m.Namespace, m.Name} {
		b.WriteString(s)
		b.WriteByte(0)
	}
	for _, d := range m.Dimensions {
		b.WriteString(d.Key + "=" + d.Value)
		b.WriteByte(0)
	}
	return b.String()
}

// Limits of what clients can store.
const (
	storedSeries = 10_000
	storedValues = 10_000
)

// Put stores one value of a metric for a client.
func (w *World) Put(m Metric, d Datum) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := m.key()
	list, ok := w.stored[k]
	if !ok && len(w.stored) >= storedSeries {
		return Refuse("LimitExceeded", "more than %d series", storedSeries)
	}
	if len(list) >= storedValues {
		list = slices.Delete(list, 0, len(list)-storedValues+1)
	}
	at := sort.Search(len(list), func(i int) bool { return list[i].At.After(d.At) })
	w.stored[k] = slices.Insert(list, at, d)
	return nil
}

// Points computes the complete periods of a metric in [start, end). EC2's own metrics
// exist while the instance runs, memory and disk while its CloudWatch agent runs, and
// others if a client has stored them.
func (w *World) Points(m Metric, start, end time.Time, period time.Duration) []Point {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.Clock.Now()
	if end.After(now.Wire) {
		end = now.Wire
	}
	start = start.Truncate(period)
	if end.Sub(start)/period > 200_000 {
		start = end.Add(-200_000 * period).Truncate(period)
	}
	if list, ok := w.stored[m.key()]; ok {
		return gather(list, start, end, period)
	}
	id, ok := m.Dimensions.Get("InstanceId")
	i := w.byID[id]
	if !ok || i == nil || i.Account != m.Account || i.Region != m.Region {
		return nil
	}
	w.advance(now, i)
	f := series(m, i)
	if f == nil {
		return nil
	}
	var out []Point
	for t := start; !t.Add(period).After(end); t = t.Add(period) {
		if !i.RunningAt(t.Add(period / 2)) {
			continue
		}
		v := f(t, period)
		n := max(1, float64(period/time.Minute))
		out = append(out, Point{At: t, Avg: v, Min: v * 0.8, Max: v * 1.3, Sum: v * n, Count: n})
	}
	return out
}

func gather(list []Datum, start, end time.Time, period time.Duration) []Point {
	var out []Point
	for k := sort.Search(len(list), func(i int) bool { return !list[i].At.Before(start) }); k < len(list); {
		p := Point{At: list[k].At.Truncate(period), Min: math.Inf(1), Max: math.Inf(-1)}
		if !p.At.Before(end) {
			break
		}
		for ; k < len(list) && list[k].At.Before(p.At.Add(period)); k++ {
			v := list[k].Value
			p.Sum, p.Count = p.Sum+v, p.Count+1
			p.Min, p.Max = min(p.Min, v), max(p.Max, v)
		}
		p.Avg = p.Sum / p.Count
		out = append(out, p)
	}
	return out
}

// series returns a function that computes a metric of an instance, or nil if
// there is none.
func series(m Metric, i *Instance) func(time.Time, time.Duration) float64 {
	noise := func(t time.Time) float64 {
		h := fnv.New64a()
		h.Write([]byte(i.ID + m.Name))
		return unit(mix(h.Sum64() + uint64(t.Unix())))
	}
	nodes := 0
	if i.Host != nil {
		nodes = i.Host.RunningNodes()
	}
	busy := func(t time.Time, d time.Duration) float64 {
		if i.Host != nil && i.Host.userDuring(t, t.Add(d)) {
			return 1
		}
		return 0
	}
	switch m.Namespace + " " + m.Name {
	case "AWS/EC2 CPUUtilization":
		return func(t time.Time, d time.Duration) float64 {
			return min(99, 1+2*noise(t)+0.4*float64(nodes)+busy(t, d)*(15+30*noise(t.Add(1))))
		}
	case "AWS/EC2 NetworkIn", "AWS/EC2 NetworkOut":
		return func(t time.Time, d time.Duration) float64 {
			return d.Seconds() * (200*noise(t) + busy(t, d)*40_000)
		}
	case "AWS/EC2 StatusCheckFailed", "AWS/EC2 StatusCheckFailed_System", "AWS/EC2 StatusCheckFailed_Instance":
		return func(time.Time, time.Duration) float64 {
			if i.Impaired {
				return 1
			}
			return 0
		}
	case "CWAgent mem_used_percent":
		if i.Agent {
			return func(t time.Time, _ time.Duration) float64 { return min(97, 18+float64(nodes)+3*noise(t)) }
		}
	case "CWAgent disk_used_percent":
		if i.Agent {
			return func(t time.Time, _ time.Duration) float64 { return 41 + noise(t) }
		}
	}
	return nil
}

// userDuring reports whether a user caused an event in [from, to) of the client's time.
func (h *Host) userDuring(from, to time.Time) bool {
	a, b := from.UnixMilli(), to.UnixMilli()
	k := sort.Search(len(h.events), func(i int) bool { return h.events[i].at >= a })
	for ; k < len(h.events) && h.events[k].at < b; k++ {
		if e := h.events[k]; e.who >= 2 && userMade(e.what) {
			return true
		}
	}
	return false
}

// Series returns up to max of the metrics that exist in an account and region and for
// which match returns true.
func (w *World) Series(account, region string, max int, match func(Metric) bool) []Metric {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.regions[regionKey{account, region}]
	if r == nil {
		return nil
	}
	now := w.Clock.Now()
	var out []Metric
	for _, i := range r.list {
		w.advance(now, i)
		if i.State != Running {
			continue
		}
		names := []string{"AWS/EC2 CPUUtilization", "AWS/EC2 NetworkIn", "AWS/EC2 NetworkOut", "AWS/EC2 StatusCheckFailed"}
		if i.Agent {
			names = append(names, "CWAgent mem_used_percent", "CWAgent disk_used_percent")
		}
		for _, n := range names {
			ns, name, _ := strings.Cut(n, " ")
			m := Metric{Account: account, Region: region, Namespace: ns, Name: name, Dimensions: Tags{{"InstanceId", i.ID}}}
			if match(m) {
				out = append(out, m)
			}
			if len(out) == max {
				return out
			}
		}
	}
	return out
}
