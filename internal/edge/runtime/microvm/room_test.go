package microvm

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"lull/internal/instance"
)

// TestNoRoom: a QEMU that a full disk ended says where, and another end does not
// speak of disks.
func TestNoRoom(t *testing.T) {
	dir := t.TempDir()
	for sig, want := range map[syscall.Signal]string{
		syscall.SIGBUS:  "QEMU was killed by signal 7 (bus error): there is no room for its memory on the file system of " + dir,
		syscall.SIGKILL: "QEMU was killed by signal 9 (killed)",
		syscall.SIGSEGV: "QEMU was killed by signal 11 (segmentation fault)",
	} {
		w := (&Runtime{cfg: Config{Dir: dir}}).newWork("a")
		w.rec.Machine.Memory = 128 << 20
		w.status, w.exited = syscall.WaitStatus(sig), true
		e := w.outcome()
		if e.Signal != int(sig) || !strings.HasPrefix(e.Machine, want) || strings.Contains(e.Machine, "128 MiB") != (sig == syscall.SIGBUS) {
			t.Errorf("%v: %+v", sig, e)
		}
		err := w.noBoot()
		if byItself := sig == syscall.SIGSEGV; errors.Is(err, errNoBoot) != byItself || strings.Contains(err.Error(), want) == byItself {
			t.Errorf("%v while it boots: %v", sig, err)
		}
		var ended *instance.EndedError
		if errors.As(err, &ended) != (sig == syscall.SIGKILL) || ended != nil && ended.Exit.Signal != int(sig) {
			t.Errorf("%v while it boots: %+v", sig, ended)
		}
		w.cancel()
	}
}

// TestShortage: a state that QEMU gives up on because this machine has no room for
// it is good, and stays; one that it cannot read is not.
func TestShortage(t *testing.T) {
	for said, short := range map[string]bool{
		"qemu-system-x86_64: cannot set up guest memory 'ram': Cannot allocate memory": true,
		"qemu-system-x86_64: Failed to allocate memory":                                true,
		"qemu-system-x86_64: error while loading state: No space left on device":       true,
		"qemu-system-x86_64: load of migration failed: Invalid argument":               false,
		"": false,
	} {
		r := &Runtime{cfg: Config{Dir: t.TempDir()}}
		w := r.newWork("a")
		w.status, w.exited = syscall.WaitStatus(1<<8), true // exited with 1
		close(w.gone)
		if err := errors.Join(os.MkdirAll(r.dir("a"), 0o700), os.WriteFile(w.path(errorsFile), []byte(said), 0o600)); err != nil {
			t.Fatal(err)
		}
		err := w.refused(t.Context(), errMonitorEnded)
		var unusable *instance.SnapshotError
		if errors.As(err, &unusable) == short || !strings.Contains(err.Error(), said) || strings.Contains(err.Error(), "tried again") != short {
			t.Errorf("%q: %v", said, err)
		}
		w.cancel()
	}
}
