package host

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
)

// TestOneFile runs a host from a folder with a single file, lull. Without
// embedded helpers, lull must act as its own supervisor; with them, it must
// unpack them. In both cases a connection must start a program that was stopped
// automatically.
func TestOneFile(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		from     string // below LULL_BIN_DIR
		unpacked bool
	}{"plain": {from: "lull"}, "bundle": {from: "one/lull", unpacked: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			daemontest.Build(t)
			from := daemontest.Program("lull")
			if c.unpacked {
				dir := os.Getenv("LULL_BIN_DIR")
				if dir == "" {
					t.Skip("needs LULL_BIN_DIR, where make programs builds it")
				}
				from = filepath.Join(dir, c.from)
			}
			dir, err := os.MkdirTemp("", "one")
			errtest.None(t, err)
			t.Cleanup(func() { os.RemoveAll(dir) })
			one := filepath.Join(dir, "lull")
			errtest.None(t, errors.Join(os.Chmod(dir, 0o755), programtest.Copy(from, one)))
			d := daemontest.Start(t, daemontest.Config{Lull: one, Args: []string{"--probe", "200ms"}})
			s, addr := web(t, "web", false)
			s.PauseAfter, s.StopAfter = daemontest.Seconds(time.Second), daemontest.Seconds(time.Second)
			d.Launch(s)
			d.Await("web", "stopped")
			mustAnswer(t, addr)
			exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", d.ShimPID()))
			helper := filepath.Join(d.Dir, "data", "bin", "lull-shim")
			switch {
			case err != nil:
				t.Error(err)
			case c.unpacked:
				if exe != helper {
					t.Errorf("the supervisor is %s, want %s", exe, helper)
				}
				a, aerr := os.ReadFile(helper)
				b, berr := os.ReadFile(filepath.Join(d.Dir, "data", "bin", "lull-harness"))
				if err := errors.Join(aerr, berr); err != nil || !bytes.HasPrefix(a, []byte("\x7fELF")) || !bytes.HasPrefix(b, []byte("\x7fELF")) {
					t.Errorf("unpacked: %v", err)
				}
			case exe != one:
				t.Errorf("the supervisor is %s, want lull itself, %s", exe, one)
			default:
				if _, err := os.Stat(filepath.Dir(helper)); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("something was unpacked: %v", err)
				}
			}
		})
	}
}
