// Package whentest lets tests visit every change of the offset in every time
// zone, including those that skip or repeat a day, or at which a day does not
// begin at midnight.
package whentest

import (
	_ "embed"
	"strings"
	"testing"
	"time"
)

// names lists the names of all zones that differ from each other, one per line.
//
//go:embed zones.txt
var names string

// Changes calls yield for each moment in [from, to) at which a zone changes its
// offset.
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
