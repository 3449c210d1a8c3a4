// Package whentest brings tests to every change of every clock on a wall:
// where days are skipped, come twice, or begin at no midnight.
package whentest

import (
	_ "embed"
	"strings"
	"testing"
	"time"
)

// names are those of all zones that differ, one a line.
//
//go:embed zones.txt
var names string

// Changes calls yield for each moment in [from, to) at which a zone sets its
// clock.
func Changes(t testing.TB, from, to time.Time, yield func(zone *time.Location, at time.Time)) {
	t.Helper()
	for name := range strings.FieldsSeq(names) {
		zone, err := time.LoadLocation(name)
		if err != nil {
			t.Fatal(err)
		}
		for at := from; ; {
			_, end := at.In(zone).ZoneBounds()
			if end.IsZero() || !end.Before(to) {
				break
			}
			at = end
			yield(zone, at)
		}
	}
}
