package main

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"lull/internal/cli/term"
)

// TestServerPortInUse checks that a server whose port is in use fails before it
// prints a token or creates its data directory.
func TestServerPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	data := filepath.Join(t.TempDir(), "data")
	out, errs, code := lullWith(nil, "server", "--data", data, "--listen", l.Addr().String())
	if code != term.ExitFailed || out != "" || errs == "" {
		t.Errorf("ended with %d: %q %q", code, out, errs)
	}
	if all, _ := os.ReadDir(data); len(all) > 0 {
		t.Errorf("made %v", all)
	}
}
