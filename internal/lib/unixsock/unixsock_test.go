package unixsock

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"lull/internal/lib/errtest"
)

// short returns a temporary directory with a name short enough for socket paths.
func short(t *testing.T) string {
	dir, err := os.MkdirTemp("", "sock-")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestModeAndPeer(t *testing.T) {
	for _, mode := range []os.FileMode{0o600, 0o666} {
		path := filepath.Join(short(t), "host.sock")
		l, err := Listen(path, mode)
		errtest.None(t, err)
		if info, err := os.Lstat(path); err != nil || info.Mode() != os.ModeSocket|mode {
			t.Errorf("%v, %v", info.Mode(), err)
		}
		if _, err := Listen(path, mode); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), path) {
			t.Errorf("a second listener: %v", err)
		}
		c, err := net.Dial("unix", path)
		errtest.None(t, err)
		defer c.Close()
		for range 2 { // the second attempt must not have disturbed the first listener
			in, err := l.AcceptUnix()
			errtest.None(t, err)
			if p, err := PeerOf(in); err != nil || p != (Peer{os.Getuid(), os.Getgid(), os.Getpid()}) {
				t.Errorf("peer %+v, %v", p, err)
			}
			in.Close()
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket file is left: %v", err)
		}
	}
}

func TestDeadSocketIsReplaced(t *testing.T) {
	dir := short(t)
	path := filepath.Join(dir, "s")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	first, err := Listen(path, 0o666)
	if err != nil {
		t.Fatalf("over a dead socket: %v", err)
	}
	if first.Addr().String() != path {
		t.Error(first.Addr())
	}
	os.Remove(path)
	second, err := Listen(path, 0o600)
	errtest.None(t, err)
	first.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the first listener removed the second's file: %v", err)
	}
	second.Close()
	os.WriteFile(path, []byte("precious"), 0o600)
	if _, err := Listen(path, 0o600); err == nil || errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("over a file: %v", err)
	}
	if b, err := os.ReadFile(path); string(b) != "precious" {
		t.Errorf("the file was changed: %q, %v", b, err)
	}
	if _, err := Listen(filepath.Join(dir, strings.Repeat("x", 108)), 0o600); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("a long path: %v", err)
	}
}
