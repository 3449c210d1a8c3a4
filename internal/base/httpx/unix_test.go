package httpx

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestUnixSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "httpx-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "host.sock")
	c, err := NewClient("unix://" + path)
	if err != nil {
		t.Fatal(err)
	}
	err = c.Do(t.Context(), "GET", "/", nil, nil)
	if _, ok := errors.AsType[*UnreachableError](err); !ok || !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "cannot reach unix://"+path) {
		t.Errorf("without a server: %v", err)
	}
	l, err := ListenUnix(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(path); err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if _, err := ListenUnix(path, 0o600); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), path) {
		t.Errorf("a second listener: %v", err)
	}
	s := &Server{Name: "host", Listener: l, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, ok := PeerOf(r.Context())
		if !ok {
			WriteProblem(w, r, Problemf(403, "no peer"))
			return
		}
		WriteJSON(w, 200, p)
	})}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	var p Peer
	if err := c.Do(t.Context(), "GET", "/", nil, &p); err != nil || p.PID != int32(os.Getpid()) || p.UID != uint32(os.Getuid()) || p.GID != uint32(os.Getgid()) {
		t.Errorf("peer %+v, %v", p, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	c.HTTP.CloseIdleConnections()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket file is left: %v", err)
	}
}

func TestDeadSocketIsReplaced(t *testing.T) {
	dir, err := os.MkdirTemp("", "httpx-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	first, err := ListenUnix(path, 0o666)
	if err != nil {
		t.Fatalf("over a dead socket: %v", err)
	}
	if first.Addr().String() != path {
		t.Error(first.Addr())
	}
	os.Remove(path)
	second, err := ListenUnix(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the first listener removed the second's file: %v", err)
	}
	second.Close()
	os.WriteFile(path, []byte("precious"), 0o600)
	if _, err := ListenUnix(path, 0o600); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("over a file: %v", err)
	}
	if _, err := ListenUnix(filepath.Join(dir, strings.Repeat("x", 108)), 0o600); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("a long path: %v", err)
	}
}

func TestNewClient(t *testing.T) {
	for target, base := range map[string]string{
		"unix:///run/lull/host.sock":  "http://lull",
		"http://127.0.0.1:7070":       "http://127.0.0.1:7070",
		"https://lull.example/fleet/": "https://lull.example/fleet",
	} {
		if c, err := NewClient(target); err != nil || c.base != base {
			t.Errorf("%s: %+v, %v", target, c, err)
		}
	}
	for _, target := range []string{"", "host.sock", "unix://host.sock", "unix:host.sock", "ftp://x", "http://", "http://u:p@x", "http://x?y", "http://[::1", "unix:///a?b"} {
		if _, err := NewClient(target); err == nil || !strings.HasPrefix(err.Error(), "cannot use the address") {
			t.Errorf("%q: %v", target, err)
		}
	}
}
