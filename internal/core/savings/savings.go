package savings

import (
	"cmp"
	"slices"
	"time"
)

// Partial reports whether the price of some avoided hours is unknown, so that the
// sum is only a lower bound.
func (s Sum) Partial() bool { return s.UnpricedHours > 0 || s.UnknownStorageHours > 0 }

// Volume is storage that is billed whether or not its worker runs.
type Volume struct {
	Type string // as EC2 names it: gp3
	GB   float64
}

// Use is one period of one kind (running, avoided, ...) of a worker.
type Use struct {
	Worker, Name, Region, InstanceType, Policy string
	Tags                                       map[string]string
	Volumes                                    []Volume // empty means unknown
	Running, Avoided, Other                    time.Duration
	Part                                       bool // the worker also has a Use in another group
}

// Sum is the total use and avoided use of a group of workers.
type Sum struct {
	Key          string  `json:"key"` // group key: worker id, tag value, policy, region or total
	Name         string  `json:"name,omitempty"`
	Workers      int     `json:"workers"`
	RunningHours float64 `json:"running_hours"`
	AvoidedHours float64 `json:"avoided_hours" doc:"Stopped by lull"`
	OtherHours   float64 `json:"other_stopped_hours" doc:"Stopped by users or outside lull; not counted as saved"`
	// ComputeSaved is the price of the avoided hours, except UnpricedHours. It is
	// null if no avoided hour has a known price.
	ComputeSaved  *float64 `json:"compute_saved_usd"`
	UnpricedHours float64  `json:"unpriced_hours"`
	// StoragePaid is the storage cost of the avoided hours, except
	// UnknownStorageHours, for which a volume's size or price is unknown.
	StoragePaid         *float64 `json:"storage_paid_usd"`
	UnknownStorageHours float64  `json:"unknown_storage_hours"`
	// Saved is ComputeSaved minus StoragePaid over the hours for which both are
	// known. It is a lower bound if UnpricedHours or UnknownStorageHours is above
	// 0, and null if there are no such hours.
	Saved *float64 `json:"saved_usd"`
}

// Group sums uses by key, and in total. The groups are ordered by avoided hours,
// largest first.
func (p Prices) Group(uses []Use, key func(Use) (key, name string)) (groups []Sum, total Sum) {
	byKey := map[string]*Sum{}
	total = Sum{Key: "total"}
	for _, u := range uses {
		k, name := key(u)
		g := byKey[k]
		if g == nil {
			g = &Sum{Key: k, Name: name}
			byKey[k] = g
		}
		p.add(g, u)
		p.add(&total, u)
		if g.Workers++; !u.Part {
			total.Workers++
		}
	}
	for _, g := range byKey {
		groups = append(groups, *g)
	}
	slices.SortFunc(groups, func(a, b Sum) int {
		return cmp.Or(cmp.Compare(b.AvoidedHours, a.AvoidedHours), cmp.Compare(a.Key, b.Key))
	})
	return groups, total
}

// MissingPrice is a price that uses need and the table lacks.
type MissingPrice struct {
	Kind    string  `json:"kind" enum:"instance,storage"`
	Region  string  `json:"aws_region"`
	Name    string  `json:"name" doc:"Instance type or volume type"`
	Workers int     `json:"workers"`
	Hours   float64 `json:"avoided_hours" doc:"Avoided hours of those workers"`
}

// Missing returns the prices that the uses need and p lacks, in the order of
// avoided hours, most first. It is empty, not nil, if there are none. Types and
// volumes that EC2 has not reported are not included.
func (p Prices) Missing(uses []Use) []MissingPrice {
	sums, workers := map[Key]float64{}, map[Key]map[string]bool{}
	for _, u := range uses {
		needs := map[Key]bool{{Instance, u.Region, u.InstanceType}: true}
		for _, v := range u.Volumes {
			needs[Key{Storage, u.Region, v.Type}] = true
		}
		for k := range needs {
			if _, ok := p[k]; ok || k[1] == "" || k[2] == "" {
				continue
			}
			if workers[k] == nil {
				workers[k] = map[string]bool{}
			}
			workers[k][u.Worker] = true
			sums[k] += u.Avoided.Hours()
		}
	}
	out := make([]MissingPrice, 0, len(sums))
	for k, hours := range sums {
		out = append(out, MissingPrice{k[0], k[1], k[2], len(workers[k]), hours})
	}
	slices.SortFunc(out, func(a, b MissingPrice) int {
		return cmp.Or(cmp.Compare(b.Hours, a.Hours), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Region, b.Region), cmp.Compare(a.Name, b.Name))
	})
	return out
}

func (p Prices) add(s *Sum, u Use) {
	s.RunningHours += u.Running.Hours()
	s.OtherHours += u.Other.Hours()
	hours := u.Avoided.Hours()
	s.AvoidedHours += hours
	if hours == 0 {
		return
	}
	plus := func(sum **float64, v float64) {
		if *sum == nil {
			*sum = new(float64)
		}
		**sum += v
	}
	compute, storage := p.Hour(u.Region, u.InstanceType), p.StorageHour(u.Region, u.Volumes)
	if compute == nil {
		s.UnpricedHours += hours
	} else {
		plus(&s.ComputeSaved, *compute*hours)
	}
	if storage == nil {
		s.UnknownStorageHours += hours
	} else {
		plus(&s.StoragePaid, *storage*hours)
	}
	if compute != nil && storage != nil {
		plus(&s.Saved, (*compute-*storage)*hours)
	}
}
