package microvm

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/protocol/guest"
)

// answering returns a monitor of a fake QEMU that accepts every command.
func answering(t *testing.T) *monitor {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qmp")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		for sc := bufio.NewScanner(c); sc.Scan(); {
			var q struct {
				Execute string
				ID      int
			}
			if json.Unmarshal(sc.Bytes(), &q) != nil {
				return
			}
			answer := "{}"
			if q.Execute == "query-status" {
				answer = `{"status": "paused"}`
			}
			fmt.Fprintf(c, `{"return": %s, "id": %d}`+"\n", answer, q.ID)
		}
	}()
	m, err := dialMonitor(t.Context(), path, nil, func(string, json.RawMessage) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.close)
	return m
}

// TestHeldWithoutAnswer checks that a guest is frozen even if it does not answer
// and the probe takes all of the available time.
func TestHeldWithoutAnswer(t *testing.T) {
	w := (&Runtime{cfg: Config{Dir: t.TempDir(), LookLimit: 50 * time.Millisecond}, log: slog.New(slog.DiscardHandler)}).newWork("x")
	defer w.cancel()
	near, far := ends(t)
	go func() { // reads requests without answering
		b := make([]byte, 4096)
		for {
			if _, err := far.Read(b); err != nil {
				return
			}
		}
	}()
	w.peer, w.mon = guest.NewPeer(near), answering(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := w.Freeze(ctx); err != nil || !w.isFrozen() {
		t.Errorf("it was not held: %v", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lastHealthErr == nil {
		t.Error("what it did not say is known")
	}
}
