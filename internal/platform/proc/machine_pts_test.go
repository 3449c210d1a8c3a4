package proc

import (
	"testing"
	"time"
)

// TestOwnWritesCover checks which write times of a terminal are attributed to a
// write by lull. The kernel's clock for terminals lags, and moves in steps of
// eight seconds.
func TestOwnWritesCover(t *testing.T) {
	at := time.Unix(1000, 1_000_000)
	var own OwnWrites
	own.Note(at)
	for _, c := range []struct {
		mtime int64
		want  bool
	}{{998, false}, {999, true}, {1000, true}, {1008, true}, {1009, false}} {
		if got := own.covers(c.mtime); got != c.want {
			t.Errorf("a write time of %d after a write at %v is lull's: %t, want %t", c.mtime, at, got, c.want)
		}
	}
}
