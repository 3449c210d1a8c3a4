package worker

import (
	"fmt"
	"slices"
	"time"

	"lull/internal/core/idle"
)

// HibernatePays reports whether the next pause is expected to be short enough for
// hibernation, judged by the median of earlier pauses, and returns the reason as
// text.
func HibernatePays(pauses []time.Duration) (bool, string) {
	if len(pauses) < leastPauses {
		return false, fmt.Sprintf("%d of its pauses are known, and %d are needed to predict their length", len(pauses), leastPauses)
	}
	sorted := slices.Sorted(slices.Values(pauses))
	expected := sorted[len(sorted)/2]
	how := "at most"
	if expected > HibernateWithin {
		how = "more than"
	}
	return expected <= HibernateWithin, fmt.Sprintf("its last %d pauses were %s long (median), %s %s", len(pauses), idle.Human(expected), how, idle.Human(HibernateWithin))
}

// Parameters of pause_action auto.
const (
	// HibernateWithin is the longest pause for which hibernation pays. EC2 bills an
	// instance while its memory is written; in return, the resume is faster. After a
	// weekend, nobody needs what was in memory.
	HibernateWithin = 48 * time.Hour
	// leastPauses is the minimum number of pauses for a prediction, and
	// MostPauses the maximum number considered.
	leastPauses = 3
	MostPauses  = 20
)
