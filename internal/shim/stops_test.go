package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/platform/proc"
)

// TestStops checks that a process that waits in the kernel counts as stopped if a
// SIGSTOP is pending, because it will stop when that wait is over.
func TestStops(t *testing.T) {
	root := t.TempDir()
	s := &Shim{proc: proc.At(root)}
	for n, c := range []struct {
		state   string
		pending string
		want    bool
	}{{"T", "0000000000000000", true}, {"S", "0000000000000000", false}, {"D", "0000000000040000", true}, {"D", "0000000000004000", false}} {
		pid := 100 + n
		dir := filepath.Join(root, strconv.Itoa(pid))
		errtest.None(t, os.Mkdir(dir, 0o700))
		stat := fmt.Sprintf("%d (sleep) %s 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 77 0 0", pid, c.state)
		status := "SigPnd:\t0000000000000000\nShdPnd:\t" + c.pending + "\n"
		for name, text := range map[string]string{"stat": stat, "status": status} {
			errtest.None(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
		}
		if got := s.stops(pid); got != c.want {
			t.Errorf("%s with %s pending: stops %t", c.state, c.pending, got)
		}
	}
	if s.stops(99) {
		t.Error("one that has ended stops")
	}
}
