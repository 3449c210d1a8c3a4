// Package wall compares the machine's clocks and reports a suspend of the
// machine and a step of its wall clock as events.
//
// Three clocks are read together: CLOCK_MONOTONIC stops while the machine is
// suspended, CLOCK_BOOTTIME continues, and the wall clock continues and can be
// set. Boot time minus monotonic time grows only by suspends; wall time minus
// boot time changes only when the clock is set (slewing moves all three alike).
// Small changes add up: nothing is lost below the tolerance.
//
// It guarantees that a Detector reports each suspend and each step once, with
// its length. It cannot see what no clock of the machine shows: a hypervisor
// that stops a whole guest stops all three, and only the correction of the wall
// clock afterwards is seen, as a step. A testing/synctest bubble controls
// time.Now but not these clocks, so tests inject the reader.
package wall

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Tolerance is the smallest change that a Detector reports by default. Reading
// three clocks one after the other takes some microseconds, or some
// milliseconds if the scheduler intervenes.
const Tolerance = time.Second

// Reading contains the three clocks at one moment.
type Reading struct {
	Wall time.Time     // without a monotonic part
	Boot time.Duration // CLOCK_BOOTTIME: since boot, including suspends
	Mono time.Duration // CLOCK_MONOTONIC: since boot, excluding suspends
}

// Read reads the clocks of this machine.
func Read() (Reading, error) {
	var best Reading
	// The two clocks since boot are read around the wall clock. Of a few tries
	// the one with the shortest time in between is used.
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

// Since returns the time between two readings of one boot. It includes suspends
// and ignores changes of the wall clock.
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
	// By is the time for which the machine slept (positive), or by which the
	// wall clock was set forward (positive) or back (negative).
	By time.Duration
	// After and Before are the readings around the event.
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
	slept time.Duration // boot minus monotonic, as reported so far
	wall  time.Duration // wall minus boot, as reported so far
}

// Observe takes the next reading and returns what happened since the previous
// one, a suspend before a step. The first reading only sets the baseline. So
// does one whose boot time is before the previous one's: the machine was
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
