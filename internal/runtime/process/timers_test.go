package process

import (
	"os"
	"path/filepath"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
)

// TestTimersUnknown checks that timers are unknown, and not absent, if the
// processes of a run cannot be listed.
func TestTimersUnknown(t *testing.T) {
	f := &Fixture{Proc: t.TempDir()}
	errtest.None(t, os.MkdirAll(filepath.Join(f.Proc, "7", "stat"), 0o700)) // a directory, which cannot be read
	w := f.Work("w", instance.Identity{PID: 7, Start: 1})
	w.kin = map[int]uint64{7: 1}
	if timers, err := w.Timers(); err == nil {
		t.Errorf("the timers are %v, and no error says that they are unknown", timers)
	}
}
