// Package wall compares the machine's clocks, and reports a suspend of the
// machine or a step of its wall clock as an event.
//
// It reads three clocks together. CLOCK_MONOTONIC stops while the machine is
// suspended, CLOCK_BOOTTIME does not, and the wall clock does not either but can
// be set. Boot time minus monotonic time therefore grows only by suspends, and
// wall time minus boot time changes only when the clock is set (slewing moves all
// three alike). Changes below the tolerance add up, so none is lost.
//
// It guarantees that a Detector reports each suspend and each step once, with its
// length. A Detector cannot see what none of the clocks shows: a hypervisor that
// stops a whole guest stops all three, and only the correction of the wall clock
// afterwards appears, as a step. A testing/synctest bubble controls time.Now but
// not these clocks, so tests provide the readings.
package wall

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Tolerance is the default of the smallest change that a Detector reports.
// Reading the three clocks takes some microseconds, or some milliseconds if the
// scheduler intervenes.
const Tolerance = time.Second

// Reading contains the three clocks at one moment.
type Reading struct {
	Wall time.Time     // without a monotonic reading
	Boot time.Duration // CLOCK_BOOTTIME: since boot, including suspends
	Mono time.Duration // CLOCK_MONOTONIC: since boot, excluding suspends
}

// Read reads the clocks of this machine.
func Read() (Reading, error) {
	var best Reading
	// The two clocks since boot are read before and after the wall clock. Of a
	// few attempts, the one with the shortest time in between is used.
	width := time.Duration(1<<63 - 1)
	for range 3 {
		mono, err := clock(unix.CLOCK_MONOTONIC)
		if err != nil {
			return Reading{}, err
		}
		boot, err := clock(unix.CLOCK_BOOTTIME)
		if err != nil {
			return Reading{}, err
		}
		now := time.Now().Round(0)
		end, err := clock(unix.CLOCK_MONOTONIC)
		if err != nil {
			return Reading{}, err
		}
		if end-mono < width {
			width = end - mono
			best = Reading{Wall: now, Boot: boot, Mono: mono}
		}
	}
	return best, nil
}

func clock(id int32) (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		return 0, fmt.Errorf("cannot read clock %d: %w", id, err)
	}
	return time.Duration(ts.Nano()), nil
}

// Since returns the time between two readings of the same boot. It includes
// suspends and is not affected by changes of the wall clock.
func (r Reading) Since(earlier Reading) time.Duration { return r.Boot - earlier.Boot }

// Kind is the kind of an event of the clocks.
type Kind string

// The kinds of events.
const (
	Suspended Kind = "suspended" // the machine slept
	Stepped   Kind = "stepped"   // the wall clock was set
)

// Event is something that happened between two readings.
type Event struct {
	Kind Kind
	// By is how long the machine was suspended (positive), or by how much the
	// wall clock was set forward (positive) or back (negative).
	By time.Duration
	// After and Before are the readings between which the event happened.
	After, Before Reading
}

func (e Event) String() string {
	switch {
	case e.Kind == Suspended:
		return fmt.Sprintf("the machine was suspended for %v", e.By)
	case e.By < 0:
		return fmt.Sprintf("the wall clock was set back by %v", -e.By)
	}
	return fmt.Sprintf("the wall clock was set forward by %v", e.By)
}

// Detector finds events in a series of readings. The zero value is ready for
// use. It must be used by one goroutine only.
type Detector struct {
	Tolerance time.Duration // smallest reported change; 0 means the package's Tolerance

	begun bool
	last  Reading
	slept time.Duration // boot minus monotonic time up to the last report
	wall  time.Duration // wall minus boot time up to the last report
}

// Observe takes the next reading and returns what happened since the previous
// one, a suspend before a step. The first reading only sets the baseline. So does
// a reading whose boot time is before the previous one's, because the machine was
// rebooted.
func (d *Detector) Observe(r Reading) []Event {
	slept, wall := r.Boot-r.Mono, time.Duration(r.Wall.UnixNano())-r.Boot
	before := d.last
	d.last = r
	if !d.begun || r.Boot < before.Boot {
		d.begun, d.slept, d.wall = true, slept, wall
		return nil
	}
	limit := d.Tolerance
	if limit <= 0 {
		limit = Tolerance
	}
	var events []Event
	if by := slept - d.slept; by >= limit {
		d.slept = slept
		events = append(events, Event{Kind: Suspended, By: by, After: before, Before: r})
	}
	if by := wall - d.wall; by >= limit || by <= -limit {
		d.wall = wall
		events = append(events, Event{Kind: Stepped, By: by, After: before, Before: r})
	}
	return events
}
