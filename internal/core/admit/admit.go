// Package admit decides, on a host with bounded memory and processors, which
// starts and wakes may proceed now, and which sleeping instances give up memory
// for the others.
//
// Memory is never promised beyond the budget. No ask is overtaken by a later
// one that waits for the same resource with no more urgency. Only sleeping
// instances are pushed down, and never in vain. The package is pure: the host
// daemon measures, waits and pushes.
package admit

import (
	"cmp"
	"slices"
	"time"

	"lull/internal/core/power"
)

// Ask is a start or a wake that waits for leave.
type Ask struct {
	Memory int64  // bytes that it takes beyond what it holds
	Slow   bool   // a boot or a restore from disk, which takes one of the places
	Client bool   // a client waits for it
	Seq    uint64 // order of arrival
}

// Capacity is the available capacity.
type Capacity struct {
	Free   int64 // bytes; negative when more is held than the budget has
	Places int   // slow ones that may begin now
}

// Order compares two asks: those with a waiting client come first, then the
// older ones.
func Order(a, b Ask) int {
	if a.Client != b.Client {
		if a.Client {
			return -1
		}
		return 1
	}
	return cmp.Compare(a.Seq, b.Seq)
}

// Next returns the asks, given in order, that may proceed now. short is how
// many bytes the first ask that must wait for memory lacks, 0 if there is none.
// No ask behind it takes memory before it does.
func Next(r Capacity, asks []Ask) (granted []int, short int64) {
	for n, a := range asks {
		switch {
		case a.Slow && r.Places <= 0: // asks that need no place may proceed
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

// Sleeper is an instance that could be pushed down the ladder. Whatever holds
// it (a lease, a snooze, a transition) keeps it out of the list.
type Sleeper struct {
	State     power.Instance // only paused and reclaimed ones go deeper
	Holds     int64          // bytes
	Used      time.Time      // last use
	Reclaim   bool           // its memory can be pushed out
	Hibernate bool           // it can be saved to disk
}

// deeper is the next step down of s; empty for none.
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

// Push returns which sleeper goes one step down, and to which state, to free
// short bytes; to is empty if none should. What wakes cheaply is used first:
// every sleeper that can be reclaimed is, before one is saved to disk, and
// within each step the least recently used goes first. If all of them together
// do not hold enough, none is pushed.
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
