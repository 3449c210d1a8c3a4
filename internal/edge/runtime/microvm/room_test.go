package microvm

import (
	"errors"
	"strings"
	"syscall"
	"testing"
)

// TestNoRoom: a QEMU that a full disk ended says where, and another end does not
// speak of disks.
func TestNoRoom(t *testing.T) {
	dir := t.TempDir()
	for sig, want := range map[syscall.Signal]string{
		syscall.SIGBUS:  "QEMU was killed by signal 7 (bus error): there is no room for its memory on the file system of " + dir,
		syscall.SIGKILL: "QEMU was killed by signal 9 (killed)",
	} {
		w := (&Runtime{cfg: Config{Dir: dir}}).newWork("a")
		w.rec.Machine.Memory = 128 << 20
		w.status, w.exited = syscall.WaitStatus(sig), true
		e := w.outcome()
		if e.Signal != int(sig) || !strings.HasPrefix(e.Machine, want) || strings.Contains(e.Machine, "128 MiB") != (sig == syscall.SIGBUS) {
			t.Errorf("%v: %+v", sig, e)
		}
		if err := w.noBoot(); strings.Contains(err.Error(), want) != (sig == syscall.SIGBUS) || errors.Is(err, errNoBoot) == (sig == syscall.SIGBUS) {
			t.Errorf("%v while it boots: %v", sig, err)
		}
		w.cancel()
	}
}
