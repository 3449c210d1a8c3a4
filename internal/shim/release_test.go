package shim_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// TestRelease checks that a port refuses clients after its program has closed it
// and continues to run, that it serves clients once the program binds it again, and
// that clients wait for the next run once the program has ended. Ports that are
// open, or have not been bound yet, are not affected.
func TestRelease(t *testing.T) {
	for _, replaced := range []bool{false, true} {
		t.Run(fmt.Sprintf("the shim was replaced %v", replaced), func(t *testing.T) {
			b := newBench(t).start()
			b.checkHandoff()
			addr, dir := freeAddr(t, "tcp", "127.0.0.1"), t.TempDir()
			name := func(n int) string { return filepath.Join(dir, fmt.Sprint(n)) }
			step := func(n int) {
				errtest.None(t, os.WriteFile(name(n), nil, 0o600))
			}
			s, fd := b.begin(b.handoff("a", 1, addr, fmt.Sprintf(
				"await %s\ntcp4 a\nbind a %s\nawait %s\nclose a\ntcp4 c\nbind c 127.0.0.1:0\nawait %s\ntcp4 b\nbind b %s\nserve b",
				name(1), addr, name(2), name(3), addr)))
			release := func(when string, want ...string) {
				t.Helper()
				if got, err := b.c.Release(waittest.Context(t), "a", []string{addr}); err != nil || !slices.Equal(got, want) {
					t.Errorf("%s it releases %v, %v; want %v", when, got, err, want)
				}
			}
			release("before the bind")
			step(1)
			b.waitText(b.logPath("a"), "a=kept4;")
			release("while it is open")
			step(2)
			b.waitText(b.logPath("a"), "c=own;")
			if replaced {
				b.dieTogether(fd)
				b.start()
			}
			release("after it was closed", addr)
			release("again")
			if c, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
				if err == nil {
					c.Close()
				}
				t.Errorf("a connection to the closed port: %v, want it refused", err)
			}
			step(3)
			b.waitText(b.logPath("a"), "b=")
			var line string
			for end := time.Now().Add(waitLimit); line == "" && time.Now().Before(end); <-time.After(time.Millisecond) {
				if c, err := net.Dial("tcp", addr); err == nil { // the program may not listen yet
					line, _ = bufio.NewReader(c).ReadString('\n')
					c.Close()
				}
			}
			if line != "served\n" {
				t.Errorf("after the second bind it answers %q", line)
			}
			release("while it is open again")
			errtest.None(t, syscall.Kill(s.PID, syscall.SIGKILL))
			b.exit("a", 1)
			c, err := net.DialTimeout("tcp", addr, waitLimit)
			if err != nil {
				t.Fatalf("after the end: %v, want that the client waits", err)
			}
			c.Close()
		})
	}
}
