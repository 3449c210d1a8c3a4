package microvm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
)

// console returns the content of an instance's console file.
func (b *bench) console(id string) string {
	b.t.Helper()
	path, err := b.Console(b.t.Context(), id)
	if err != nil {
		b.t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		b.t.Fatal(err)
	}
	return string(text)
}

// guestWrites is the text that testdata/guest writes to a file.
const guestWrites = "by a guest"

// TestConsole checks that the output on a guest's console can be read while the
// guest runs, after its QEMU has ended, and until the instance is removed, and that
// the reason for its end includes it.
func TestConsole(t *testing.T) {
	b := newBench(t, nil)
	b.start("con", "guest", "serve", ":80")
	errtest.Get(b.Exec(t.Context(), "con", instance.Command{Command: []string{"guest", "write", "/dev/ttyS0"}}))(t)
	until(t, "what was written to the console is there", func() bool { return strings.Contains(b.console("con"), guestWrites) })
	go b.Exec(t.Context(), "con", instance.Command{Command: []string{"guest", "panic"}}) // returns when the guest ends
	if e := b.exit(); !strings.Contains(e.Machine, "Kernel panic") {
		t.Errorf("exit %+v", e)
	}
	b.clean("con")
	text := b.console("con")
	for _, want := range []string{"lull: run 1 boots at ", "by a guest", "Kernel panic"} {
		if strings.Count(text, want) != 1 {
			t.Errorf("%q is not there once: %q", want, text)
		}
	}
	errtest.None(t, b.Forget(t.Context(), "con"))
	if left, err := os.ReadDir(b.consoles()); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

// TestConsoleIsBounded checks that a guest that prints forever fills no more than
// two files.
func TestConsoleIsBounded(t *testing.T) {
	r := &Runtime{cfg: Config{Dir: t.TempDir(), LookLimit: time.Second}}
	line := []byte(strings.Repeat("x", 1<<10-1) + "\n")
	for range 4 * consoleKept / len(line) {
		errtest.None(t, r.keepConsole("full", line))
	}
	for _, name := range []string{"full", "full.1"} {
		st, err := os.Stat(filepath.Join(r.consoles(), name))
		if err != nil || st.Size() > consoleKept || st.Size() == 0 {
			t.Errorf("%s: %+v, %v", name, st, err)
		}
	}
	errtest.None(t, r.dropConsole("full"))
	if left, err := os.ReadDir(r.consoles()); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}
