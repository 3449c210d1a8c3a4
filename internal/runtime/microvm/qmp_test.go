package microvm

import (
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"testing"
)

// TestMonitorEndsWhileDialed checks that a QEMU which ends while it is being
// connected to is recognized, whether the end is noticed by a read or a write.
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
