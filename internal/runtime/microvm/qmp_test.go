package microvm

import (
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"testing"
)

// TestMonitorEndsWhileDialed checks that dialing reports that QEMU has ended
// meanwhile, whether a read or a write notices it.
func TestMonitorEndsWhileDialed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qmp")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	for range 300 {
		m, err := dialMonitor(t.Context(), path, nil, func(string, json.RawMessage) {})
		if err == nil {
			m.close()
			t.Fatal("connected to a QEMU that has ended")
		}
		if !errors.Is(err, errMonitorEnded) {
			t.Fatal(err)
		}
	}
}
