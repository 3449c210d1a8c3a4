// Package admit decides, on a host with bounded memory and processors, which
// starts and wakes may proceed now, and which sleeping instances must give up
// memory for them.
//
// More memory than the budget is never promised. An ask is never overtaken by a
// later one that waits for the same resource and is not more urgent. Only
// sleeping instances are pushed down the ladder, and only if that frees enough
// memory. The package is pure: the host daemon measures, waits and pushes.
package admit

import (
	"cmp"
	"slices"
	"time"

	"lull/internal/core/power"
)

// Ask is a start or a wake that waits for permission to proceed.
type Ask struct {
	Memory int64  // bytes that it needs beyond what its instance holds now
	Slow   bool   // a boot or a restore from disk, of which a limited number may run at a time
	Client bool   // a client is waiting
	Seq    uint64 // order of arrival
}

// Capacity is the available part of the host's resources.
type Capacity struct {
	Free   int64 // bytes; negative if instances hold more than the budget
	Places int   // slow asks that may begin now
}

// Order compares two asks, for sorting: asks with a waiting client come first,
// and among equals the older ones.
func Order(a, b Ask) int {
	if a.Client != b.Client {
		if a.Client {
			return -1
		}
		return 1
	}
	return cmp.Compare(a.Seq, b.Seq)
}

// Next returns the asks that may proceed now. asks must be sorted by Order. short
// is how many bytes the first ask that has to wait for memory still needs, 0 if
// none has to. Asks behind it get no memory before it does.
func Next(r Capacity, asks []Ask) (granted []int, short int64) {
	for n, a := range asks {
		switch {
		case a.Slow && r.Places <= 0: // later asks that are not slow may proceed
			continue
		case a.Memory > 0 && short > 0:
			continue
		case a.Memory > 0 && a.Memory > r.Free:
			short = a.Memory - r.Free
			continue
		}
		granted = append(granted, n)
		r.Free -= a.Memory
		if a.Slow {
			r.Places--
		}
	}
	return granted, short
}

// Sleeper is an instance that can be pushed down the ladder. The caller omits
// instances that anything holds (a lease, a snooze, a transition).
type Sleeper struct {
	State     power.Instance // only paused and reclaimed instances can go deeper
	Holds     int64          // bytes
	Used      time.Time      // last use
	Reclaim   bool           // its memory can be pushed out
	Hibernate bool           // it can be saved to disk
}

// deeper returns the next state down the ladder for s; empty if there is none.
func (s Sleeper) deeper() power.Instance {
	switch {
	case s.Holds <= 0:
	case s.State == power.Paused && s.Reclaim:
		return power.Reclaimed
	case (s.State == power.Paused || s.State == power.Reclaimed) && s.Hibernate:
		return power.Hibernated
	}
	return ""
}

// Push returns which sleeper to push one step down, and to which state, in order
// to free short bytes. to is empty if no sleeper should be pushed. Steps from
// which a wake is cheap come first: every sleeper that can be reclaimed is,
// before any is saved to disk. Within each step the least recently used sleeper
// comes first. If all sleepers together do not hold enough, none is pushed.
func Push(short int64, list []Sleeper) (n int, to power.Instance) {
	if short <= 0 {
		return 0, ""
	}
	holds := int64(0)
	var can []int
	for n, s := range list {
		if s.deeper() != "" {
			holds += s.Holds
			can = append(can, n)
		}
	}
	if holds < short {
		return 0, ""
	}
	n = slices.MinFunc(can, func(a, b int) int {
		x, y := list[a], list[b]
		if dx, dy := x.deeper(), y.deeper(); dx != dy {
			if dx == power.Reclaimed {
				return -1
			}
			return 1
		}
		return x.Used.Compare(y.Used)
	})
	return n, list[n].deeper()
}
