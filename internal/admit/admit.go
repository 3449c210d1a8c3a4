// Package admit decides, on a host whose memory and whose processors are
// bounded, which starts and wakes may go on now, and which sleeping instance
// gives memory up for those that may not.
//
// It guarantees that memory is never promised beyond the budget, that nobody is
// overtaken by one that came later and waits for the same thing with no more
// urgency, that only what sleeps is pushed down, and that nothing is pushed in
// vain. It is pure: measuring, waiting and pushing are the host daemon's.
package admit

import (
	"cmp"
	"slices"
	"time"

	"lull/internal/power"
)

// Ask is a start or a wake that waits for leave.
type Ask struct {
	Memory int64  // bytes that it takes beyond what it holds
	Slow   bool   // a boot or a restore from disk, which takes one of the places
	Client bool   // somebody waits for it
	Seq    uint64 // order of arrival
}

// Room is what there is to give.
type Room struct {
	Free   int64 // bytes; negative when more is held than the budget has
	Places int   // slow ones that may begin now
}

// Order says which of two asks goes first: those that somebody waits for, then
// the older one.
func Order(a, b Ask) int {
	if a.Client != b.Client {
		if a.Client {
			return -1
		}
		return 1
	}
	return cmp.Compare(a.Seq, b.Seq)
}

// Next picks, of asks in their order, those that may go on now. short is how
// many bytes the first one lacks that has to wait for memory, 0 when none has;
// nobody behind it takes memory before it does.
func Next(r Room, asks []Ask) (granted []int, short int64) {
	for n, a := range asks {
		switch {
		case a.Slow && r.Places <= 0: // who needs no place may go on
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

// Push picks who goes one step down, and to which state, to free short bytes;
// to is empty when nobody should. What wakes cheaply is used up first: all that
// can be reclaimed are, before one is saved to disk, and on each step the one
// that was used longest ago goes first. When all of them together do not hold
// enough, nobody is disturbed.
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
