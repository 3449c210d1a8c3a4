package savings

import (
	"cmp"
	"slices"
	"time"
)

// Partial tells whether the money of a part of the avoided hours is not known,
// so that what is known is what was saved at least.
func (s Sum) Partial() bool { return s.UnpricedHours > 0 || s.UnknownStorageHours > 0 }

// Volume is storage that is paid for whether its worker runs or not.
type Volume struct {
	Type string // as EC2 names it: gp3
	GB   float64
}

// Use is one time of a worker, of one kind.
type Use struct {
	Worker, Name, Region, InstanceType, Policy string
	Tags                                       map[string]string
	Volumes                                    []Volume // none is unknown
	Running, Avoided, Other                    time.Duration
	Part                                       bool // the worker has another Use, of another group
}

// Sum is what a group of workers used and did not use.
type Sum struct {
	Key          string  `json:"key"` // of the group: a worker's id, a tag's value, a policy, a region; total
	Name         string  `json:"name,omitempty"`
	Workers      int     `json:"workers"`
	RunningHours float64 `json:"running_hours"`
	AvoidedHours float64 `json:"avoided_hours" doc:"Stopped by lull"`
	OtherHours   float64 `json:"other_stopped_hours" doc:"Stopped by people or from outside; not counted as saved"`
	// ComputeSaved is the price of the avoided hours that have one;
	// UnpricedHours are the others. Null where none has.
	ComputeSaved  *float64 `json:"compute_saved_usd"`
	UnpricedHours float64  `json:"unpriced_hours"`
	// StoragePaid is what storage cost meanwhile; UnknownStorageHours are
	// those whose size or price is unknown.
	StoragePaid         *float64 `json:"storage_paid_usd"`
	UnknownStorageHours float64  `json:"unknown_storage_hours"`
	// Saved is compute less storage, over the hours of which both are known,
	// and so at least what was saved where UnpricedHours or UnknownStorageHours
	// are more than none; null where there are none.
	Saved *float64 `json:"saved_usd"`
}

// Group sums uses up by a key, largest saving of hours first, and all of them.
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
