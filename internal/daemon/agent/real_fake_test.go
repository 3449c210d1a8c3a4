package agent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// stopOnly is a cloud that notes when it was asked to stop.
type stopOnly struct{ stopped chan time.Time }

func (c *stopOnly) Describe(context.Context) (Instance, error)         { return Instance{}, nil }
func (c *stopOnly) WriteTags(context.Context, map[string]string) error { return nil }
func (c *stopOnly) Terminate(context.Context) error                    { return nil }
func (c *stopOnly) Stop(context.Context, bool) (fallback string, _ error) {
	c.stopped <- time.Now()
	return "", nil
}

// pty opens a terminal of the nook.
func (n *nook) pty(t *testing.T) (master, slave *os.File) {
	t.Helper()
	base := fmt.Sprintf("/proc/%d/root/dev", n.pid)
	open := func(path string) *os.File {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			t.Fatalf("cannot open %s: %v", path, err)
		}
		f := os.NewFile(uintptr(fd), path)
		t.Cleanup(func() { f.Close() })
		return f
	}
	master = open(base + "/pts/ptmx")
	raw, err := master.SyscallConn()
	must(t, err)
	var num int
	var cerr error
	must(t, raw.Control(func(fd uintptr) {
		if cerr = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); cerr == nil {
			num, cerr = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}))
	must(t, cerr)
	return master, open(fmt.Sprintf("%s/pts/%d", base, num))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually2 waits until ok holds, for at most d.
func eventually2(t *testing.T, what string, d time.Duration, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(d)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen", what)
		}
		<-time.After(100 * time.Millisecond)
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
